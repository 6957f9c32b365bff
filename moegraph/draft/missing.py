"""How many experts a pass lacks, by its rows, learned from what passes lacked."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..experts.rowlaw import independent_rows

# Passes that an estimate follows, at most. What one pass may change, relative to the estimate.
_MEMORY, _MOST = 48.0, 1.5
# Limits of the power.
_LOW, _HIGH = 0.2, 1.5
# A pass of several rows says less of the missing experts of one row than a pass of one row does.
_ONE_ROW = 0.6


@dataclass(frozen=True)
class Experts:
    """What missing experts cost. n_layer, n_expert, n_expert_used: of the model.

    miss_s: seconds that a pass takes longer for each missing expert.
    """

    n_layer: int
    n_expert: int
    n_expert_used: int
    miss_s: float

    def distinct(self, n_rows: int) -> float:
        """Return how many experts of all layers a pass of this many rows chooses."""
        unchosen = 1.0 - self.n_expert_used / self.n_expert  # of one row
        share = 1.0 - math.pow(unchosen, independent_rows(n_rows))
        return self.n_layer * self.n_expert * share


class Missing:
    """Estimates the missing experts of passes: those of one row, times how many more rows choose.

    Of the latter a power counts, because how much rows have in common depends on the text, and
    what they have in common is more often there than the rest. Both are learned.
    """

    def __init__(self, experts: Experts, widths: Iterable[int]) -> None:
        one = experts.distinct(1)
        self._logs = {n: math.log(experts.distinct(n) / one) for n in (1, *widths)}
        self._one = 0.0
        self._power = 1.0
        self._n = self._n_wide = 0.0

    def observe(self, n_rows: int, n_missing: int) -> None:
        """Count a pass: the distinct experts that it lacked, summed over layers."""
        log = self._logs[n_rows]
        if not self._n:
            self._one = n_missing / math.exp(log)
        self._n = min(self._n + 1.0, _MEMORY)
        self._n_wide = min(self._n_wide + (n_rows > 1), _MEMORY)
        usual = max(self.at(n_rows), 1.0)
        error = min(max(n_missing / usual - 1.0, -1.0), _MOST)
        if n_rows == 1:
            self._one = max(self._one + error * usual / self._n, 0.0)
            return
        scale = _ONE_ROW + log * log
        self._one *= 1.0 + _ONE_ROW * error / scale / self._n
        if not self._one:
            self._one = n_missing / math.exp(self._power * log)
        change = log * error / scale / self._n_wide
        self._power = min(max(self._power + change, _LOW), _HIGH)

    def at(self, n_rows: int) -> float:
        """Return how many a pass of so many rows is expected to lack."""
        return self._one * math.exp(self._power * self._logs[n_rows])
