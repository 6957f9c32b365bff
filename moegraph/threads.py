"""CPU threads: how many there may be, and which number and way of waiting make tokens quickest.

ggml's threads meet after every node of a graph. Those that come early spin for a while and then
sleep. Which is quicker depends on the model, on the machine, and on what other programs do at the
moment, so that it is measured: the tokens of an answer are what is timed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

MAX_THREADS = 512
# llama.cpp's default for --poll.
SPIN = 50
SLEEP = 0

# A way is tried for at least so many seconds and tokens, and for twice that time at most: the time
# of the best way so far for as many tokens. The first one has no such measure.
_TRY_S = 0.012
_TRY_TOKENS = 3
_FIRST_S = 0.025
# With fewer threads than a way that takes so many times the best time, none is tried.
_HOPELESS = 1.5
# A way that takes so many times the best time, for half the time of a trial, is tried no longer.
_HOPELESS_AT_ONCE = 3
# Another way has to be better by this factor to take over.
_BETTER = 1.05
# Tokens slower than they were by this factor, in two windows in a row, mean that something changed.
_SLOWER = 1.25
# What is usual may change by so much from window to window, as it does with a longer context.
_DRIFT = 1.02
# Between two trials, in token time: so many times what the last one cost, and so many seconds.
_PAUSE_COSTS = 50
_PAUSE_S = 0.5


class Threads(NamedTuple):
    """A way to compute: n threads, which poll (0 to 100, as in llama.cpp) before they sleep."""

    n: int
    poll: int


def usable_cpus(root: Path = Path("/")) -> int:
    """Return how many CPUs this process may keep busy: its affinity and its control group say."""
    allowed = len(_affinity())
    quota = _cpu_quota(root / "sys/fs/cgroup")
    return max(1, allowed if quota is None else min(allowed, math.ceil(quota)))


def default_threads() -> int:
    """Return the number of physical cores this process may use, as llama.cpp counts cores.

    Hyper-threads share the vector units, so counting them makes matrix products slower.
    """
    usable = usable_cpus()
    cores = _physical_cores()
    if not cores:
        cores = usable if usable <= 4 else usable // 2
    return max(1, min(cores, usable, MAX_THREADS))


def ways(n_max: int, n_threads: int | None = None, poll: int | None = None) -> list[Threads]:
    """Return the ways to compute that are worth trying, the likeliest first.

    n_threads, poll: what the user asked for; None where they did not.
    """
    spin = SPIN if poll is None else poll
    counts = _counts(n_max) if n_threads is None else [n_threads]
    found = [Threads(n, spin) for n in counts]
    if poll is None and counts[0] > 1:
        found.append(Threads(counts[0], SLEEP))
    return found


def waiting(n_threads: int) -> int:
    """Return the poll level for n threads where nothing is measured: too many should sleep."""
    return SPIN if n_threads <= usable_cpus() else SLEEP


def _counts(n_max: int) -> list[int]:
    """Return numbers of threads from n_max to 1: all up to 4, above that a third less each."""
    found = [n_max]
    while found[-1] > 1:
        found.append(found[-1] - max(1, found[-1] // 3))
    return found


def _affinity() -> Sequence[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 4)


def _physical_cores() -> int:
    """Count the sets of thread siblings among the allowed CPUs; 0 where there is no sysfs."""
    siblings = set()
    for cpu in _affinity():
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings") as file:
                siblings.add(file.readline())
        except OSError:
            continue
    return len(siblings)


def _cpu_quota(folder: Path) -> float | None:
    """Return the CPUs that a control group allows, version 2 or 1; None without a limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = " ".join((folder / name).read_text() for name in names).split()
        except OSError:
            continue
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            return int(words[0]) / int(words[1])
    return None


class Tuner:
    """Chooses between ways to compute a token by the time that tokens take.

    Compute each token the way `current` says and tell `took`. At first every way gets a few
    tokens. Then tokens are watched: when they become slower for a while, and from time to time
    when the likeliest way is not the chosen one, the ways are tried again. What trials cost more
    than the best way would have stays below 2 % of the time.
    """

    def __init__(self, choices: Sequence[Threads]) -> None:
        """Choose between at least one way, the likeliest first."""
        self._ways = tuple(choices)
        self.current = self._ways[0]
        self.measured: dict[Threads, float] = {}  # seconds a token, of the last trial
        self._usual = 0.0  # seconds a token
        self._spent, self._n = 0.0, 0  # with the way that is tried, or in the window
        self._left: list[Threads] = []
        self._cost = self._since = 0.0  # of the last trial, and token time since it ended
        self._n_slow = 0
        if len(self._ways) > 1:
            self._begin_trial()

    @property
    def is_settled(self) -> bool:
        """Whether a way is chosen, rather than one tried."""
        return not self._left

    def took(self, seconds: float) -> None:
        """Take note of what one token took the current way."""
        if len(self._ways) == 1:
            return
        self._spent += seconds
        self._n += 1
        if self.is_settled:
            self._watch()
        elif self._is_tried():
            self._next_way()

    def _begin_trial(self) -> None:
        """Try the way that is used now, then the others."""
        self._home = self.current
        self._left = [self._home, *(way for way in self._ways if way != self._home)]
        self.measured = {}
        self._trial_s, self._trial_tokens = 0.0, 0
        self._spent, self._n, self._n_slow = 0.0, 0, 0

    def _is_tried(self) -> bool:
        if self._n >= _TRY_TOKENS and self._spent >= _TRY_S:
            return True
        if not self.measured:
            return self._spent >= _FIRST_S
        best = min(self.measured.values())
        if self._spent >= max(_TRY_S / 2, _HOPELESS_AT_ONCE * best * self._n):
            return True
        return self._spent >= 2 * max(_TRY_S, _TRY_TOKENS * best)

    def _next_way(self) -> None:
        took = self._spent / self._n
        way = self._left.pop(0)
        self.measured[way] = took
        self._trial_s += self._spent
        self._trial_tokens += self._n
        self._spent, self._n = 0.0, 0
        if took > _HOPELESS * min(self.measured.values()):
            self._left = [w for w in self._left if w.n >= way.n or w.poll != way.poll]
        if self._left:
            self.current = self._left[0]
        else:
            self._settle()

    def _settle(self) -> None:
        best = min(self.measured, key=lambda way: self.measured[way])
        if self.measured[self._home] <= _BETTER * self.measured[best]:
            best = self._home
        self.current, self._usual = best, self.measured[best]
        self._cost = max(0.0, self._trial_s - self._trial_tokens * self._usual)
        self._since = 0.0

    def _watch(self) -> None:
        if self._n < _TRY_TOKENS or self._spent < _TRY_S:
            return
        took = self._spent / self._n
        self._since += self._spent
        self._spent, self._n = 0.0, 0
        if took > _SLOWER * self._usual:
            self._n_slow += 1
        else:
            self._n_slow = 0
            self._usual = min(max(took, self._usual / _DRIFT), self._usual * _DRIFT)
        changed = self._n_slow >= 2 or self.current != self._ways[0]
        if changed and self._since >= max(_PAUSE_S, _PAUSE_COSTS * self._cost):
            self._begin_trial()
