"""Who may use an engine: one thread, and one generation at a time."""

from __future__ import annotations

import inspect
import os
import threading
import weakref
from collections.abc import Generator
from typing import Any

from .errors import EngineBusy, RequestError

# No thread has this identifier.
_NO_THREAD = 0


def is_live(steps: Generator[Any, None, None]) -> bool:
    """Return whether a generator has steps left."""
    return inspect.getgeneratorstate(steps) != inspect.GEN_CLOSED


class Ownership:
    """The one place that knows which thread and which generation an engine belongs to.

    Thread: the first one that calls after loading, or after `hand_over`. Every other one is
    refused.

    Generation: a running generator owns the engine from its first step to its end. It is known by
    a weak reference to its frame, so nothing has to be released: a generator that returned, failed,
    was closed or was dropped owns nothing, wherever an interrupt found it.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._thread = _NO_THREAD
        self._generation: weakref.ref[Generator[Any, None, None]] | None = None

    def require_open(self) -> None:
        """Check that the engine can still be used.

        Raises:
            RequestError: it is closed.
        """
        if self.is_closed:
            raise RequestError("the engine is closed; load the model again")
        if os.getpid() != self._process:
            raise RequestError(
                "the engine was loaded before a fork; load the model in this process"
            )

    def enter(self) -> None:
        """Check that the calling thread may use the engine.

        Raises:
            RequestError: the engine is closed, or belongs to another thread.
        """
        self.require_open()
        if self._thread != threading.get_ident():
            self._adopt()

    def _adopt(self) -> None:
        with self._lock:
            if self._thread != _NO_THREAD:
                raise RequestError(
                    "the engine belongs to another thread; call hand_over() in that thread first"
                )
            self._thread = threading.get_ident()

    def enter_alone(self) -> None:
        """Check that the calling thread may use the engine and no generation does.

        Raises:
            EngineBusy: a generation is running.
            RequestError: as in `enter`.
        """
        self.enter()
        if self._owner() is not None:
            raise EngineBusy("another generation is running; close it first")

    def claim(self, generation: Generator[Any, None, None]) -> None:
        """Give the engine to a generation until that ends; again for one that has it is fine.

        Raises:
            EngineBusy: another generation is running.
            RequestError: as in `enter`.
        """
        self.enter()
        owner = self._owner()
        if owner is None:
            self._generation = weakref.ref(generation)
        elif owner is not generation:
            raise EngineBusy("another generation is running; close it first")

    def holds(self, generation: Generator[Any, None, None]) -> bool:
        """Return whether a generation owns the engine now."""
        return not self.is_closed and self._owner() is generation

    @property
    def is_here(self) -> bool:
        """Whether the engine belongs to the calling thread."""
        return self._thread == threading.get_ident()

    def hand_over(self) -> None:
        """Give the engine up; the next thread that calls becomes its thread.

        Raises:
            RequestError: as in `enter`.
        """
        self.enter()
        self._thread = _NO_THREAD

    def _owner(self) -> Generator[Any, None, None] | None:
        owner = self._generation() if self._generation else None
        return owner if owner is not None and is_live(owner) else None
