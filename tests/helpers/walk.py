"""Walks of the program: which functions of moegraph run from one moment to another, in order."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = Path(__file__).resolve().parents[2] / "moegraph"


@dataclass
class Walk:
    """Calls of functions in files under moegraph/: (file, name of the function), in order."""

    calls: list[tuple[str, str]] = field(default_factory=list)

    @property
    def files(self) -> list[str]:
        """The files, in the order in which they are entered first."""
        return list(dict.fromkeys(file for file, _ in self.calls))


class Walks:
    """Records walks: one ends and the next begins when a function returns.

    all: what ran before the first return, then a walk for each return but the last.
    """

    def __init__(self, until: Callable[..., Any]) -> None:
        """until: its return ends a walk."""
        self.all = [Walk()]
        self._until: CodeType = until.__code__
        self._root = str(PACKAGE) + "/"

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        """Take an event of `sys.setprofile`."""
        code = frame.f_code
        if event == "return" and code is self._until:
            self.all.append(Walk())
        elif event == "call" and code.co_filename.startswith(self._root):
            file = code.co_filename[len(self._root) :]
            self.all[-1].calls.append((file, code.co_qualname))


@contextmanager
def walking(until: Callable[..., Any]) -> Iterator[Walks]:
    """Record the walks of this thread, and of threads that start meanwhile, into one list."""
    walks = Walks(until)
    threading.setprofile(walks)
    sys.setprofile(walks)
    try:
        yield walks
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
