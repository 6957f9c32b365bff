"""API keys of the command line, the environment and a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import ConfigError

VARIABLE = "MOEGRAPH_API_KEY"
_MAX_BYTES = 1 << 20


def read_keys(given: Sequence[str], file: Path | None, variable: str | None) -> list[str]:
    """Return all keys. given: of the command line; commas part several. variable: of VARIABLE.

    Raises:
        ConfigError: the file cannot be read or has no key, or a key cannot be sent in a header.
    """
    keys = [key.strip() for text in given for key in text.split(",")]
    if file is not None:
        keys += _lines(file)
    elif not given and variable:
        keys += [key.strip() for key in variable.split(",")]
    _check(keys)
    return keys


def _lines(file: Path) -> list[str]:
    try:
        with open(file, "rb") as stream:
            text = stream.read(_MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{file}: cannot read keys: {why}") from None
    keys = [line.strip() for line in text.splitlines()]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise ConfigError(f"{file}: it has no key; write one in each line")
    return keys


def _check(keys: Iterable[str]) -> None:
    for number, key in enumerate(keys, 1):
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"API key {number} is empty or has a character that a header cannot carry; "
                "use letters, digits and signs without spaces"
            )
