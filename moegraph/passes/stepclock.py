"""The time of a step, as far as it is the engine's and not its caller's."""

from __future__ import annotations

import time
from dataclasses import dataclass

# Seconds: the device was still computing if the engine waited longer; so short a call of the
# caller counts as the engine's time.
_WAITED, _SHORT = 20e-6, 100e-6


@dataclass(frozen=True)
class StepSeconds:
    """How long a step took.

    total: since the end of the step before it. verify: from the launch of its pass to the results.
    Both are 0.0 if they are not known, because the caller did other things for longer than the
    device computed. commit: from the results to the end.
    """

    total: float
    verify: float
    commit: float


class StepClock:
    """Measures steps: `launch`, `leave`, `back`, `arrive` and `end`, in this order.

    has_streams: the device computes while the caller runs, between `leave` and `back`.
    """

    def __init__(self, has_streams: bool) -> None:
        self._has_streams = has_streams
        self._began = self._launched = self._left = self._back = self._arrived = 0.0
        self._apart: float | None = 0.0  # time of the caller that does not count; None: not known

    def begin(self) -> None:
        """Begin the first step."""
        self._began = time.perf_counter()

    def launch(self) -> None:
        """Note that the draft is done."""
        self._launched = time.perf_counter()

    def leave(self) -> None:
        """Note that the pass is launched."""
        self._left = time.perf_counter()

    def back(self) -> None:
        """Note that the caller asks for the next token."""
        self._back = time.perf_counter()

    def arrive(self) -> None:
        """Note that the results are there."""
        self._arrived = now = time.perf_counter()
        self._apart = self._back - self._left
        if self._has_streams:
            was_busy = now - self._back > _WAITED or self._apart < _SHORT
            self._apart = 0.0 if was_busy else None

    def end(self) -> StepSeconds:
        """End a step and begin the next one."""
        now = time.perf_counter()
        total = verify = 0.0
        if self._apart is not None:
            total = now - self._began - self._apart
            verify = self._arrived - self._launched - self._apart
        self._began = now
        return StepSeconds(total, verify, now - self._arrived)
