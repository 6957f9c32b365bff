"""Command-line options made from settings, and the checks of prompts, files and numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from ..config import DRAFT_GROUP, EngineConfig
from ..config import settings as engine_settings
from ..errors import Cancelled, ModelFileError, MoegraphError, RequestError
from ..gguf.hubnames import is_hub_name
from ..loop.sequence import room_after
from ..sampling import SamplingParams
from ..sampling import settings as sampling_settings
from ..setting import Setting
from ..text.tokenizer import MAX_PROMPT_BYTES, Tokenizer, open_soon
from ..units import format_bytes
from . import ui
from .command import Option
from .target import local_path

if TYPE_CHECKING:
    from ..arch import ModelFile
    from ..engine import Engine
    from ..gguf import GgufFile
    from ..placement.trace import Trace

Command = TypeVar("Command", bound=Callable[..., Any])

# Tokens that a tokenizer may add to a text: one at the beginning and one at the end.
_MAX_ADDED = 2
# Settings that have no effect if every expert is resident.
_FOR_MISSES = ("profile", "profile_class", "policy", "miss", "prefetch", "host_pin")
_TYPES: dict[str, Any] = {"int": click.INT, "float": click.FLOAT}
_BIAS = re.compile(r"\s*(\d{1,10})\s*([+-])\s*(inf|\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})", re.I | re.A)


def setting_option(setting: Setting) -> Callable[[Command], Command]:
    """Return the click option of a setting of the engine or the sampler."""
    described: dict[str, Any] = {
        "help": setting.help, "default": setting.default, "cls": Option, "group": setting.group,
    }  # fmt: skip
    if setting.kind == "flag":
        return click.option(*setting.flags, setting.name, is_flag=True, **described)
    if setting.choices:
        described["type"] = click.Choice(setting.choices)
    else:
        is_file = (setting.metavar or "").startswith("FILE")
        described["type"] = click.Path() if is_file else _TYPES.get(setting.kind, click.STRING)
        described["metavar"] = setting.metavar or ("F" if setting.kind == "float" else "N")
    return click.option(
        *setting.flags, setting.name, show_default=setting.default not in (None, ""), **described
    )


def _apply(command: Command, options: list[Callable[[Any], Any]]) -> Command:
    # Reversed, because click lists the option of the outermost decorator first.
    for option in reversed(options):
        command = option(command)
    return command


def engine_options(command: Command) -> Command:
    """Add one option for each EngineConfig field that has a spelling."""
    return engine_options_but()(command)


def engine_options_but(
    *names: str, drafts: bool = True, **defaults: object
) -> Callable[[Command], Command]:
    """Return a decorator like engine_options that leaves some fields at their defaults.

    drafts: the command generates text; False: it takes no settings of drafts. defaults: of this
    command, by the names of their fields.
    """
    chosen = [s for s in engine_settings() if s.flags and s.name not in names]
    chosen = [replace(s, default=defaults.get(s.name, s.default)) for s in chosen]
    chosen = [s for s in chosen if drafts or s.group != DRAFT_GROUP]
    chosen = [spec_by_draft(s) if s.name == "spec" else s for s in chosen]
    found = [setting_option(s) for s in chosen]
    return lambda command: _apply(command, found)


def spec_by_draft(setting: Setting) -> Setting:
    """Return the setting of --spec with a default that depends on --draft; see `build_config`."""
    help = f"{setting.help} Default: off; with --draft auto, or dflash if --deterministic."
    return replace(setting, default=None, help=help)


def sampling_options(command: Command) -> Command:
    """Add the sampler options under llama.cpp's spellings."""
    options: list[Callable[[Any], Any]] = [setting_option(s) for s in sampling_settings()]
    options += [
        click.option(
            "-l", "--logit-bias", "logit_bias", multiple=True, metavar="TOKEN(+/-)BIAS",
            cls=Option, group="Sampling",
            help="Add BIAS to a token's logit, such as 15043+1 or 15043-inf; repeatable.",
        ),
        click.option(
            "--ignore-eos", is_flag=True, cls=Option, group="Sampling",
            help="Ban the end tokens, so that generation does not stop at them.",
        ),
    ]  # fmt: skip
    return _apply(command, options)


def length_options(command: Command) -> Command:
    """Add the options that end a generation."""
    return _apply(command, [
        click.option(
            "-n", "--predict", "--n-predict", "--max-tokens", "n_predict", type=click.INT,
            default=-1, metavar="N",
            help="Maximum number of tokens to generate. -1: until an end token or a full context.",
        ),
        click.option(
            "-r", "--stop", "--reverse-prompt", "stop", multiple=True, metavar="TEXT",
            help="Stop before this text, which is not printed; repeatable.",
        ),
        click.option(
            "-e", "--escape/--no-escape", "escape", default=None,
            help=r"Replace escapes such as \n, \t, \\ and \". Default: in texts on the command "
            "line, not in files and pipes; -e: in both.",
        ),
    ])  # fmt: skip


def build_config(options: Mapping[str, Any]) -> EngineConfig:
    """Return the validated EngineConfig of a command's options; download a drafter on a hub."""
    names = {s.name for s in engine_settings() if s.flags}
    # None means that the engine chooses the value; a command may lack some options.
    given = {name: options[name] for name in names if options.get(name) is not None}
    if given.get("draft") and "spec" not in given:
        given["spec"] = "dflash" if given.get("deterministic") else "auto"
    config = EngineConfig(**given).validate()
    if is_hub_name(config.draft):
        config = replace(config, draft=str(local_path(config.draft)))
    return config


def build_sampling(options: Mapping[str, Any]) -> SamplingParams:
    """Return the SamplingParams of a command's options; the engine checks the ranges."""
    given = {s.name: options[s.name] for s in sampling_settings()}
    return SamplingParams(**given, logit_bias=parse_logit_bias(options["logit_bias"]))


def chosen_sampling(ctx: click.Context) -> frozenset[str]:
    """Return the names of the sampling settings given on the command line."""
    names = (s.name for s in sampling_settings())
    return frozenset(n for n in names if ctx.get_parameter_source(n) is not ParameterSource.DEFAULT)


def warn_beyond_training(engine: Engine, n_prompt: int) -> None:
    """Warn, before the work begins, of a prompt longer than the model's training length."""
    n_trained = engine.hparams.n_ctx_train
    if n_trained < n_prompt <= engine.n_ctx:
        ui.note(f"warning: {n_prompt} positions; the model was trained on only {n_trained}")


def parse_logit_bias(entries: tuple[str, ...]) -> dict[int, float]:
    """Parse '15043+1' and '15043-inf' as llama.cpp does; biases of the same token add up."""
    biases: dict[int, float] = {}
    for entry in entries:
        match = _BIAS.fullmatch(entry)
        if match is None:
            raise RequestError(
                f"logit bias {entry!r}; write TOKEN(+/-)BIAS, for example 15043+1 or 15043-inf"
            )
        token, bias = int(match[1]), float(match[2] + match[3])
        biases[token] = biases.get(token, 0.0) + bias
    return biases


def max_tokens(n_predict: int) -> int | None:
    """Return -n in the form that the engine takes: None for no limit."""
    if n_predict < -1:
        raise RequestError(f"-n is {n_predict}; allowed: 0 and more, or -1 for no limit")
    return None if n_predict == -1 else n_predict


def read_text(path: str) -> str:
    """Return the text of a prompt file ('-': stdin) without the last newline."""
    name = "stdin" if path == "-" else path
    try:
        with click.open_file(path, "rb") as file:
            data: bytes = file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        raise RequestError(f"{name}: cannot read the prompt: {error.strerror}") from error
    if len(data) > MAX_PROMPT_BYTES:
        raise RequestError(
            f"{name}: the prompt is larger than {format_bytes(MAX_PROMPT_BYTES)}; shorten it"
        )
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name}: the prompt is not UTF-8 text (byte 0x{data[error.start]:02x} "
            f"at offset {error.start})"
        ) from error
    return text.removesuffix("\n")


def argument_text(text: str, escape: bool | None = None) -> str:
    """Return text from the command line, with escapes replaced unless escape is False."""
    try:
        # In a locale without UTF-8, Python keeps the bytes of an argument as surrogates.
        text = text.encode(errors="surrogateescape").decode()
    except UnicodeError as error:
        raise RequestError(f"not UTF-8 text on the command line: {text!a}") from error
    return text if escape is False else unescape(text)


def joined_question(text: str, question: str) -> str:
    """Return a question about a text as one message: first the text, then the question."""
    return f"{text}\n\n{question}" if text and question else text or question


def unescape(text: str) -> str:
    r"""Return text with \n, \r, \t, \', \" and \\ replaced; other backslashes stay."""
    known = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}
    return re.sub(r"\\([nrt'\"\\])", lambda match: known[match[1]], text)


def open_header(target: str | Path, device: str | None = None) -> ModelFile:
    """Open a model by name or path without loading its weights.

    device: the drivers of this device, or of a list, are opened meanwhile.
    """
    from ..arch import open_model

    path = local_path(target)
    if device and path.is_file():
        with suppress(MoegraphError):  # whoever opens the device will say what is wrong
            from ..ggml.device import wake

            for one in device.split(","):
                wake(one)
    return open_model(path)


def open_any(target: str | Path) -> GgufFile:
    """Open a GGUF file of any architecture by name or path, without loading its weights."""
    from ..gguf import open_gguf

    return open_gguf(local_path(target))


def load_engine(
    target: str | Path | ModelFile, config: EngineConfig, routing: Trace | None = None,
    warned: set[str] | None = None, is_chosen: bool = True, text: bool = False,
    quiet: bool = False,
) -> Engine:  # fmt: skip
    """Load a model by name or path, or take over a file that open_header opened.

    Shows a progress bar on a terminal. routing: a trace that replaces the router's choice, for
    benchmarks. warned: warnings that were printed before, to which this adds. is_chosen: whether
    the user chose the settings, and not the program. text: whether the tokenizer will be needed.
    quiet: print warnings only, not what the engine has to say.
    """
    with ui.Bars() as bars:
        ids = None if routing is None else routing.ids.astype("int32")
        model = open_header(target) if isinstance(target, (str, Path)) else target
        tokenizer = open_soon(model) if text and has_vocabulary(model) else None
        from ..engine import Engine  # a tenth of a second, in which the tokenizer goes on

        engine = Engine(model, config, bars, ids, tokenizer)
    warned = set() if warned is None else warned
    idle = [*_idle_settings(engine), *idle_drafts(engine.config)] if is_chosen else []
    for warning in (*engine.file.warnings, *engine.warnings, *idle):
        if warning not in warned:
            ui.note(f"warning: {warning}")
            warned.add(warning)
    if not quiet:
        show_messages(engine)
    return engine


def _idle_settings(engine: Engine) -> list[str]:
    """Return a line about settings that the user changed and that have no effect, if any."""
    if not engine.plan.all_resident:
        return []
    idle = [
        s.flags[-1]
        for s in engine_settings()
        if s.name in _FOR_MISSES and getattr(engine.config, s.name) not in (s.default, "none")
    ]
    if not idle:
        return []
    have = "have no effect" if len(idle) > 1 else "has no effect"
    return [f"{', '.join(idle)} {have}: all experts fit on {engine.device_name}"]


def idle_drafts(config: EngineConfig) -> list[str]:
    """Return a line about settings of drafts that have no effect beside --spec, if any."""
    idle = [
        s.flags[-1]
        for s in engine_settings()
        if s.group == DRAFT_GROUP and s.name != "spec" and getattr(config, s.name) != s.default
    ]
    why = "nothing drafts; choose what does with --spec"
    if config.spec != "off":
        idle = ["--draft"] if config.draft and config.spec in ("mtp", "lookup") else []
        why = f"--spec {config.spec} needs no file"
    have = "have no effect" if len(idle) > 1 else "has no effect"
    return [f"{', '.join(idle)} {have}: {why}"] if idle else []


def show_messages(engine: Engine) -> None:
    """Print what the engine has to say, such as that the cache was bypassed."""
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


def end_token_bans(engine: Engine) -> dict[int, float]:
    """Return the logit biases that --ignore-eos stands for."""
    if not has_vocabulary(engine.file):
        return {}
    return dict.fromkeys(engine.tokenizer.eog_ids, float("-inf"))
