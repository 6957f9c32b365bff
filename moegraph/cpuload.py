"""How many of the CPUs that this process may use are taken by other programs."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .threads import affinity

# Seconds between two looks, at least. The kernel counts in steps of 10 ms.
LOOK_S = 0.05
# A look may cost this share of the time; on a machine with many CPUs the file is long.
_LOOK_SHARE = 0.01
# Other programs that take less than this part of a CPU leave it free.
_IGNORED = 0.3


class _Reading(NamedTuple):
    at: float  # seconds of the clock
    own: float  # CPU seconds of this process
    ticks: dict[int, tuple[int, int]]  # by CPU: idle ticks, all ticks


def parse(text: bytes) -> dict[int, tuple[int, int]]:
    """Return the ticks (idle, all) of each CPU in the text of /proc/stat; {} if it has no such."""
    found = {}
    for line in text.splitlines():
        name, *numbers = line.split() or [b""]
        if not name.startswith(b"cpu"):
            break  # the rows of the CPUs come first
        if not name[3:].isdigit():
            continue  # the sum of all CPUs
        if len(numbers) < 4 or not all(number.isdigit() for number in numbers):
            return {}
        # user nice system idle iowait irq softirq steal; what follows is part of user and nice
        ticks = [int(number) for number in numbers[:8]]
        found[int(name[3:])] = (sum(ticks[3:5]), sum(ticks))
    return found


class CpuLoad:
    """Looks at the load now and then, when it is asked; it never waits.

    The CPUs of this process were busy for as long as they were not idle. What this process did not
    use of that time, other programs used.
    """

    def __init__(
        self,
        stat: Path = Path("/proc/stat"),
        clock: Callable[[], float] = time.perf_counter,
        own: Callable[[], float] = time.process_time,
    ) -> None:
        """Take the first reading. clock, own: seconds, and CPU seconds of this process."""
        self._stat, self._clock, self._own = stat, clock, own
        self._taken: float | None = None
        self._next = math.inf  # clock time of the next look
        self._last = self._read()

    def taken(self) -> float | None:
        """Return how many CPUs other programs take, from 0; None if that is unknown.

        It is the mean of the time between the last two looks.
        """
        if self._clock() >= self._next:
            before, self._last = self._last, self._read()
            self._taken = self._between(before, self._last)
        return self._taken

    def free(self) -> int | None:
        """Return how many CPUs other programs leave to this process, from 1; None if unknown."""
        taken = self.taken()
        return None if taken is None else max(1, len(affinity()) - math.ceil(taken - _IGNORED))

    def _read(self) -> _Reading:
        now = self._clock()
        try:
            ticks = parse(self._stat.read_bytes())
        except OSError:
            ticks = {}
        # a file that could not be read is not read again
        cost = (self._clock() - now) / _LOOK_SHARE
        self._next = now + max(LOOK_S, cost) if ticks else math.inf
        return _Reading(now, self._own(), ticks)

    def _between(self, before: _Reading, after: _Reading) -> float | None:
        cpus = affinity()
        if not all(cpu in before.ticks and cpu in after.ticks for cpu in cpus):
            return None
        seconds, own = after.at - before.at, after.own - before.own
        idle, total = (
            sum(after.ticks[cpu][i] - before.ticks[cpu][i] for cpu in cpus)
            / os.sysconf("SC_CLK_TCK")
            for i in (0, 1)
        )
        if own < 0:  # this process was forked in between
            return self._taken
        if total < seconds * len(cpus) / 2:  # some sandboxes show rows that never change
            return None
        return min(max(0.0, len(cpus) - (idle + own) / seconds), float(len(cpus)))


# The first reading is taken when the program starts, so that loading a small model can use it.
LOAD = CpuLoad()
