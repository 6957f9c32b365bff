"""Which options of a command files and the environment set, and whether they suit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ..errors import ConfigError, MoegraphError
from ..setting import problem_of
from ..sources import ENVIRONMENT, Found, Source


def spellings(option: click.Option) -> list[str]:
    """Return the long spellings of an option without dashes, the usual one first."""
    found = [flag[2:] for flag in option.opts if flag.startswith("--")]
    return found if getattr(option, "setting", None) is None else found[::-1]


def settable(command: click.Command) -> Iterator[click.Option]:
    """Yield the options that a file may set: all but --help and those without effect."""
    for param in command.params:
        if isinstance(param, click.Option) and param.expose_value and spellings(param):
            yield param


def find_values(
    command: click.Command, ctx: click.Context, sources: Sequence[Source]
) -> dict[str, Found]:
    """Return the value of each option that a source has, by the option's parameter.

    Values are in the form that click takes: texts, or true and false for flags.

    Raises:
        ConfigError: names the file and the key of a value that the option refuses.
    """
    name, found = ctx.info_name or "", {}
    for option in settable(command):
        hits = (source.find(spellings(option), name) for source in sources)
        hit = next((one for one in hits if one is not None), None)
        if hit is not None and option.name:
            found[option.name] = _checked(option, ctx, hit)
    return found


def _checked(option: click.Option, ctx: click.Context, found: Found) -> Found:
    given = found.value
    if option.multiple:
        value: Any = [_text(found, one) for one in (given if isinstance(given, list) else [given])]
    elif isinstance(given, bool) and option.is_flag:
        value = given
    else:
        value = _text(found, given)
    try:
        taken = option.process_value(ctx, value)
    except click.ClickException as error:
        raise ConfigError(f"{found}: {' '.join(error.message.split())}") from None
    except MoegraphError as error:
        raise ConfigError(f"{found}: {error}") from None
    setting = getattr(option, "setting", None)
    if setting is not None and (problem := problem_of(setting, taken)):
        raise ConfigError(f"{found}: {problem}")
    return Found(found.where, found.key, value)


def _text(found: Found, value: object) -> str:
    """Return a value as it would stand on the command line."""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(f"{found}: {value!r} is neither a text nor a number")


def check_keys(sources: Sequence[Source], known: Mapping[str, set[str]]) -> None:
    """Refuse a key of a file that no option has; other programs may have variables like ours."""
    for source in sources:
        if source.where != ENVIRONMENT:
            for found in source.others(known):
                raise ConfigError(f"{found}: there is no such option; see moegraph config")


def rows(command: click.Command, ctx: click.Context, sources: Sequence[Source]) -> list[Found]:
    """Return the value that each option of a command has, and where it comes from."""
    given = find_values(command, ctx, sources)
    found = []
    for option in settable(command):
        hit = given.get(option.name or "")
        value = option.process_value(ctx, hit.value) if hit else option.get_default(ctx)
        if isinstance(value, Path) or (option.hide_input and hit):
            value = str(value) if isinstance(value, Path) else "(secret)"
        elif not isinstance(value, str | int | float | list | tuple):
            value = None  # the command decides
        found.append(Found(str(hit) if hit else "default", spellings(option)[0], value))
    return found


def line_of(row: Found) -> str:
    """Return a row as TOML; a default is a comment, so the lines make a file."""
    text = '""' if row.value is None else json.dumps(row.value, ensure_ascii=False)
    line = f"{row.key} = {text}  # {row.where}"
    return f"# {line}" if row.where == "default" else line
