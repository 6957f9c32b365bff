"""The model of a command line: how it is named, found, opened, and loaded."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from ..config import DRAFT_GROUP, EngineConfig
from ..config import settings as engine_settings
from ..errors import Cancelled, ConfigError, ModelFileError, MoegraphError, RequestError
from ..ggml.cuda import card_bytes
from ..ggml.free_memory import host_memory
from ..gguf.hub import get_mmproj
from ..gguf.hubnames import DEFAULT_QUANT, is_hub_name, parse_hub_name
from ..gguf.resolve import SHIPPED, resolve_draft, resolve_target
from ..loop.generated import room_after
from ..sampling import SamplingParams
from ..sources import read_sources
from ..text.tokenizer import Tokenizer, open_soon
from ..units import format_bytes
from . import ui

if TYPE_CHECKING:
    from ..arch import ModelFile
    from ..engine import Engine
    from ..placement.trace import Trace
    from ..text.chat.template import ChatTemplate
    from ..text.pictures import PictureReader

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
# Tokens that a tokenizer may add to a text: one at the beginning and one at the end.
_MAX_ADDED = 2
# Bytes for all but the weights: KV cache, buffers, the driver's own.
_FOR_CONTEXT = 3 << 29
# Settings that have no effect if every expert is resident.
_FOR_MISSES = ("profile", "profile_class", "policy", "miss", "host_pin", "host_mem")


class ModelTarget(click.ParamType[str]):
    """A model: the name of a shipped one, or a path; not checked before it is opened."""

    name = "text"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the shipped names that begin with the text; if none does, ask for file names."""
        names = [name for name in SHIPPED if incomplete and name.startswith(incomplete)]
        if names:
            return [CompletionItem(name) for name in names]
        return [CompletionItem(incomplete, type="file")]


MODEL_TARGET = ModelTarget()


def _named(_: click.Context, __: click.Parameter, text: str | None) -> str | None:
    """Return the TARGET that -hf stands for."""
    return None if text is None else str(parse_hub_name(text))


def hf_option(command: Decorated) -> Decorated:
    """Add -hf, which names a model on a hub as llama.cpp's does; its value is a TARGET."""
    return click.option(
        "-hf", "-hfr", "--hf-repo", "hf_repo", metavar="OWNER/REPO[:QUANT]", callback=_named,
        help="The model, instead of TARGET: a GGUF file of this repository on Hugging Face, "
        "downloaded at first use (default quantization: Q4_K_M, or what fits into memory).",
    )(command)  # fmt: skip


def model_options(command: Decorated) -> Decorated:
    """Add -m and -hf, in the place of the first argument."""
    return click.option(
        "-m", "--model", type=MODEL_TARGET, metavar="TARGET",
        help="The model, instead of the first argument.",
    )(hf_option(command))  # fmt: skip


def target_argument(command: Callable[..., None], is_needed: bool = True) -> Callable[..., None]:
    """Add the argument TARGET, -m and -hf to a command, which gets one model as `target`."""

    @functools.wraps(command)
    def run(target: str | None, **given: Any) -> None:
        named = option_target(given, target)
        del given["model"], given["hf_repo"]
        command(target=(require_target if is_needed else only_target)(target, named), **given)

    argument = click.argument("target", required=False, type=MODEL_TARGET, metavar="TARGET")
    return argument(model_options(run))


def option_target(given: Mapping[str, Any], *args: str | None) -> str | None:
    """Return the model of -m or -hf.

    One that a file or the environment names is a default: any on the command line, also one among
    the arguments, takes its place.
    """
    source = click.get_current_context().get_parameter_source
    named = [name for name in ("model", "hf_repo") if given[name]]
    typed = [name for name in named if source(name) is ParameterSource.COMMANDLINE]
    return only_target(*(given[name] for name in (typed if typed or any(args) else named)))


def only_target(*given: str | None) -> str | None:
    """Return the model that was given in one of several ways; None: in no way."""
    found = [target for target in given if target]
    if len(found) > 1:
        raise click.UsageError(f"give one model, not {' and '.join(found)}")
    return found[0] if found else None


def require_target(*given: str | None) -> str:
    """Return the model that was given in one of several ways."""
    found = only_target(*given)
    if found is None:
        raise click.UsageError(
            "no model; give a GGUF file, a shipped model's name, or -hf OWNER/REPO"
        )
    return found


@contextmanager
def _downloading() -> Iterator[tuple[ui.Bars, Callable[[str], None]]]:
    """Yield a bar for a download, and a function for lines between."""
    with ui.Bars() as bars:

        def say(line: str) -> None:
            bars.clear()
            ui.note(line)

        yield bars, say


def local_path(target: str | Path) -> Path:
    """Return the path of a model; one on a hub is downloaded first, with a bar on a terminal."""
    with _downloading() as (bars, say):
        return resolve_target(target, bars, say, memory_for_model)


def memory_for_model(cards: int | None = None) -> int:
    """Return the bytes of memory for a model: of the cards (default: all), and of the host."""
    n_bytes = card_bytes() if cards is None else cards
    return n_bytes + (host_memory().spare or 0) - _FOR_CONTEXT


def warn_beyond_training(engine: Engine, n_prompt: int) -> None:
    """Warn, before the work begins, of a prompt longer than the model's training length."""
    n_trained = engine.hparams.n_ctx_train
    if n_trained < n_prompt <= engine.n_ctx:
        ui.note(f"warning: {n_prompt} positions; the model was trained on only {n_trained}")


def warn_begun_twice(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Warn of a text that begins with the BOS that the tokenizer adds too; both stay.

    So does llama.cpp (`check_double_bos_eos` in src/llama-vocab.cpp).
    """
    if ids[1:2] == [tokenizer.bos] and tokenizer.encode("")[:1] == [tokenizer.bos]:
        ui.note(
            f"warning: the prompt begins with {tokenizer.decode(ids[1:2], special=True)}, and the "
            "model's vocabulary adds one: it now begins with two"
        )


def open_header(target: str | Path, device: str | None = None) -> ModelFile:
    """Open a model by name or path without loading its weights.

    device: the drivers of this device, or of a list, are opened meanwhile.
    """
    from ..arch import open_model

    path = local_path(target)
    if device and path.is_file():
        with suppress(MoegraphError):  # opening the device reports the error
            from ..ggml.device import wake

            for one in device.split(","):
                wake(one)
    return open_model(path)


def open_template(given: Mapping[str, Any], stack: ExitStack) -> ChatTemplate | None:
    """Return the template of --chat-template-file, if any; stack closes it."""
    from ..text.chat.template import ChatTemplate

    file = given["chat_template_file"]
    return stack.enter_context(ChatTemplate.from_file(file)) if file else None


# The option that names a picture encoder, and what it says.
MMPROJ = ("-mm", "--mmproj")
MMPROJ_SAYS: dict[str, Any] = {
    "metavar": "FILE|none",
    "help": "Encoder of pictures (GGUF), or hf:OWNER/REPO:FILE. Default: the mmproj file beside "
    "the model, or in the repository of -hf.",
}
NO_MMPROJ = ("--no-mmproj", "--no-mmproj-auto")
NO_MMPROJ_SAYS: dict[str, Any] = {"is_flag": True, "help": "Read no pictures."}


def open_pictures(given: Mapping[str, Any], target: str, engine: Engine) -> PictureReader | None:
    """Return what reads pictures with the encoder of --mmproj, or the one beside the model."""
    from ..ggml.device import gpu_names
    from ..gguf.file import open_gguf
    from ..placement.footprint import ENCODER_BYTES
    from ..text.pictures import PictureReader, find_mmproj

    name = "none" if given["no_mmproj"] else given["mmproj"]
    if name == "none" or not (name or engine.hparams.rope_sections):
        return None
    path = resolve_draft(name) if name else None
    if not name and is_hub_name(target):
        with _downloading() as (bars, say):
            path = get_mmproj(engine.file.path, parse_hub_name(target).repo, bars, say)
    elif not name:
        path = find_mmproj(engine.file.path)
    elif path:
        with open_gguf(path) as file:
            if (kind := file.kv.get("general.architecture")) != "clip":
                raise ConfigError(f"{path}: no picture encoder: its architecture is {kind!r}")
    device, first = engine.config.mmproj_device, engine.device_name.partition(",")[0]
    if path and device == "auto":
        # captured graphs may take the other half
        n_bytes = first.startswith("cuda") * (engine.stage_plans[0].plan.margin or 0) // 2
        device = first if n_bytes >= ENCODER_BYTES else "cpu"
        if device != first:
            ui.note("the CPU encodes pictures; --mmproj-device cuda:N makes room on a GPU")
    elif device not in ("auto", "cpu", *gpu_names()):
        raise ConfigError(f"--mmproj-device {device}: no such GPU (see moegraph doctor)")
    media, n_threads = given.get("media_path"), engine.threads.many.n
    return PictureReader(engine.file, path, n_threads, media, device=device) if path else None


def template_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of templates that --reasoning sets."""
    thinks = {"on": True, "off": False}.get(given["reasoning"])
    return {} if thinks is None else {"enable_thinking": thinks}


def load_engine(
    target: str | Path | ModelFile, config: EngineConfig, routing: Trace | None = None,
    warned: set[str] | None = None, is_chosen: bool = True, text: bool = False,
    quiet: bool = False,
) -> Engine:  # fmt: skip
    """Load a model by name or path, or take over a file that open_header opened.

    Shows a progress bar on a terminal. routing: a trace that replaces the router's choice, for
    benchmarks. warned: warnings that were printed before, to which this adds. is_chosen: whether
    the user chose the settings, and not the program. text: whether the tokenizer will be needed.
    quiet: print warnings only, not the messages of the engine.
    """
    with ui.Bars() as bars:
        ids = None if routing is None else routing.ids.astype("int32")
        model = open_header(target) if isinstance(target, (str, Path)) else target
        tokenizer = open_soon(model) if text and has_vocabulary(model) else None
        from ..engine import Engine  # a tenth of a second, in which the tokenizer goes on

        engine = Engine(model, config, bars, ids, tokenizer)
    idle = [*_idle_settings(engine), *idle_drafts(engine.config)] if is_chosen else []
    warnings = [*engine.file.warnings, *engine.warnings, *idle]
    ui.warn_once(warnings, warned)
    if not quiet:
        show_messages(engine)
    return engine


def _idle_settings(engine: Engine) -> list[str]:
    """Return a line about settings that the user changed and that have no effect, if any."""
    if not engine.plan.all_resident:
        return []
    config = engine.config
    idle = [n for n in _FOR_MISSES if getattr(config, n) != "none" and _is_changed(config, n)]
    return _no_effect(idle, f"all experts fit on {engine.device_name}")


def idle_drafts(config: EngineConfig) -> list[str]:
    """Return a line about settings of drafts that have no effect beside --spec, if any."""
    if config.spec in ("mtp", "lookup"):
        return _no_effect(["draft"] if config.draft else [], f"--spec {config.spec} needs no file")
    if config.spec != "off":
        return []
    idle = [s.name for s in engine_settings() if s.group == DRAFT_GROUP and s.name != "spec"]
    idle = [name for name in idle if _is_changed(config, name)]
    return _no_effect(idle, "nothing drafts; choose what does with --spec")


def _is_changed(config: EngineConfig, name: str) -> bool:
    return bool(getattr(config, name) != getattr(EngineConfig, name))


def _no_effect(names: Sequence[str], why: str) -> list[str]:
    flags = [s.flags[-1] for s in engine_settings() if s.name in names]
    have = "have no effect" if len(names) > 1 else "has no effect"
    return [f"{', '.join(flags)} {have}: {why}"] if names else []


def show_messages(engine: Engine) -> None:
    """Print the messages of the engine, such as that a drafter is not used any more."""
    for line in engine.drain_messages():
        ui.note(f"note: {line}")


def save_profile(engine: Engine) -> dict[str, Any] | None:
    """Add the experts that the run chose to its routing profile, if any; a failure only warns.

    Return the value of `profile` in --json.
    """
    kept = engine.save_profile()
    if kept is None:
        return None
    if kept.warning:
        ui.note(f"warning: {kept.warning}")
    return kept.report()


@contextmanager
def saving_profile(engine: Engine) -> Iterator[None]:
    """Save the routing profile at the end, also after Ctrl-C or a refused request."""
    try:
        yield
    except (Cancelled, KeyboardInterrupt, RequestError):
        save_profile(engine)
        raise
    save_profile(engine)


def check_text(model: ModelFile, text: str, config: EngineConfig) -> None:
    """Refuse a prompt that cannot work, before the weights are loaded."""
    require_vocabulary(model)
    n_ctx = config.ctx_within(model.hparams.n_ctx_train)
    # No token is shorter than a byte, so most prompts pass without the tokenizer.
    if len(text.encode(errors="replace")) + _MAX_ADDED > n_ctx:
        with Tokenizer(model) as tokenizer:
            room_after(len(tokenizer.encode(text)), n_ctx)


def has_vocabulary(model: ModelFile) -> bool:
    """Return whether the model file carries a tokenizer."""
    return model.kv.get("tokenizer.ggml.model") not in (None, "none", "no_vocab")


def require_vocabulary(model: ModelFile) -> None:
    """Refuse text for a model that knows only token ids."""
    if not has_vocabulary(model):
        raise ModelFileError(
            f"{model.path}: the file has no vocabulary, so it cannot read or write text; "
            "give token ids: moegraph run TARGET PROMPT_IDS N_GEN OUT_IDS"
        )


def ignoring_end(engine: Engine, sampling: SamplingParams) -> SamplingParams:
    """Return the settings with the end tokens banned, which is what --ignore-eos means."""
    if not has_vocabulary(engine.file):
        return sampling
    bans = dict.fromkeys(engine.tokenizer.eog_ids, float("-inf"))
    return replace(sampling, logit_bias={**sampling.logit_bias, **bans})


@click.command()
@click.argument("name", metavar="OWNER/REPO[:QUANT]")
def pull(name: str) -> None:
    """Download a GGUF model of Hugging Face into the cache, and print the path of its file.

    QUANT is a quantization such as Q8_0, or the name of a file. Without it, Q4_K_M is taken, or
    the largest that fits into the memory of card and host. Commands take the model as
    -hf OWNER/REPO[:QUANT], or hf:OWNER/REPO[:QUANT] in place of TARGET, and download it
    themselves if the cache lacks it; only pull looks for a newer one. A download that was cut
    goes on where it stopped. Files that are there already are compared with their checksums.

    Environment: HF_TOKEN for private and restricted models, HF_ENDPOINT for another hub,
    HF_HUB_CACHE for the folder, HF_HUB_OFFLINE=1 to use only what is there. Needs the package
    huggingface_hub, which the extra `server` brings.

    \b
    Examples:
      moegraph pull unsloth/Qwen3.6-35B-A3B-GGUF
      moegraph pull unsloth/Qwen3.6-35B-A3B-GGUF:UD-Q4_K_XL
      moegraph run -hf unsloth/Qwen3.6-35B-A3B-GGUF -p "def fibonacci(n):"
    """
    from ..gguf.hub import download

    with _downloading() as (bars, say):
        path = download(parse_hub_name(name), bars, say, True, memory_for_model)
    click.echo(path)


@click.command("models")
@click.argument("action", default="list", type=click.Choice(["list", "rm"]), metavar="[list|rm]")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_models(action: str, names: tuple[str, ...], as_json: bool) -> None:
    """List the models that were downloaded, or remove some of them.

    A line has the name, the quantization, the size and the day of the last use; a star is at the
    default, which `model` or `hf-repo` in moegraph.toml or the environment names. rm removes a
    model's files; its name is that of -hf.

    \b
    Examples:
      moegraph models
      moegraph models rm unsloth/Qwen3.6-35B-A3B-GGUF:UD-Q4_K_XL
    """
    from ..gguf.hubcache import cached_models, remove_model

    if bool(names) != (action == "rm"):
        raise click.UsageError("write moegraph models, or moegraph models rm NAME...")
    for name in map(parse_hub_name, names):
        ui.note(f"removed {name}: {format_bytes(remove_model(name))}")
    if names:
        return
    default = _default_model()
    plain = f"{default}:{DEFAULT_QUANT}" if default and default.count(":") == 1 else default
    found = [(str(one.name) in (default, plain), one) for one in cached_models()]
    if as_json:
        rows = [
            {"name": str(m.name), "quant": m.quant, "bytes": m.n_bytes, "used": int(m.used)}
            for _, m in found
        ]
        click.echo(json.dumps({"models": rows, "default": default}))
        return
    wide = max((len(str(one.name)) for _, one in found), default=0)
    for is_default, one in found:
        day, size = time.strftime("%Y-%m-%d", time.localtime(one.used)), format_bytes(one.n_bytes)
        star = "*" if is_default else " "
        click.echo(f"{star} {one.name!s:<{wide}}  {one.quant:<8}  {size:>9}  {day}")
    if default and not any(is_default for is_default, _ in found):
        click.echo(f"* {default}")
    elif not found:
        ui.note("no model was downloaded; moegraph pull OWNER/REPO gets one")


def _default_model() -> str | None:
    """Return the model of commands that name none."""
    for source in read_sources():
        if (found := source.find(["model"], "")) and isinstance(found.value, str):
            return found.value
        if (found := source.find(["hf-repo"], "")) and isinstance(found.value, str):
            return str(parse_hub_name(found.value))
    return None
