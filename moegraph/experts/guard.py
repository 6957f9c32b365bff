"""Notices while it runs that moving experts into slots does not pay, and stops it.

Two ways to decode are compared by the clock, a token each: with the cache at work, and bypassed:
the slots stay as they are and nothing goes up for later. Every measurement is short, follows a
suspicion, and comes half as often as the one before it, so that a cache that pays is hardly
disturbed and two ways that are equally good do not alternate:

    active --- suspicion ---> probe bypassed --- faster ---> bypassed
       <------- no faster ----------'
    bypassed - suspicion ---> probe active ----- faster ---> active
       <------- no faster ----------'

A suspicion of the cache: hardly any choice of the router hits a slot that can change, or moving
experts takes a noticeable part of a token (by what a copy took at start) and each is hit a few
times only, or nobody looked for 4096 tokens. Without hits nothing is lost by keeping the slots as
they are, so then a tie is enough. A suspicion of bypassing: tokens take longer than the cache
needed when it was last tried, or nobody looked for a while. Slots that went stale make them so,
and so does a context that only grew: the probe tells one from the other, and its time is what the
cache is held to from then on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Tokens: before the first look, and between two probes at most.
FIRST_LOOK = 96
_LONGEST = 4096
# Tokens that a probe measures, and that steady decoding is judged by; the slowest of them do not
# count: somebody may have paused the output.
_PROBE, _WINDOW, _DROPPED = 16, 32, 2
# Tokens after a change that are not measured: uploads end, or the slots are exchanged first.
_SETTLE = 4
# A cache that hits less is no cache.
_NO_HITS = 0.02
# Moving experts that takes less of a token is hardly why it is slow.
_NOTICEABLE = 0.2
# Hits for each expert moved that pay for its way, if a miss costs anything like a copy.
_PAYS = 4
# A change has to be worth this much; so much slower is suspicious, or no price for a tie.
_BETTER, _WORSE = 0.95, 1.1


@dataclass(frozen=True)
class Counters:
    """Sums so far over the layers whose slots can change: choices, hits, experts given a slot."""

    chosen: int
    hits: int
    moved: int

    def since(self, earlier: Counters) -> Counters:
        """Return what was counted after earlier."""
        return Counters(
            self.chosen - earlier.chosen, self.hits - earlier.hits, self.moved - earlier.moved
        )

    def plus(self, more: Counters) -> Counters:
        """Return both together."""
        return Counters(self.chosen + more.chosen, self.hits + more.hits, self.moved + more.moved)

    @property
    def hit_rate(self) -> float:
        """Return hits over choices, 1 when nothing was chosen."""
        return self.hits / self.chosen if self.chosen else 1.0


class PassClock:
    """Seconds that the engine spends on passes: what its caller does meanwhile does not count."""

    def __init__(self) -> None:
        self._away = 0.0
        self._left_at: float | None = None

    def __call__(self) -> float:
        """Return the time."""
        return time.perf_counter() - self._away

    def leave(self) -> None:
        """Note that the caller goes on while a pass is under way."""
        self._left_at = time.perf_counter()

    def back(self) -> None:
        """Note that the engine has the pass again."""
        if self._left_at is not None:
            self._away += time.perf_counter() - self._left_at
            self._left_at = None


class CacheGuard:
    """Decides between two tokens whether experts may move.

    read: returns the counters as they stand; called only when something is decided. move_s: seconds
    that one expert takes to its slot. bypassed: whether the next token leaves the slots alone.
    messages: lines about what changed, for whoever shows them to clear.
    """

    def __init__(
        self,
        read: Callable[[], Counters],
        move_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._read, self._move_s, self._clock = read, move_s, clock
        self.bypassed = False
        self.messages: list[str] = []
        self.n_probes = self.n_bypassed_tokens = 0
        self._settled = False  # what `bypassed` is when no probe is under way
        self._interval = FIRST_LOOK
        self._began: float | None = None  # the single-row pass under way
        self._is_back = False  # the cache was put to work again and no pass began since
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._n = self._unprobed = 0
        self._start = read()
        self._outside: Counters | None = None  # as a run of passes of several rows began
        self._steady_s = 0.0  # a token in the way that a probe is compared with
        self._left_s = 0.0  # a token with the cache at work, when that was last tried
        self._hits_nothing = False

    def begin_pass(self, n_tokens: int) -> bool:
        """Note that a pass begins; return whether the cache was put to work again before it.

        Only passes of a single row say how long a token takes.
        """
        self._began = None
        if n_tokens != 1:  # a prompt hits and moves as well, and tells nothing about tokens
            self._outside = self._outside or self._read()
            return False
        if self._outside:
            self._start = self._start.plus(self._read().since(self._outside))
            self._outside = None
        is_back, self._is_back = self._is_back, False
        self._began = self._clock()
        return is_back

    def end_pass(self) -> None:
        """Note that the results of the pass are there; what passes until the next is nobody's.

        Nor is what its clock leaves out.
        """
        if self._began is None:
            return
        seconds, self._began = self._clock() - self._began, None
        self.n_bypassed_tokens += self.bypassed
        self._n += 1
        if self._n > _SETTLE:
            self._times.append(seconds)
            self._decide()

    def _decide(self) -> None:
        if self.bypassed != self._settled:
            if self._n == _SETTLE + _PROBE:
                self._judge_probe()
        elif self._n >= self._interval or (self.bypassed and self._is_slow()):
            self._consider_probe()

    def _is_slow(self) -> bool:
        """Return whether tokens take clearly longer than the cache needed when last tried."""
        limit = _WORSE * (_WORSE if self._hits_nothing else 1.0)
        return self._n % _WINDOW == 0 and self._mean() > limit * self._left_s

    def _consider_probe(self) -> None:
        """Probe the other way if there is reason to."""
        counted, steady = self._read().since(self._start), self._mean()
        if not self.bypassed:
            self._hits_nothing = counted.hit_rate < _NO_HITS and counted.moved > 0
            moving = counted.moved * self._move_s / self._n
            self._unprobed += self._n
            is_busy = moving >= _NOTICEABLE * steady and counted.hits < _PAYS * counted.moved
            is_suspect = self._hits_nothing or is_busy
            if not is_suspect and self._unprobed < _LONGEST:
                self._begin(self.bypassed)
                return
        self._unprobed = 0
        self.n_probes += 1
        self._steady_s = steady
        self._begin(not self.bypassed)

    def _judge_probe(self) -> None:
        """End a probe: stay with the faster way."""
        trial, steady = self._mean(), self._steady_s
        self._interval = min(2 * self._interval, _LONGEST)
        if self.bypassed:
            if trial < (_WORSE if self._hits_nothing else _BETTER) * steady:
                self._left_s = steady
                why = "hits nothing" if self._hits_nothing else "costs more than it saves"
                self._settle(True, f"{why}: {_ms(steady)} a token with it, {_ms(trial)} without")
                return
        elif trial * (_WORSE if self._hits_nothing else 1.0) < _BETTER * steady:
            self._settle(False, f"{_ms(trial)} a token with it, {_ms(steady)} without")
            return
        else:
            self._left_s = trial  # the next early probe takes a growth of its own
        self._begin(self._settled)

    def _settle(self, bypassed: bool, why: str) -> None:
        if not bypassed:
            self._interval = min(2 * self._interval, _LONGEST)
            self.messages.append(f"the expert cache is at work again: {why}")
        else:
            self.messages.append(f"the expert cache {why}; it is bypassed for now")
        self._settled = bypassed
        self._begin(bypassed)

    def _begin(self, bypassed: bool) -> None:
        """Count from here on, in one way or the other."""
        self._is_back = self.bypassed and not bypassed
        self.bypassed = bypassed
        self._times.clear()
        self._n = 0
        self._start = self._read()

    def _mean(self) -> float:
        """Return the mean of the times, the slowest left out."""
        kept = sorted(self._times)[: max(1, len(self._times) - _DROPPED)]
        return sum(kept) / len(kept)

    def report(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "bypassed": self._settled, "n_probes": self.n_probes,
            "n_bypassed_tokens": self.n_bypassed_tokens,
        }  # fmt: skip


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
