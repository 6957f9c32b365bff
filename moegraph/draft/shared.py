"""Whether sequences that share passes draft: by what passes with and without drafts gave.

What a pass of so many rows takes is not known well before there was one. So drafts are tried, and
rest if they give fewer tokens a second than passes without; then they are tried again, ever less
often.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..units import octave
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
# Passes of about as many rows whose times beside those expected count.
_RATIOS = 8
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
    width: int = 0  # of the last ones: the power of two of their rows
    refresh: int = _SOON  # of these, until the next without
    # times of passes with drafts over those expected, by powers of two of their rows; 0: without
    ratios: dict[int, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=_RATIOS))
    )

    def ratio(self, n_rows: int) -> float:
        """Return how many times as long as expected a pass of so many rows takes; 0: no drafts.

        Passes with drafts that were not measured are taken to be like those without.
        """
        for key in (octave(n_rows), 0):
            if len(self.ratios[key]) >= _FEWEST:
                return statistics.median(self.ratios[key])
        return 1.0

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

    def __init__(self, is_timed: bool = True) -> None:
        """is_timed: what is drafted may follow from what passes took."""
        self._is_timed = is_timed
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
            ratio = self._known[n_seqs.bit_length()].ratio
            self._plans[key] = best_for(drafter, passes, n_seqs, n_left, least, ratio)
        return self._plans[key]

    def forget_plans(self) -> None:
        """Have plans worked out anew: what they follow from has changed."""
        self._plans.clear()

    def observe(
        self, n_seqs: int, n_tokens: int, seconds: float, n_rows: int, ratio: float = 1.0
    ) -> None:
        """Count a pass that gave n_tokens.

        seconds: as if of one row; 0 if not known. n_rows: of the pass; with drafts there are more
        than sequences. ratio: its time, that of the drafts included, over what was expected.
        """
        n_each, known = n_tokens / n_seqs, self._known[n_seqs.bit_length()]
        has_drafts = n_rows > n_seqs
        if seconds and self._is_timed:
            known.ratios[octave(n_rows) if has_drafts else 0].append(ratio)
        if not has_drafts:
            if known.n_drafted >= known.refresh:
                known.plain.keep(_OLDER)
                known.refresh = min(2 * known.refresh, _REFRESH)
            known.n_rest, known.n_drafted = max(known.n_rest - 1, 0), 0
            known.plain.add(seconds, n_each)
            return
        known.n_drafted += 1
        if octave(n_rows) != known.width:
            known.drafted, known.width = _Passes(), octave(n_rows)
        known.drafted.add(seconds, n_each)
        if known.is_slower:
            known.drafted = _Passes()
            if known.interval == _LONGEST:  # in time, all lengths are tried again
                for ratios in filter(None, known.ratios.values()):
                    ratios.popleft()
            known.n_rest, known.interval = known.interval, min(2 * known.interval, _LONGEST)
        elif len(known.drafted.tokens) == _WINDOW:
            known.interval = _INTERVAL
        is_unknown = len(known.plain.tokens) < _FEW and len(known.drafted.tokens) >= _TRIAL
        if is_unknown or known.n_drafted >= known.refresh:
            known.n_rest = max(known.n_rest, _FEW)


def expected(drafters: Sequence[Candidate], passes: PassCost, n_seqs: int, n_rows: int) -> float:
    """Return the seconds of a pass of n_seqs sequences, and of the drafts if it has more rows.

    drafters: the one that drafts; empty if there is none.
    """
    n_draft, total = n_rows // n_seqs - 1, passes.at(n_rows)
    return total + sum(one.drafts_s(n_draft, n_seqs, passes) for one in drafters if n_draft)


def best_for(
    drafter: Candidate, passes: PassCost, n_seqs: int, n_left: int, least: float,
    ratio: Callable[[int], float],
) -> Plan:  # fmt: skip
    """Return what each of n_seqs sequences drafts: what is best by what is known, if it may pay.

    n_left: tokens until a text must end. least: how many times as fast as without drafts it must
    be. ratio: how many times as long as expected a pass takes, by its rows; 0 rows: without drafts.
    """
    longest = min(drafter.most, n_left - 1, MAX_SHARED_ROWS // n_seqs - 1)

    def value(n: int, rates: Sequence[float]) -> float:
        tokens, n_rows = grow(rates[:n], (), n).tokens[-1], n_seqs * (n + 1)
        return n_seqs * tokens / expected([drafter], passes, n_seqs, n_rows) / ratio(n_rows)

    rates, hopes = drafter.acceptance.rates, drafter.acceptance.hopes(_HOPE)
    best = max(range(1, longest + 1), key=lambda n: value(n, rates), default=0)
    if not best or value(best, hopes) <= least * n_seqs / passes.at(n_seqs) / ratio(0):
        return PLAIN
    return Plan(drafter.source.name, best, is_whole=True)
