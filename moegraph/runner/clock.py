"""The time of a pass, without the time in which the engine's caller runs."""

from __future__ import annotations

import time


class PassClock:
    """Measures one pass: `start`, `leave` once it is enqueued, `back` when its caller asks for it.

    A pass that is never asked for is never read; the next `start` begins anew.
    """

    def __init__(self) -> None:
        self._began = 0.0
        self._left_at: float | None = None

    def start(self) -> float:
        """Start from zero; return the time now."""
        self._began, self._left_at = time.perf_counter(), None
        return self._began

    def leave(self) -> None:
        """Stop: the caller runs while the pass is under way."""
        self._left_at = time.perf_counter()

    def back(self) -> None:
        """Go on: the engine waits for the pass."""
        if self._left_at is not None:
            self._began += time.perf_counter() - self._left_at
            self._left_at = None

    def seconds(self) -> float:
        """Return the seconds since `start`, without those between `leave` and `back`."""
        return time.perf_counter() - self._began
