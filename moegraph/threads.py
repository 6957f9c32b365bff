"""CPU threads: how many may run, and the number and poll level that give the fastest tokens.

ggml's threads wait for each other after every node of a graph. A thread that arrives early spins
for a while and then sleeps. The fastest way depends on the model, the machine and other programs,
so it is measured, with the tokens of an answer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

MAX_THREADS = 512
# llama.cpp's default for --poll.
SPIN = 50
SLEEP = 0

# A way is tried for at least _TRY_S seconds and _TRY_TOKENS tokens. A slow way ends earlier: after
# twice the time that the best way so far needs for that, and the first way after _FIRST_S.
_TRY_S = 0.012
_TRY_TOKENS = 3
_FIRST_S = 0.025
# Beside a program that keeps a core busy, threads on all cores wait for its time slices, of some
# milliseconds each, whenever they meet. Tokens as long as this one lose little by trying that.
_LONG_S = 0.03
# If a way takes this many times the best time, fewer threads with its poll level are not tried.
_HOPELESS = 1.5
# A way that takes this many times the best time is dropped after half the time of a trial.
_HOPELESS_AT_ONCE = 3
# A way replaces the current one only if it is faster by this factor.
_BETTER = 1.05
# A window slower than usual by this factor is slow; two in a row start a trial.
_SLOWER = 1.25
# The usual time follows each window by at most this factor; a longer context raises it slowly.
_DRIFT = 1.02
# Token time between two trials: at least this many times the cost of the last, and these seconds.
_PAUSE_COSTS = 50
_PAUSE_S = 1.0
# A trial that changes nothing doubles the pause in seconds before the next one, up to this.
_LONGEST_PAUSE_S = 8.0


class Threads(NamedTuple):
    """A way to compute: n threads with a poll level (0 to 100, as llama.cpp's --poll)."""

    n: int
    poll: int


def usable_cpus(root: Path = Path("/")) -> int:
    """Return how many CPUs this process may use, by its affinity and its control group."""
    allowed = len(affinity())
    quota = _cpu_quota(root / "sys/fs/cgroup")
    return max(1, allowed if quota is None else min(allowed, math.ceil(quota)))


def default_threads() -> int:
    """Return the number of physical cores that this process may use, counted as llama.cpp does.

    Two threads on one core would share its vector units and make matrix products slower.
    """
    usable = usable_cpus()
    cores = _physical_cores()
    if not cores:
        cores = usable if usable <= 4 else usable // 2
    return max(1, min(cores, usable, MAX_THREADS))


def ways(n_max: int, n_threads: int | None = None, poll: int | None = None) -> list[Threads]:
    """Return the ways to try, the most promising first.

    n_threads, poll: the user's settings; None if not set.
    """
    spin = SPIN if poll is None else poll
    counts = _counts(n_max) if n_threads is None else [n_threads]
    found = [Threads(n, spin) for n in counts]
    if poll is None and counts[0] > 1:
        found.append(Threads(counts[0], SLEEP))
    return found


def waiting(n_threads: int) -> int:
    """Return the poll level without measurement: SLEEP if there are more threads than CPUs."""
    return SPIN if n_threads <= usable_cpus() else SLEEP


def _counts(n_max: int) -> list[int]:
    """Return thread counts to try, from n_max down to 1, each about a third less."""
    found = [n_max]
    while found[-1] > 1:
        found.append(found[-1] - max(1, found[-1] // 3))
    return found


def affinity() -> Sequence[int]:
    """Return the numbers of the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return range(os.cpu_count() or 4)


def _physical_cores() -> int:
    """Count the sets of thread siblings among the allowed CPUs; 0 without sysfs."""
    siblings = set()
    for cpu in affinity():
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings") as file:
                siblings.add(file.readline())
        except OSError:
            continue
    return len(siblings)


def _cpu_quota(folder: Path) -> float | None:
    """Return the CPUs that the control group (version 2 or 1) allows; None without a limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = " ".join((folder / name).read_text() for name in names).split()
        except OSError:
            continue
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            return int(words[0]) / int(words[1])
    return None


def _unknown() -> None:
    """The number of free CPUs is unknown."""


class Tuner:
    """Chooses the fastest way to compute a token.

    The caller computes each token the way `current` says and reports its time to `took`. First a
    trial gives every way a few tokens. A new trial starts when tokens stay slower for a while, and
    now and then while the most promising way is not the chosen one. The extra cost of trials stays
    below 2 % of the time.

    Other programs may keep some CPUs busy. Then a way with more threads than free CPUs is not
    tried, unless tokens are long: one such token can take as long as a hundred others.
    """

    def __init__(
        self, choices: Sequence[Threads], free: Callable[[], int | None] = _unknown
    ) -> None:
        """Start; choices: at least one way, the most promising first.

        free: returns how many CPUs other programs leave free; None if that is unknown.
        """
        self._ways = list(choices)
        self._free = free
        self.current = self._ways[0]
        self.measured: dict[Threads, float] = {}  # seconds per token, in the last trial
        self._usual = 0.0  # seconds per token
        self._spent, self._n = 0.0, 0  # seconds and tokens, of this way or window
        self._to_try: list[Threads] = []
        self._crowded: list[Threads] = []  # ways to try after those, if tokens are long
        self._cost = self._since = 0.0  # extra cost of the last trial, and token time since then
        self._pause = _PAUSE_S  # token time until the next trial, at least
        self._n_slow = 0
        if len(self._ways) > 1:
            self._begin_trial()

    @property
    def is_settled(self) -> bool:
        """Whether no trial is running."""
        return not self._to_try

    def took(self, seconds: float) -> None:
        """Record the seconds that one token took with `current`."""
        if len(self._ways) == 1:
            return
        self._spent += seconds
        self._n += 1
        if self.is_settled:
            self._watch()
        elif self._is_tried():
            self._next_way()

    def resume(self) -> None:
        """Start a trial if another program took a core while no tokens were computed."""
        if self.is_settled and self.current not in self._promising():
            self._begin_trial()

    def _promising(self) -> list[Threads]:
        """Return the ways that may be the fastest, judged by the length of a token."""
        return self._ways if self._usual >= _LONG_S else self._roomy()

    def _roomy(self) -> list[Threads]:
        """Return the ways with no more threads than free CPUs; if there is none, those that sleep.

        Threads that share a core with another program lose less if they sleep.
        """
        free = self._free()
        if free is None:
            return self._ways
        roomy = [way for way in self._ways if way.n <= free]
        return roomy or [way for way in self._ways if way.poll == SLEEP] or self._ways

    def _begin_trial(self) -> None:
        """Try the current way, then the others."""
        self._before = self.current
        order = [self._before, *(way for way in self._ways if way != self._before)]
        roomy = self._roomy()
        self._to_try = [way for way in order if way in roomy]
        self._crowded = [way for way in order if way not in roomy]
        self.current = self._to_try[0]
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
        way = self._to_try.pop(0)
        self.measured[way] = took
        self._trial_s += self._spent
        self._trial_tokens += self._n
        self._spent, self._n = 0.0, 0
        best = min(self.measured.values())
        if took > _HOPELESS * best:
            self._to_try = [w for w in self._to_try if w.n >= way.n or w.poll != way.poll]
        if not self._to_try and best >= _LONG_S:
            self._to_try, self._crowded = self._crowded, []
        if self._to_try:
            self.current = self._to_try[0]
        else:
            self._settle()

    def _settle(self) -> None:
        best = min(self.measured, key=lambda way: self.measured[way])
        if self.measured.get(self._before, math.inf) <= _BETTER * self.measured[best]:
            best = self._before
        is_same = best == self._before
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S) if is_same else _PAUSE_S
        self.current, self._usual = best, self.measured[best]
        self._cost = max(0.0, self._trial_s - self._trial_tokens * self._usual)
        self._since = 0.0

    def _watch(self) -> None:
        if self._spent < _TRY_S:
            return
        if self._n < _TRY_TOKENS and self._spent < 2 * _TRY_TOKENS * self._usual:
            return
        took = self._spent / self._n
        self._since += self._spent
        self._spent, self._n = 0.0, 0
        if took > _SLOWER * self._usual:
            self._n_slow += 1
        else:
            self._n_slow = 0
            self._usual = min(max(took, self._usual / _DRIFT), self._usual * _DRIFT)
        if self._should_try():
            self._begin_trial()

    def _should_try(self) -> bool:
        promising = self._promising()
        if self.current not in promising:  # another program took a core
            return self._n_slow > 0
        pause = self._pause
        if self.current == promising[0]:
            self._pause = _PAUSE_S
            if self._n_slow < 2:
                return False
        if self._n_slow >= 2:
            pause = _PAUSE_S
        return self._since >= max(pause, _PAUSE_COSTS * self._cost)
