"""Options of bench that take lists, as llama-bench's do: comma lists, ranges, repeated options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click
from click.core import ParameterSource

from ..config import settings as engine_settings
from ..draft.scripted import ScriptedAccept
from ..sampling import settings as sampling_settings
from ..setting import Setting
from .command import Option
from .options import Command, setting_option

MAX_TOKENS = 1 << 20
MAX_TESTS = 1000
# Of the engine's settings, bench has no use for these.
_USELESS = ("cache_ram",)
# Settings that bench chooses if they are not given, with the words for --help.
_CHOSEN = {"n_ctx": " Default: as large as the tests need."}
# Not lists: the value of a path may have a comma.
_SINGLE_KINDS = ("flag", "path")


def lengths(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> tuple[int, ...]:
    """Parse comma lists such as 512,1024 and llama-bench's ranges such as 0-1024+256."""
    found: list[int] = []
    for part in _parts(texts):
        try:
            found += number_range(part)
        except ValueError:
            raise click.BadParameter(
                f"{part!r}; write lengths as 512,1024 or as a range 0-4096+1024"
            ) from None
    if len(found) > MAX_TESTS or any(not 0 <= n <= MAX_TOKENS for n in found):
        given = ",".join(texts)
        raise click.BadParameter(f"{given!r}; at most {MAX_TESTS} lengths of 0 to {MAX_TOKENS}")
    return tuple(found)


def pairs(
    _: click.Context, __: click.Parameter, texts: tuple[str, ...]
) -> tuple[tuple[int, int], ...]:
    """Parse '512,128', one prompt and one generation each."""
    found = []
    for text in texts:
        try:
            n_prompt, n_gen = (int(part) for part in text.split(","))
        except ValueError:
            raise click.BadParameter(
                f"{text!r}; write a prompt and a generation, 512,128"
            ) from None
        if not (0 < n_prompt <= MAX_TOKENS and 0 < n_gen <= MAX_TOKENS):
            raise click.BadParameter(f"{text!r}; both are 1 to {MAX_TOKENS}")
        found.append((n_prompt, n_gen))
    return tuple(found)


def _parts(texts: tuple[str, ...]) -> list[str]:
    """Return the entries of all comma lists, in order; a repeated option appends its list."""
    return [part.strip() for text in texts for part in text.split(",")]


def shares(_: click.Context, __: click.Parameter, text: str | None) -> tuple[float, ...]:
    """Parse '0.85,0.72,0.6', shares by position; their owner checks the values."""
    try:
        found = tuple(float(part) for part in text.split(",")) if text else ()
        if found:
            ScriptedAccept(found)
    except ValueError:
        raise click.BadParameter(f"{text!r}; write shares as 0.85,0.72,0.6") from None
    return found


def number_range(text: str) -> list[int]:
    """Return the numbers of 'a', 'a-b', 'a-b+step' or 'a-b*factor'."""
    first, dash, rest = text[1:].partition("-")
    first = text[:1] + first  # a number may be negative
    if not dash:
        return [int(first)]
    last, step, factor = rest, 1, 1
    if "+" in rest:
        last, _, by = rest.partition("+")
        step = int(by)
    elif "*" in rest:
        last, _, by = rest.partition("*")
        step, factor = 0, int(by)
    low, high = int(first), int(last)
    if low > high or (step <= 0 and factor <= 1) or (factor > 1 and low <= 0):
        raise ValueError(text)
    found: list[int] = []
    while low <= high and len(found) <= MAX_TESTS:
        found.append(low)
        low = low * factor + step
    return found


# What an entry of a list stands for, by the kind of the setting; otherwise itself.
_READERS: dict[str, Callable[[str], list[Any]]] = {
    "int": number_range,
    "float": lambda text: [float(text)],
    # commas separate entries; several devices of one entry are joined by a plus sign
    "device": lambda text: [text.replace("+", ",")],
    "size": lambda text: [text.replace("+", ",")],
    "split": lambda text: [text.replace("+", ",")],
}


def list_option(*flags: str, **described: Any) -> Callable[[Command], Command]:
    """Return a repeatable option that takes comma lists; bench measures every entry."""
    return click.option(*flags, multiple=True, **described)


def _values_of(setting: Setting) -> Callable[..., tuple[Any, ...]]:
    """Return the callback that parses the list of a setting; its owner checks the values."""
    read: Callable[[str], list[Any]] = _READERS.get(setting.kind, lambda text: [text])

    def parse(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> tuple[Any, ...]:
        try:
            found = tuple(value for part in _parts(texts) for value in read(part))
        except ValueError:
            how = "1,2 or 1-8" if setting.kind == "int" else "0,0.8"
            raise click.BadParameter(f"{','.join(texts)!r}; write numbers as {how}") from None
        if len(found) > MAX_TESTS:
            raise click.BadParameter(f"{','.join(texts)!r}; at most {MAX_TESTS} values")
        wrong = [value for value in found if setting.choices and value not in setting.choices]
        if wrong:
            raise click.BadParameter(f"{wrong[0]!r} is not one of {', '.join(setting.choices)}")
        return found

    return parse


def _listed(setting: Setting) -> Callable[[Command], Command]:
    """Return the option of a setting, as a list where its kind allows."""
    if setting.kind in _SINGLE_KINDS:
        return setting_option(setting)
    known = setting.default not in (None, "") and setting.name not in _CHOSEN
    metavar = {"size": "LIST (SIZE|auto)"}.get(setting.kind, "LIST")
    about = setting.help
    if setting.choices:
        about += f" Values: {', '.join(setting.choices)}."
    about += _CHOSEN.get(setting.name, "")
    return list_option(
        *setting.flags, setting.name, callback=_values_of(setting), metavar=metavar, help=about,
        default=(str(setting.default),) if known else None, show_default=known, cls=Option,
        group=setting.group,
    )  # fmt: skip


def swept_settings() -> list[Setting]:
    """Return the engine's settings that bench takes as lists."""
    return [s for s in engine_settings() if s.flags and s.kind not in _SINGLE_KINDS
            and s.name not in _USELESS]  # fmt: skip


def setting_lists(command: Command) -> Command:
    """Add the options of engine and sampler, as lists."""
    ours = [s for s in engine_settings() if s.flags and s.name not in _USELESS]
    chosen = [_listed(s) for s in (*ours, *sampling_settings())]
    for option in reversed(chosen):
        command = option(command)
    return command


def combinations(names: list[str], given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all combinations of the values of options, those of the last name fastest."""
    found: list[dict[str, Any]] = [{}]
    for name in names:
        values = given[name] or (None,)
        found = [{**one, name: value} for one in found for value in values]
    return found


def is_given(name: str) -> bool:
    """Return whether an option of the running command was given."""
    source = click.get_current_context().get_parameter_source(name)
    return source is not ParameterSource.DEFAULT
