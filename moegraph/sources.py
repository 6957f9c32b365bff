"""Settings that stand in moegraph.toml or in the environment, and where each of them stands."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import ConfigError

NAME = "moegraph.toml"
PREFIX = "MOEGRAPH_"
ENVIRONMENT = "environment"
# Variables that are no option's.
_OWN = ("debug", "history", "cpu-variant")


@dataclass(frozen=True)
class Found:
    """A value as it stands in a file (TOML's types) or in the environment (a text).

    where: the file's path, or ENVIRONMENT. key: as it is written there.
    """

    where: str
    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.where}: {self.key}"


@dataclass(frozen=True)
class Source:
    """Values of one place, by their keys with hyphens; keys are long options without dashes.

    tables: values for one command alone, by the command's name.
    """

    where: str
    values: Mapping[str, Found] = field(default_factory=dict)
    tables: Mapping[str, Source] = field(default_factory=dict)

    @classmethod
    def of(cls, where: str, values: Mapping[str, Any]) -> Source:
        """Return the source of a mapping; a mapping in it becomes a table."""
        tables = {k: cls.of(f"{where}: [{k}]", v) for k, v in values.items() if isinstance(v, dict)}
        plain = {k: Found(where, k, v) for k, v in values.items() if k not in tables}
        return cls(where, {k.replace("_", "-"): found for k, found in plain.items()}, tables)

    def find(self, spellings: Sequence[str], command: str) -> Found | None:
        """Return the value of an option, by any of its spellings; a command's own comes first."""
        table = self.tables.get(command)
        own = table.find(spellings, "") if table else None
        return own or next((self.values[one] for one in spellings if one in self.values), None)

    def others(self, known: Mapping[str, set[str]]) -> Iterator[Found]:
        """Yield what no option takes. known: spellings by the name of each command."""
        every = set().union(*known.values())
        yield from (found for key, found in self.values.items() if key not in every)
        for name, table in self.tables.items():
            if name not in known:
                yield Found(self.where, f"[{name}]", None)
            else:
                yield from table.others({name: known[name]})


def read_sources(environ: Mapping[str, str] | None = None) -> list[Source]:
    """Return all places of settings, the one that counts most first: environment, project, user.

    Raises:
        ConfigError: a file cannot be read, or is not TOML.
    """
    found = os.environ if environ is None else environ
    folder = found.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    paths = (Path(NAME), Path(folder) / "moegraph" / NAME)
    return [environment(found), *(Source.of(str(path), read_toml(path)) for path in paths)]


def environment(environ: Mapping[str, str]) -> Source:
    """Return what variables MOEGRAPH_* say; an empty one says nothing."""
    own = {key: value for key, value in environ.items() if key.startswith(PREFIX) and value}
    named = {key.removeprefix(PREFIX).lower().replace("_", "-"): key for key in own}
    values = {name: Found(ENVIRONMENT, key, own[key]) for name, key in named.items()}
    return Source(ENVIRONMENT, {k: v for k, v in values.items() if k not in _OWN})


def read_toml(path: Path, is_needed: bool = False) -> dict[str, Any]:
    """Return the values of a TOML file; none if it is not there, unless it is needed."""
    try:
        data = path.read_bytes()
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) and not is_needed:
            return {}
        raise ConfigError(f"{path}: cannot read it: {error.strerror}") from None
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(data.decode())
    except ValueError as error:  # also for what is not UTF-8
        raise ConfigError(f"{path}: {error}") from None
