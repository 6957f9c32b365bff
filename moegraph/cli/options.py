"""Options of the commands, made from the settings they fill, and checked input of all kinds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from ..config import EngineConfig, Setting
from ..config import settings as engine_settings
from ..errors import Cancelled, ModelFileError, RequestError
from ..sampling import SamplingParams
from ..sampling import settings as sampling_settings
from ..sequence import room_after
from ..tokenizer import MAX_PROMPT_BYTES, Tokenizer
from ..units import format_bytes
from . import ui
from .command import Option
from .refused import refused_options

if TYPE_CHECKING:
    from ..engine import Engine
    from ..experts.trace import Trace
    from ..modelfile import GgufFile, ModelFile

Command = TypeVar("Command", bound=Callable[..., Any])

# The tokens that a tokenizer puts around a text: one at its beginning, one at its end.
_MAX_ADDED = 2
# Settings about experts that are not on the device.
_FOR_MISSES = ("profile", "profile_class", "policy", "miss", "prefetch", "host_pin")
_TYPES: dict[str, Any] = {"int": click.INT, "float": click.FLOAT}
_BIAS = re.compile(r"\s*(\d{1,10})\s*([+-])\s*(inf|\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})", re.I | re.A)


def setting_option(setting: Setting) -> Callable[[Command], Command]:
    """Return the click option of a setting."""
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
    # Decorators are applied from the inside out; help shows options in the order given here.
    for option in reversed(options):
        command = option(command)
    return command


def engine_options(command: Command) -> Command:
    """Add one option for each EngineConfig field that has a spelling."""
    return engine_options_but()(command)


def engine_options_but(*names: str) -> Callable[[Command], Command]:
    """Return a decorator like engine_options that leaves some fields at their defaults."""
    chosen = [setting_option(s) for s in engine_settings() if s.flags and s.name not in names]
    taken = [flag for s in engine_settings() for flag in s.flags]
    return lambda command: _apply(command, chosen + refused_options(taken))


def sampling_options(command: Command) -> Command:
    """Add the sampler options under llama.cpp's spellings."""
    options: list[Callable[[Any], Any]] = [setting_option(s) for s in sampling_settings()]
    options += [
        click.option(
            "-l", "--logit-bias", "logit_bias", multiple=True, metavar="TOKEN(+/-)BIAS",
            cls=Option, group="Sampling",
            help="Add BIAS to a token's logit, as 15043+1 or 15043-inf; repeatable.",
        ),
        click.option(
            "--ignore-eos", is_flag=True, cls=Option, group="Sampling",
            help="Go on after the end of the text: ban the end tokens.",
        ),
    ]  # fmt: skip
    return _apply(command, options)


def length_options(command: Command) -> Command:
    """Add the options that end a generation."""
    return _apply(command, [
        click.option(
            "-n", "--predict", "--n-predict", "--max-tokens", "n_predict", type=click.INT,
            default=-1, metavar="N", show_default=True,
            help="Tokens to generate at most; -1 goes on to the end token or a full context.",
        ),
        click.option(
            "-r", "--stop", "--reverse-prompt", "stop", multiple=True, metavar="TEXT",
            help="End before this text; repeatable.",
        ),
        click.option(
            "-e", "--escape/--no-escape", "escape", default=None,
            help=r"Read \n, \t, \\ and \" as escapes. Default: in texts on the command line, not "
            "in files and pipes; -e does both.",
        ),
    ])  # fmt: skip


def svg_path(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a plot that is not named as SVG; devices and pipes are what the user makes of them."""
    if path is None or path.suffix.lower() == ".svg" or str(path).startswith("/dev/"):
        return path
    raise click.BadParameter(f"{str(path)!r}; plots are SVG: name it {path.with_suffix('.svg')}")


def svg_option(*flags: str, help: str) -> Callable[[Command], Command]:
    """Return the option of a plot's file."""
    return click.option(
        *flags, type=click.Path(path_type=Path), callback=svg_path, metavar="FILE.svg", help=help
    )


def build_config(options: Mapping[str, Any]) -> EngineConfig:
    """Return the validated EngineConfig of a command's options.

    Raises:
        ConfigError: names every wrong option.
    """
    names = {s.name for s in engine_settings() if s.flags}
    # None is a default that depends on the machine; a command may leave options out.
    given = {name: options[name] for name in names if options.get(name) is not None}
    return EngineConfig(**given).validate()


def build_sampling(options: Mapping[str, Any]) -> SamplingParams:
    """Return the SamplingParams of a command's options; ranges are checked with the model.

    Raises:
        RequestError: a bias is not written as TOKEN(+/-)BIAS.
    """
    given = {s.name: options[s.name] for s in sampling_settings()}
    return SamplingParams(**given, logit_bias=parse_logit_bias(options["logit_bias"]))


def chosen_sampling(ctx: click.Context) -> frozenset[str]:
    """Return the names of the sampling settings that the command line gives."""
    names = (s.name for s in sampling_settings())
    return frozenset(n for n in names if ctx.get_parameter_source(n) is not ParameterSource.DEFAULT)


def warn_beyond_training(engine: Engine, n_prompt: int) -> None:
    """Say before the work that a prompt is longer than what the model was trained on."""
    n_trained = engine.hparams.n_ctx_train
    if n_prompt > n_trained:
        ui.note(f"warning: {n_prompt} positions, the model was trained on {n_trained}")


def parse_logit_bias(entries: tuple[str, ...]) -> dict[int, float]:
    """Parse '15043+1' and '15043-inf' as llama.cpp does; several for one token add up.

    Raises:
        RequestError: an entry has another form.
    """
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
    """Return -n as the engine takes it: None for no limit.

    Raises:
        RequestError: it is below -1.
    """
    if n_predict < -1:
        raise RequestError(f"-n is {n_predict}; allowed: 0 and more, or -1 for no limit")
    return None if n_predict == -1 else n_predict


def read_text(path: str) -> str:
    """Return the text of a prompt file, '-' for stdin, less one newline at its end.

    Raises:
        RequestError: it cannot be read, is too long, or is not UTF-8.
    """
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
    """Return text from the command line, escapes replaced unless escape is False.

    Raises:
        RequestError: it is not UTF-8.
    """
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


def open_header(target: str | Path) -> ModelFile:
    """Open a model by name or path without loading its weights."""
    from ..modelfile import open_model, resolve_target

    return open_model(resolve_target(target))


def open_any(target: str | Path) -> GgufFile:
    """Open a GGUF file by name or path whatever its architecture is, to look into it."""
    from ..modelfile import open_gguf, resolve_target

    return open_gguf(resolve_target(target))


def load_engine(
    target: str | Path | ModelFile, config: EngineConfig, routing: Trace | None = None,
    warned: set[str] | None = None, is_chosen: bool = True,
) -> Engine:  # fmt: skip
    """Load a model by name or path, or one that open_header opened, which it then owns.

    A progress bar shows on a terminal. routing: a trace that replaces the router's choice, for
    measuring. warned: warnings that were printed before, to which this adds. is_chosen: whether the
    user chose the settings, and not the program.
    """
    from ..engine import Engine

    with ui.Bars() as bars:
        ids = None if routing is None else routing.ids.astype("int32")
        model = open_header(target) if isinstance(target, (str, Path)) else target
        engine = Engine(model, config, bars, ids)
    warned = set() if warned is None else warned
    idle = _idle_settings(engine) if is_chosen else []
    for warning in (*engine.file.warnings, *engine.warnings, *idle):
        if warning not in warned:
            ui.note(f"warning: {warning}")
            warned.add(warning)
    return engine


def _idle_settings(engine: Engine) -> list[str]:
    """Return a line about settings that were changed and change nothing; usually none."""
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
    return [f"{', '.join(idle)} {have}: all experts fit on {engine.device_name}, none is missing"]


def show_messages(engine: Engine) -> None:
    """Print what changed while the engine ran, such as a cache that was bypassed."""
    for line in engine.drain_messages():
        ui.note(f"note: {line}")


def save_profile(engine: Engine) -> dict[str, Any] | None:
    """Add what the run saw to its routing profile, if it has one; a failure is only a warning.

    Return what --json says about it.
    """
    kept = engine.save_profile()
    if kept is None:
        return None
    if kept.warning:
        ui.note(f"warning: {kept.warning}")
    return kept.report()


@contextmanager
def saving_profile(engine: Engine) -> Iterator[None]:
    """Add to the routing profile at the end, also when the user or a bad request ends it."""
    try:
        yield
    except (Cancelled, KeyboardInterrupt, RequestError):
        save_profile(engine)
        raise
    save_profile(engine)


def check_text(model: ModelFile, text: str, n_ctx: int) -> None:
    """Refuse a prompt that cannot be right before the weights are loaded.

    n_ctx: of the configuration, 0 for the model's own.

    Raises:
        ModelFileError: the file has no tokenizer.
        ContextOverflow: the prompt is longer than the context.
    """
    require_vocabulary(model)
    n_ctx = n_ctx or model.hparams.n_ctx_train
    # No token is shorter than a byte, so that most prompts need no tokenizer to be let through.
    if len(text.encode(errors="replace")) + _MAX_ADDED > n_ctx:
        with Tokenizer(model) as tokenizer:
            room_after(len(tokenizer.encode(text)), n_ctx)


def has_vocabulary(model: ModelFile) -> bool:
    """Return whether the model file carries a tokenizer."""
    return model.kv.get("tokenizer.ggml.model") not in (None, "none", "no_vocab")


def require_vocabulary(model: ModelFile) -> None:
    """Refuse text for a model that knows only token ids.

    Raises:
        ModelFileError: the file has no tokenizer.
    """
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
