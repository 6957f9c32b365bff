"""Whether sequences that share passes draft: by what passes with and without drafts gave.

What a pass of so many rows takes is not known well before there was one. So drafts are tried, and
rest if they give fewer tokens a second than passes without; then they are tried again, ever less
often.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .candidate import Candidate
from .plan import PLAIN, Plan
from .shapes import grow
from .stepcost import PassCost

# Most rows of a pass of several sequences that draft: attention over pages takes no more.
MAX_SHARED_ROWS = 32
# Passes that count, at most; how many there must be without drafts, and with drafts: graphs are
# built in the first ones.
_WINDOW, _FEW, _TRIAL = 16, 4, 8
# Passes without drafts between two trials, at first and at most.
_INTERVAL, _LONGEST = 64, 1024
# Passes with drafts until a few without measure their time anew, at first and at most, and how many
# older ones count with these: the first ones took longer, because graphs were built and the experts
# of a prompt were replaced.
_SOON, _REFRESH, _OLDER = 16, 256, 2
# Drafts rest below this speed beside passes without; after fewer passes, if they are far below it.
_LEAST, _FAR, _FEWEST = 0.99, 0.7, 3
# Standard deviations by which the rates of a drafter may well be higher than they seem: without
# drafts nothing would be learned of them, and each pass tells of as many drafts as sequences.
_HOPE = 1.0


@dataclass
class _Passes:
    """The last passes of a kind: seconds as if of one row, and tokens of a sequence, of each."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    tokens: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def add(self, seconds: float, n_tokens: float) -> None:
        if seconds:
            self.seconds.append(seconds)
            self.tokens.append(n_tokens)

    def keep(self, n: int) -> None:
        """Forget all but the last n."""
        for each in (self.seconds, self.tokens):
            while len(each) > n:
                each.popleft()

    @property
    def speed(self) -> float:
        """Tokens a second of a sequence; pauses and new graphs do not count."""
        return statistics.fmean(self.tokens) / statistics.median(self.seconds)


@dataclass
class _Known:
    """What is known of passes of about as many sequences."""

    plain: _Passes = field(default_factory=_Passes)
    drafted: _Passes = field(default_factory=_Passes)
    n_rest: int = _FEW  # passes without drafts before the next with drafts
    interval: int = _INTERVAL
    n_drafted: int = 0  # in a row
    refresh: int = _SOON  # of these, until the next without

    @property
    def is_slower(self) -> bool:
        """Whether drafts give fewer tokens a second."""
        n = len(self.drafted.tokens)
        if n < _FEWEST or len(self.plain.tokens) < _FEW:
            return False
        return self.drafted.speed < (_LEAST if n >= _TRIAL else _FAR) * self.plain.speed


class SharedPasses:
    """Learns from passes of several sequences.

    Numbers of sequences within a factor of two count as one, so times are given as what a pass of
    one row would take by the law.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = defaultdict(_Known)
        self._plans: dict[tuple[str, int, int], Plan] = {}

    def may_draft(self, n_seqs: int) -> bool:
        """Return whether drafts are worth trying in the next pass of so many sequences."""
        return self._known[n_seqs.bit_length()].n_rest == 0

    def plan(
        self, drafter: Candidate, passes: PassCost, n_seqs: int, n_left: int, least: float
    ) -> Plan:
        """Return what each of n_seqs sequences drafts, as `best_for`.

        Each of the sequences asks, while the device waits, so it is worked out once.
        """
        key = drafter.source.name, n_seqs, min(n_left, MAX_SHARED_ROWS)
        if key not in self._plans:
            self._plans[key] = best_for(drafter, passes, n_seqs, n_left, least)
        return self._plans[key]

    def forget_plans(self) -> None:
        """Have plans worked out anew: what they follow from has changed."""
        self._plans.clear()

    def observe(self, n_seqs: int, n_tokens: int, seconds: float, has_drafts: bool) -> None:
        """Count a pass that gave n_tokens. seconds: as if of one row; 0 if not known."""
        n_each, known = n_tokens / n_seqs, self._known[n_seqs.bit_length()]
        if not has_drafts:
            if known.n_drafted >= known.refresh:
                known.plain.keep(_OLDER)
                known.refresh = min(2 * known.refresh, _REFRESH)
            known.n_rest, known.n_drafted = max(known.n_rest - 1, 0), 0
            known.plain.add(seconds, n_each)
            return
        known.n_drafted += 1
        known.drafted.add(seconds, n_each)
        if known.is_slower:
            known.drafted = _Passes()
            known.n_rest, known.interval = known.interval, min(2 * known.interval, _LONGEST)
        elif len(known.drafted.tokens) == _WINDOW:
            known.interval = _INTERVAL
        is_unknown = len(known.plain.tokens) < _FEW and len(known.drafted.tokens) >= _TRIAL
        if is_unknown or known.n_drafted >= known.refresh:
            known.n_rest = max(known.n_rest, _FEW)


def best_for(drafter: Candidate, passes: PassCost, n_seqs: int, n_left: int, least: float) -> Plan:
    """Return what each of n_seqs sequences drafts: what is best by what is known, if it may pay.

    n_left: tokens until a text must end. least: how many times as fast as without drafts it must
    be.
    """
    longest = min(drafter.most, n_left - 1, MAX_SHARED_ROWS // n_seqs - 1)

    def value(n: int, rates: Sequence[float]) -> float:
        draft_s = n_seqs * drafter.draft_s(n, passes)
        tokens = grow(rates[:n], (), n).tokens[-1]
        return n_seqs * tokens / (draft_s + passes.at(n_seqs * (n + 1)))

    rates, hopes = drafter.acceptance.rates, drafter.acceptance.hopes(_HOPE)
    best = max(range(1, longest + 1), key=lambda n: value(n, rates), default=0)
    if not best or value(best, hopes) <= least * n_seqs / passes.at(n_seqs):
        return PLAIN
    return Plan(drafter.source.name, best, is_whole=True)
