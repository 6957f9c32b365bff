"""Ownership of an engine: by one thread, and by one generation at a time."""

from __future__ import annotations

import inspect
import os
import threading
import weakref
from collections.abc import Generator
from typing import Any

from ..errors import EngineBusy, RequestError

# No thread has this identifier.
_NO_THREAD = 0


def is_live(steps: Generator[Any, None, None]) -> bool:
    """Return whether a generator has not ended."""
    return inspect.getgeneratorstate(steps) != inspect.GEN_CLOSED


class Ownership:
    """Records which thread and which generation own an engine.

    Thread: the first one that calls after loading or after `hand_over`. Other threads are refused.

    Generation: a generator owns the engine from its first step until it ends. There is only a weak
    reference to it, so it never has to release the engine: a generator that returned, failed, was
    closed or was deleted owns nothing, even if an interrupt ended it.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._thread = _NO_THREAD
        self._generation: weakref.ref[Generator[Any, None, None]] | None = None

    def require_open(self) -> None:
        """Check that the engine is not closed.

        Raises:
            RequestError: the engine is closed.
        """
        if self.is_closed:
            raise RequestError("the engine is closed; load the model again")
        if os.getpid() != self._process:
            raise RequestError(
                "the engine was loaded before a fork; load the model in this process"
            )

    def enter(self) -> None:
        """Check that the calling thread owns the engine; make it the owner if no thread is.

        Raises:
            RequestError: the engine is closed, or it belongs to another thread.
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
        """Check that the calling thread owns the engine and that no generation is running.

        Raises:
            EngineBusy: a generation is running.
            RequestError: as in `enter`.
        """
        self.enter()
        if self._owner() is not None:
            raise EngineBusy("another generation is running; close it first")

    def claim(self, generation: Generator[Any, None, None]) -> None:
        """Make a generation the owner until it ends; no effect if it already is.

        Raises:
            EngineBusy: another generation is running.
            RequestError: as in `enter`.
        """
        self.enter()
        if self._generation and self._generation() is generation:
            return
        owner = self._owner()
        if owner is None:
            self._generation = weakref.ref(generation)
        elif owner is not generation:
            raise EngineBusy("another generation is running; close it first")

    def holds(self, generation: Generator[Any, None, None]) -> bool:
        """Return whether this generation owns the engine, and the engine is open."""
        return not self.is_closed and self._owner() is generation

    @property
    def is_here(self) -> bool:
        """Whether the engine belongs to the calling thread."""
        return self._thread == threading.get_ident()

    def hand_over(self) -> None:
        """Release the engine from the calling thread; the next thread that calls owns it.

        Raises:
            RequestError: as in `enter`.
        """
        self.enter()
        self._thread = _NO_THREAD

    def _owner(self) -> Generator[Any, None, None] | None:
        owner = self._generation() if self._generation else None
        return owner if owner is not None and is_live(owner) else None
