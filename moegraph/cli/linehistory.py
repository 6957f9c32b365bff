"""The messages typed in earlier conversations, for the Up key."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..units import MiB

# Environment variable with the file; empty: keep nothing.
VARIABLE = "MOEGRAPH_HISTORY"
_MAX_ENTRIES, _MAX_BYTES = 1000, 8 * MiB


def history_path() -> Path | None:
    """Return the file of typed messages; None if the user wants none, or has no home."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return Path(given) if given else None
    folder = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(folder) / "moegraph" / "chat_history" if os.path.isabs(folder) else None


class LineHistory:
    """A file with one JSON string a line, which only its owner can read.

    Lines are appended as messages are typed, so two conversations can share the file. That a
    message cannot be read or written is never an error.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def load(self) -> list[str]:
        """Return the latest messages, oldest first; shorten the file if it has many more."""
        if self._path is None:
            return []
        try:
            with open(self._path, "rb") as file:
                data = file.read(_MAX_BYTES)
        except OSError:
            return []
        found = list(_entries(data))
        latest = found[-_MAX_ENTRIES:]
        if len(found) > 2 * _MAX_ENTRIES or len(data) == _MAX_BYTES:
            self._replace(latest)
        return latest

    def add(self, message: str) -> None:
        """Append a message."""
        if self._path is None or not message.strip():
            return
        with suppress(OSError, ValueError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with open(os.open(self._path, flags, 0o600), "ab") as file:
                file.write(_line(message))

    def _replace(self, messages: list[str]) -> None:
        if self._path is None:
            return
        shorter = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(os.open(shorter, flags, 0o600), "wb") as file:
                file.writelines(map(_line, messages))
            os.replace(shorter, self._path)


def _line(message: str) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _entries(data: bytes) -> Iterator[str]:
    """Yield the messages in a file; damaged lines are left out."""
    for line in data.splitlines():
        with suppress(ValueError, RecursionError):
            message = json.loads(line)
            if isinstance(message, str):
                yield message
