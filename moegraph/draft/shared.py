"""Whether sequences that share passes draft: by what passes with and without drafts gave.

An account, in passes without drafts, is charged what passes with drafts lose and credited what they
gain, and earns a small share of all passes. Without credit drafts rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..resident.layout import MAX_PAGED_ROWS
from ..units import octave
from .estimates import FEW, HOPE, MEMORY, OUTLIER, SHARE, Known, PassTimes
from .plan import PLAIN, Plan, expected_tokens

# What each further sequence adds to a draft for several at once, as a share of one for a sequence:
# the weights are read once.
_FURTHER = 0.2
# Most passes with drafts between those that measure what passes without take now.
_REFRESH = 128


@dataclass
class _Account:
    """What is known of passes of about as many sequences; seconds are as if of one row."""

    plain_s: float = 0.0
    n_plain: int = 0  # in a row, as far as they count
    n_drafted: int = 0  # since the last without
    refresh: float = 2.0 * FEW  # of these, until the next without
    credit: float = 2.0 * FEW
    # times over those expected, by powers of two of rows with drafts; 0: without
    ratios: dict[int, float] = field(default_factory=dict)

    def ratio(self, n_rows: int) -> float:
        """Return how many times as long as expected a pass of n_rows takes; 0 rows: no drafts.

        Passes with drafts that were not measured are taken to be like those without.
        """
        return self.ratios.get(octave(n_rows) if n_rows else 0, self.ratios.get(0, 1.0))


class SharedPasses:
    """Learns from passes of several sequences.

    Numbers of sequences within a factor of two count as one, so times are given as what a pass of
    one row would take by the law.
    """

    def __init__(self, is_timed: bool = True) -> None:
        """is_timed: what is drafted may follow from what passes took."""
        self._is_timed = is_timed
        self._known: dict[int, _Account] = defaultdict(_Account)
        self.plans: dict[tuple[str, int, int], Plan] = {}

    def may_draft(self, n_seqs: int) -> bool:
        """Return whether drafts are worth trying in the next pass of n_seqs sequences."""
        known = self._known[n_seqs.bit_length()]
        return known.credit > 0.0 and known.n_plain >= FEW

    def plan(
        self, drafter: Known, passes: PassTimes, n_seqs: int, n_left: int, least: float
    ) -> Plan:
        """Return what each of n_seqs sequences drafts, as `best_for`.

        Each of the sequences asks, while the device waits, so it is worked out once.
        """
        key = drafter.source.name, n_seqs, min(n_left, MAX_PAGED_ROWS)
        if key not in self.plans:
            ratio = self._known[n_seqs.bit_length()].ratio
            self.plans[key] = best_for(drafter, passes, n_seqs, n_left, least, ratio)
        return self.plans[key]

    def observe(
        self, n_seqs: int, n_tokens: int, seconds: float, n_rows: int, ratio: float = 1.0
    ) -> None:
        """Count a pass that gave n_tokens.

        seconds: as if of one row; 0 if not known. n_rows: of the pass; with drafts there are more
        than sequences. ratio: its time, that of the drafts included, over what was expected.
        """
        known, has_drafts = self._known[n_seqs.bit_length()], n_rows > n_seqs
        if seconds and self._is_timed:
            key = octave(n_rows) if has_drafts else 0
            known.ratios[key] = ratio + (known.ratios.get(key, ratio) - ratio) * (1 - 1 / FEW)
        if has_drafts:
            known.n_drafted += 1
            if seconds and known.plain_s:
                gained = n_tokens / n_seqs - min(seconds / known.plain_s, 3 * OUTLIER)
                known.credit = min(known.credit + gained + SHARE, 2.0 * FEW)
            if known.n_drafted >= known.refresh:
                known.n_plain, known.refresh = 0, min(2 * known.refresh, _REFRESH)
            return
        known.n_plain, known.n_drafted = known.n_plain + 1, 0
        known.credit = min(known.credit + SHARE, 2.0 * FEW)
        if seconds:
            seconds = min(seconds, OUTLIER * (known.plain_s or seconds))
            weight = min(known.n_plain, MEMORY)
            known.plain_s += (seconds - known.plain_s) / (weight if known.plain_s else 1)


def expected(drafters: Sequence[Known], passes: PassTimes, n_seqs: int, n_rows: int) -> float:
    """Return the seconds of a pass of n_seqs sequences, and of the drafts if it has more rows.

    drafters: the one that drafts; empty if there is none.
    """
    n_draft, total = n_rows // n_seqs - 1, passes.at(n_rows)
    for one in drafters if n_draft else ():
        n = 1.0 + _FURTHER * (n_seqs - 1) if one.source.joins else n_seqs
        total += n * one.draft_s(n_draft, passes)
    return total


def best_for(
    drafter: Known, passes: PassTimes, n_seqs: int, n_left: int, least: float,
    ratio: Callable[[int], float],
) -> Plan:  # fmt: skip
    """Return what each of n_seqs sequences drafts: what is best by what is known, if it may pay.

    n_left: tokens until a text must end. least: how many times as fast as without drafts it must
    be. ratio: how many times as long as expected a pass takes, by its rows; 0 rows: without drafts.
    """
    longest = min(drafter.most, n_left - 1, MAX_PAGED_ROWS // n_seqs - 1)

    def value(n: int, rates: Sequence[float]) -> float:
        tokens, n_rows = expected_tokens(rates, n)[-1], n_seqs * (n + 1)
        return n_seqs * tokens / expected([drafter], passes, n_seqs, n_rows) / ratio(n_rows)

    hopes = drafter.acceptance.hopes(HOPE)
    best = max(range(1, longest + 1), key=lambda n: value(n, hopes), default=0)
    if not best or value(best, hopes) <= least * n_seqs / passes.at(n_seqs) / ratio(0):
        return PLAIN
    return Plan(drafter.source.name, best, is_whole=True)
