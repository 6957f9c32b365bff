"""Test processes take turns: one that runs a test marked `alone` has the machine to itself."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Turns:
    """Locks in a folder that processes share: many run ordinary tests, or one a test alone."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._gate = (folder / "gate").open("w")
        self._turn = (folder / "turn").open("w")

    @contextmanager
    def take(self, alone: bool) -> Iterator[None]:
        """Wait for a turn and hold it; alone: while no other process has one."""
        # Who waits holds the gate: the others, test after test, cannot pass one that is alone.
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._turn, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._turn, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the files; a turn that is held ends."""
        self._gate.close()
        self._turn.close()
