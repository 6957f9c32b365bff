"""Command-line options made from settings, and the checks of prompts, files and numbers."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import click
from click.core import ParameterSource

from ..config import DRAFT_GROUP, GROUPS, EngineConfig
from ..config import settings as engine_settings
from ..errors import RequestError
from ..gguf.hubnames import is_hub_name
from ..sampling import SamplingParams
from ..sampling import settings as sampling_settings
from ..setting import Setting
from ..text.tokenizer import MAX_PROMPT_BYTES
from ..units import format_bytes
from . import ui
from .models import Decorated, local_path

_TYPES: dict[str, Any] = {"int": click.INT, "float": click.FLOAT}
_BIAS = re.compile(r"\s*(\d{1,10})\s*([+-])\s*(inf|\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})", re.I | re.A)
# Values of a list, at most.
MAX_VALUES = 1000
# Keys of general.sampling and the fields of SamplingParams they fill.
_FIELDS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_last_n": "repeat_last_n",
    "penalty_repeat": "repeat_penalty",
}
_WHOLE = ("top_k", "repeat_last_n")
# Files hold F32; llama.cpp reads them as text with this number of decimals.
_DECIMALS = 6

_LAST_DEVICE = "the drafter is on the last device of the model"
# Flags of the reference (test_dflash) whose mechanism does not exist here; what happens instead.
_FLAGS = {
    "--fast-rollback": "accepted rows are taken without another pass, always",
    "--seq-verify": "a draft is verified in one pass",
    "--draft-feature-mirror": "the drafter reads the model's features where they were computed",
    "--peer-access": "what crosses from device to device goes through host memory",
    "--target-split-load-draft": _LAST_DEVICE,
    "--target-split-dflash": _LAST_DEVICE,
}
_CHOICE = "--device chooses the devices; the drafter is on the last one"
_DIVISION = "--device cuda:0,cuda:1 divides the layers, and --split N,... sets their shares"
# Options of it that take a value.
_VALUES = {
    "--target-gpu": _CHOICE, "--draft-gpu": _CHOICE, "--target-gpus": _DIVISION,
    "--target-layer-split": _DIVISION,
}  # fmt: skip


class Option(click.Option):
    """An option that is listed under a heading in --help.

    group: one of config.GROUPS. setting: what says which values suit, if anything does.
    """

    def __init__(
        self, *args: Any, group: str = GROUPS[0], setting: Setting | None = None, **described: Any
    ) -> None:
        super().__init__(*args, **described)
        self.group, self.setting = group, setting


def group_of(param: click.Parameter) -> str:
    """Return the heading of an option; an option without its own heading is common."""
    return param.group if isinstance(param, Option) else GROUPS[0]


class Command(click.Command):
    """A click command with grouped options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, one section for each heading that has options."""
        for group in GROUPS:
            options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
            found = [p.get_help_record(ctx) for p in options if group_of(p) == group]
            rows = [record for record in found if record is not None]
            if rows:
                with formatter.section(f"{group} options"):
                    formatter.write_dl(rows)


def setting_option(setting: Setting) -> Callable[[Decorated], Decorated]:
    """Return the click option of a setting of the engine or the sampler."""
    described: dict[str, Any] = {
        "help": setting.help, "default": setting.default, "cls": Option, "group": setting.group,
        "setting": setting,
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


def with_options(found: Sequence[Callable[[Any], Any]]) -> Callable[[Decorated], Decorated]:
    """Return a decorator that adds options in this order."""

    def decorate(command: Decorated) -> Decorated:
        # click lists the option of the outermost decorator first
        for option in reversed(found):
            command = option(command)
        return command

    return decorate


def engine_options(
    *but: str, only: Collection[str] | None = None, drafts: bool = True, **defaults: object
) -> Callable[[Decorated], Decorated]:
    """Return a decorator that adds one option for each EngineConfig field that has a spelling.

    but: fields that stay at their defaults. only: the fields to take; None: all. drafts: the
    command generates text; False: it takes no settings of drafts. defaults: of this command, by the
    names of their fields.
    """
    chosen = [s for s in engine_settings() if s.flags and s.name not in but]
    chosen = [s for s in chosen if only is None or s.name in only]
    chosen = [replace(s, default=defaults.get(s.name, s.default)) for s in chosen]
    chosen = [s for s in chosen if drafts or s.group != DRAFT_GROUP]
    return with_options([
        setting_option(_spec_by_draft(s) if s.name == "spec" else s) for s in chosen
    ])  # fmt: skip


def _spec_by_draft(setting: Setting) -> Setting:
    """Return the setting of --spec with a default that depends on --draft; see `build_config`."""
    help = f"{setting.help} Default: off; with --draft auto, or dflash if --deterministic."
    return replace(setting, default=None, help=help)


sampling_options = with_options([
    *(setting_option(s) for s in sampling_settings()),
    click.option(
        "-l", "--logit-bias", "logit_bias", multiple=True, metavar="TOKEN(+/-)BIAS",
        cls=Option, group="Sampling",
        help="Add BIAS to a token's logit, such as 15043+1 or 15043-inf; repeatable.",
    ),
    click.option(
        "--ignore-eos", is_flag=True, cls=Option, group="Sampling",
        help="Ban the end tokens, so that generation does not stop at them.",
    ),
])  # fmt: skip
# What ends a generation.
length_options = with_options([
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


# The reference's options that have no effect; `show_taken` says what happens instead.
reference_options = with_options([
    click.option(
        flag, is_flag=flag in _FLAGS, hidden=True, expose_value=False, help=f"No effect: {why}."
    )
    for flag, why in (_FLAGS | _VALUES).items()
])  # fmt: skip


def show_taken() -> None:
    """Print a line for each option of the reference that was given and has no effect."""
    for flag, why in (_FLAGS | _VALUES).items():
        if is_given(flag.removeprefix("--").replace("-", "_")):
            ui.note(f"note: {flag} has no effect: {why}")


def build_config(options: Mapping[str, Any]) -> EngineConfig:
    """Return the validated EngineConfig of a command's options; download a drafter on a hub."""
    names = {s.name for s in engine_settings() if s.flags}
    # None means that the engine chooses the value; a command may lack some options.
    given = {name: options[name] for name in names if options.get(name) is not None}
    for name in ("pin_layers", "cache_slots"):
        if given.get(name) == -1:  # the earlier spelling of the default
            del given[name]
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


def is_given(name: str) -> bool:
    """Return whether an option of the running command was given."""
    source = click.get_current_context().get_parameter_source(name)
    return source is not ParameterSource.DEFAULT


def is_typed(name: str) -> bool:
    """Return whether an option of the running command was given on the command line itself."""
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.COMMANDLINE


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


def read_list(
    texts: tuple[str, ...], read: Callable[[str], list[Any]], how: str, most: int = MAX_VALUES
) -> list[Any]:
    """Return the values in comma lists; a repeated option appends its list.

    read: what a part stands for. how: to write it, for messages. most: values at most.
    """
    given = ",".join(texts)
    try:
        found = [value for part in given.split(",") if texts for value in read(part.strip())]
    except ValueError:
        raise click.BadParameter(f"{given!r}; write {how}") from None
    if len(found) > most:
        raise click.BadParameter(f"{given!r}; at most {most} values")
    return found


def max_tokens(n_predict: int) -> int | None:
    """Return -n in the form that the engine takes: None for no limit."""
    if n_predict < -1:
        raise RequestError(f"-n is {n_predict}; allowed: 0 and more, or -1 for no limit")
    return None if n_predict == -1 else n_predict


def read_text(path: str, escape: bool | None = None) -> str:
    """Return a prompt file's text ('-': stdin) without the last newline; escape: `unescape` it."""
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
    text = text.removesuffix("\n")
    return unescape(text) if escape else text


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


def recommended(
    params: SamplingParams,
    kv: Mapping[str, object],
    n_vocab: int,
    warned: set[str] | None = None,
    kept: Collection[str] | None = None,
) -> tuple[SamplingParams, dict[str, float]]:
    """Check params; return them with the values that a file recommends, and those values by field.

    kv: metadata of the file. What the command line sets stays as it is. Values of the file that are
    out of range are left out, with one warning. warned: as in `models.load_engine`. kept: the
    settings that stay; None: those that the running command was given.
    """
    params = params.validate(n_vocab)
    taken: dict[str, Any] = {}
    wrong = []
    for key, name in _FIELDS.items():
        value: Any = kv.get(f"general.sampling.{key}")
        if value is None or (is_given(name) if kept is None else name in kept):
            continue
        whole, number = name in _WHOLE, value
        if type(value) is int and not whole:
            number = float(value)
        elif isinstance(value, float):
            number = int(value) if whole and value.is_integer() else round(value, _DECIMALS)
        try:
            params = replace(params, **{name: number}).validate(n_vocab)
        except RequestError:
            wrong.append(f"general.sampling.{key} {reprlib.repr(value)}")
            continue
        taken[name] = number
    if wrong:
        line = f"out of range in the model file, and ignored: {', '.join(wrong)}"
        ui.warn_once([line], warned)
    return params, taken
