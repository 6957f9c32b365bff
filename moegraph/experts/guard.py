"""Bypasses the expert cache while moving experts into slots takes longer than it saves.

The guard compares the times of tokens with the cache active and with the cache bypassed: then the
slots stay as they are, and nothing is promoted. It switches for a short probe if it suspects that
the other way is faster, and the interval to the next probe doubles, so probes cost little and two
equally fast ways do not alternate:

    active --- suspicion ---> probe bypassed --- faster ---> bypassed
       <------- no faster ----------'
    bypassed - suspicion ---> probe active ----- faster ---> active
       <------- no faster ----------'

It suspects the active cache if hardly any choice hits a slot that can change; if moving experts
takes much of a token (by the time of an upload at load) and each moved expert is hit a few times
only; or 4096 tokens after the last probe. A cache without hits loses nothing if its slots stay, so
it is bypassed even if that is slightly slower. It suspects bypassing if tokens take longer than
they took with the cache when it was last active, or when the interval ends. Tokens become slower
because the slots are out of date, or because the context grew: the probe finds out which.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Tokens before the first decision, and the longest interval between two probes.
FIRST_LOOK = 96
_LONGEST = 4096
# Tokens that a probe measures, tokens it is compared with, and how many of the slowest of either do
# not count, because the process may have been paused.
_PROBE, _WINDOW, _DROPPED = 16, 32, 2
# Tokens that are not measured after a switch, while uploads end or the slots are exchanged.
_SETTLE = 4
# Below this hit rate the cache counts as one without hits.
_NO_HITS = 0.02
# If moving experts takes a smaller share of a token than this, it is not why the token is slow.
_MIN_MOVING = 0.2
# With this many hits per moved expert, the cache saves time, because a miss costs about a move.
_ENOUGH_HITS = 4
# Ratios of token times: the other way must be this much faster; tokens this much slower are
# suspicious, and bypassing a cache without hits may make them this much slower.
_BETTER, _WORSE = 0.95, 1.1


@dataclass(frozen=True)
class Counters:
    """Sums so far over the layers whose slots can change: choices, hits, experts given a slot."""

    chosen: int
    hits: int
    moved: int

    def since(self, earlier: Counters) -> Counters:
        """Return the counts since earlier."""
        return Counters(
            self.chosen - earlier.chosen, self.hits - earlier.hits, self.moved - earlier.moved
        )

    def plus(self, more: Counters) -> Counters:
        """Return the sums of both."""
        return Counters(self.chosen + more.chosen, self.hits + more.hits, self.moved + more.moved)

    @property
    def hit_rate(self) -> float:
        """Return hits over choices, 1 if nothing was chosen."""
        return self.hits / self.chosen if self.chosen else 1.0


class CacheGuard:
    """Decides between two tokens whether the cache is bypassed.

    read: returns the current counters; called only for a decision. move_s: seconds to upload one
    expert. bypassed: whether the next token leaves the slots as they are. messages: one line for
    each change; the caller shows and clears them.
    """

    def __init__(self, read: Callable[[], Counters], move_s: float) -> None:
        self._read, self._move_s = read, move_s
        self.bypassed = False
        self.messages: list[str] = []
        self.n_probes = self.n_bypassed_tokens = 0
        self._settled = False  # what `bypassed` is when no probe is under way
        self._interval = FIRST_LOOK
        self._is_timed = False  # the pass under way counts
        self._is_back = False  # the cache became active and no pass has begun since
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._n = self._unprobed = 0
        self._start = read()
        self._outside: Counters | None = None  # counters before the current passes of several rows
        self._steady_s = 0.0  # seconds a token before the probe, in the settled way
        self._active_s = 0.0  # seconds a token when the cache was last active
        self._hits_nothing = False

    def begin_pass(self, is_timed: bool) -> bool:
        """Note that a pass begins; return whether the cache became active again before it.

        is_timed: it decodes one row, so that its time can be compared with others.
        """
        self._is_timed = is_timed
        if not is_timed:  # hits and moves of a prompt say nothing about decoding
            self._outside = self._outside or self._read()
            return False
        if self._outside:
            self._start = self._start.plus(self._read().since(self._outside))
            self._outside = None
        is_back, self._is_back = self._is_back, False
        return is_back

    def end_pass(self, seconds: float) -> None:
        """Note that the results of the pass have arrived, and how long it took."""
        if not self._is_timed:
            return
        self._is_timed = False
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
        """Return whether tokens take clearly longer than when the cache was last active."""
        limit = _WORSE * (_WORSE if self._hits_nothing else 1.0)
        return self._n % _WINDOW == 0 and self._mean() > limit * self._active_s

    def _consider_probe(self) -> None:
        """Begin a probe of the other way if there is a suspicion."""
        counted, steady = self._read().since(self._start), self._mean()
        if not self.bypassed:
            self._hits_nothing = counted.hit_rate < _NO_HITS and counted.moved > 0
            moving = counted.moved * self._move_s / self._n
            self._unprobed += self._n
            is_busy = moving >= _MIN_MOVING * steady and counted.hits < _ENOUGH_HITS * counted.moved
            is_suspect = self._hits_nothing or is_busy
            if not is_suspect and self._unprobed < _LONGEST:
                self._begin(self.bypassed)
                return
        self._unprobed = 0
        self.n_probes += 1
        self._steady_s = steady
        self._begin(not self.bypassed)

    def _judge_probe(self) -> None:
        """End a probe and settle on the faster way."""
        trial, steady = self._mean(), self._steady_s
        self._interval = min(2 * self._interval, _LONGEST)
        if self.bypassed:
            if trial < (_WORSE if self._hits_nothing else _BETTER) * steady:
                self._active_s = steady
                why = "hits nothing" if self._hits_nothing else "costs more than it saves"
                self._settle(True, f"{why}: {_ms(steady)} a token with it, {_ms(trial)} without")
                return
        elif trial * (_WORSE if self._hits_nothing else 1.0) < _BETTER * steady:
            self._settle(False, f"{_ms(trial)} a token with it, {_ms(steady)} without")
            return
        else:
            self._active_s = trial  # so only a further slow-down is suspicious
        self._begin(self._settled)

    def _settle(self, bypassed: bool, why: str) -> None:
        if not bypassed:
            self._interval = min(2 * self._interval, _LONGEST)
            self.messages.append(f"the expert cache is active again: {why}")
        else:
            self.messages.append(f"the expert cache {why}; it is bypassed for now")
        self._settled = bypassed
        self._begin(bypassed)

    def _begin(self, bypassed: bool) -> None:
        """Start to count anew, active or bypassed."""
        self._is_back = self.bypassed and not bypassed
        self.bypassed = bypassed
        self._times.clear()
        self._n = 0
        self._start = self._read()

    def _mean(self) -> float:
        """Return the mean of the times without the slowest."""
        counted = sorted(self._times)[: max(1, len(self._times) - _DROPPED)]
        return sum(counted) / len(counted)

    def report(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "bypassed": self._settled, "n_probes": self.n_probes,
            "n_bypassed_tokens": self.n_bypassed_tokens,
        }  # fmt: skip


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
