"""What a step costs: the verify pass by its number of rows, and the draft by its length.

A law gives both before anything is measured; measured times correct it. A verify pass of w rows
takes

    (base * law(w) + miss * missing(w)) * ratio(w)

`base`: a plain decode step without its missing experts. `law`: the byte law of a pass with every
expert resident. `missing`: experts that the pass lacks (`Missing`). `miss`: seconds of a missing
expert. `ratio`: measured over predicted; a width that was never measured takes it from its
neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..experts.rowlaw import pass_time
from .missing import Experts, Missing

# Weight of an older time against a new one, at most; and of the law against all of them.
_MEMORY, _LAW_WEIGHT = 12.0, 0.5
# Weight of a time that was measured before the first text, and how far it may be from the law, a
# logarithm: the machine may have been busy.
_CALIBRATED, _MOST = 3.0, math.log(2.0)
# The longest draft of which the law of drafts says something.
_FAR = 8
# A single time may be off by this factor: the process may have been paused, or a graph built.
_OUTLIER = 1.5
# A draft may be longer by this factor; more is a graph that the drafter builds for what it reads.
_LONGER = 1.2
# A plain step that takes a smaller share of the usual time is no noise: the machine was slow.
_FASTER = 0.8
# How much a measured ratio says of wider and of narrower passes, and how far that reaches, in
# powers of two of the width.
_WIDER, _NARROWER = (0.8, 2.0), (0.5, 1.0)


class PassCost:
    """Seconds of plain steps and of verify passes.

    widths: rows that a verify pass may have, in order. plain_s: a plain step; 0 if none has been
    measured. base_s: that without its missing experts. seconds: by width, of its verify pass; empty
    as long as plain_s is 0. widest: the most rows of a verify pass so far, 1 before the first one.
    """

    def __init__(self, widths: Sequence[int], experts: Experts | None = None) -> None:
        self.widths = tuple(widths)
        self._experts = experts
        self._missing = Missing(experts, self.widths) if experts else None
        self.base_s = self.plain_s = 0.0
        self._n_plain = 0.0
        self._law = {w: pass_time(w) for w in (1, *self.widths)}
        self._weight = dict.fromkeys(self.widths, 0.0)
        self._log_ratio = dict.fromkeys(self.widths, 0.0)
        self._unmeasured = set(self.widths)
        self._first: dict[int, float] = {}  # log ratios of first passes, which may build graphs
        self.widest = 1
        near = {(a, b): _nearness(a, b) for a in self.widths for b in self.widths}
        self._near = {
            a: [(b, near[a, b]) for b in self.widths if near[a, b] > 0.01] for a in self.widths
        }
        self.seconds: dict[int, float] = {}

    def by_law(self, n_rows: int, n_missing: int) -> float:
        """Return what a pass takes by the law, if a plain step without missing experts takes 1."""
        return pass_time(n_rows) + self._miss_s(n_missing)

    def at(self, n_rows: int) -> float:
        """Return the seconds of a pass of so many rows, also of widths that are not planned."""
        if n_rows == 1:
            return self.plain_s
        if n_rows in self.seconds:
            return self.seconds[n_rows]
        near = min(self.widths, key=lambda width: abs(width - n_rows), default=1)
        ratio = pass_time(n_rows) / pass_time(near)
        return self.seconds.get(near, self.plain_s) * ratio

    def usual(self, n_rows: int, n_missing: int) -> float:
        """Return the seconds of a pass that lacks so many experts, if a plain step was measured."""
        law = self._law[n_rows] if n_rows in self._law else pass_time(n_rows)
        ratio = self._ratio(n_rows) if n_rows in self._log_ratio else 0.0
        return (self.base_s * law + self._miss_s(n_missing)) * math.exp(ratio)

    def _miss_s(self, n_missing: int) -> float:
        return n_missing * self._experts.miss_s if self._experts else 0.0

    def observe_plain(self, seconds: float, n_missing: int) -> None:
        """Count a plain decode step."""
        self._observe_missing(1, n_missing)
        base = max(seconds - self._miss_s(n_missing), 0.2 * seconds)
        if self._n_plain < 2:  # the first may have built graphs
            self.base_s = min(base, self.base_s or base)
        else:
            base = min(base, _OUTLIER * self.base_s)
            n = 2.0 if base < _FASTER * self.base_s else min(self._n_plain, 2 * _MEMORY)
            self.base_s += (base - self.base_s) / n
        self._n_plain += 1
        if not self.plain_s:
            self.update()

    def observe_verify(self, n_rows: int, seconds: float, n_missing: int) -> None:
        """Count a verify pass with all that surrounds it, but for the draft."""
        if n_rows not in self._weight or not self.base_s:
            return
        self._observe_missing(n_rows, n_missing)
        lacked_s = self._miss_s(n_missing)
        found = math.log(max(seconds, 1e-9) / (self.base_s * self._law[n_rows] + lacked_s))
        self.widest = max(self.widest, n_rows)
        limit, known = math.log(_OUTLIER), self._ratio(n_rows)
        if n_rows in self._unmeasured:
            self._unmeasured.remove(n_rows)
            if found > known + limit:
                self._first[n_rows] = found
                return
        if n_rows in self._first:  # dear twice in a row: so it is
            found = min(found, self._first.pop(n_rows))
        else:
            found = min(max(found, known - limit), known + limit)
        weight = min(self._weight[n_rows] + 1.0, _MEMORY)
        self._log_ratio[n_rows] += (found - self._log_ratio[n_rows]) / weight
        self._weight[n_rows] = weight

    def calibrate(self, n_rows: int, seconds: float) -> None:
        """Learn what a pass without missing experts takes, once a plain step's time is known."""
        if n_rows in self._weight:
            self._unmeasured.discard(n_rows)
            found = math.log(seconds / (self.base_s * self._law[n_rows]))
            self._log_ratio[n_rows] = min(max(found, -_MOST), _MOST)
            self._weight[n_rows] = _CALIBRATED
            self.widest = max(self.widest, n_rows)

    def note_width(self, n_rows: int, n_missing: int) -> None:
        """Count a verify pass whose time says nothing."""
        if n_rows in self._weight and self.base_s:
            self._observe_missing(n_rows, n_missing)
            self.widest = max(self.widest, n_rows)

    def _observe_missing(self, n_rows: int, n_missing: int) -> None:
        if self._missing:
            self._missing.observe(n_rows, n_missing)

    def _lacking(self, n_rows: int) -> float:
        """Return the seconds that missing experts take in a pass."""
        if self._experts is None or self._missing is None:
            return 0.0
        return self._experts.miss_s * self._missing.at(n_rows)

    def _ratio(self, n_rows: int) -> float:
        """Return the logarithm of measured over predicted time."""
        total, weight = 0.0, _LAW_WEIGHT
        for other, near in self._near[n_rows]:
            total += near * self._weight[other] * self._log_ratio[other]
            weight += near * self._weight[other]
        return total / weight

    def update(self) -> None:
        """Have plain_s and seconds follow from all that was counted."""
        self.plain_s = self.base_s + self._lacking(1)
        self.seconds = {
            w: (self.base_s * self._law[w] + self._lacking(w)) * math.exp(self._ratio(w))
            for w in self.widths
        }


def _nearness(a: int, b: int) -> float:
    """Return how much a ratio measured at width b says about width a, 0 to 1.

    What makes a pass dear makes a wider one dear too; a narrower one may have other kernels.
    """
    if a == b:
        return 1.0
    share, reach = _WIDER if a > b else _NARROWER
    return share * math.exp(-((math.log2(a / b) / reach) ** 2))


class DraftCost:
    """Seconds of a draft: a fixed part and one for each token, fitted to what was measured.

    As long as few lengths were measured, the law says how lengths compare, not what they cost.
    Times are kept in plain steps without missing experts (`PassCost.base_s`): if the machine slows
    down, it slows down both.
    """

    def __init__(self, fixed: float, per_token: float, max_draft: int) -> None:
        """fixed, per_token: the law, in plain steps."""
        self._fixed, self._per_token = fixed, per_token
        self._ends = (1, max(min(max_draft, _FAR), 2))
        self._sums: tuple[float, ...] = (0.0,) * 5  # weights, n, n * n, steps, n * steps
        self._line = (fixed, per_token)  # fitted
        self._is_new = True
        self.is_known = False  # drafts were measured

    def observe(self, n_draft: int, seconds: float, base_s: float) -> None:
        """Count a draft of n_draft depths; base_s: of a plain step without missing experts."""
        steps = seconds / base_s
        if self._is_new:
            self._is_new = False
            if steps > _OUTLIER * max(self(n_draft, 1.0), 0.1):
                return
        elif self.is_known:
            steps = min(steps, _LONGER * max(self(n_draft, 1.0), 0.1))
        kept = 1.0 - 1.0 / (4 * _MEMORY)
        found = (1.0, n_draft, n_draft * n_draft, steps, n_draft * steps)
        self._sums = tuple(kept * old + new for old, new in zip(self._sums, found))
        self._line = self._fit()
        self.is_known = True

    def _fit(self) -> tuple[float, float]:
        """Return the steps of a draft of no token, and those of each token."""
        weight, n, nn, s, ns = self._sums
        laws = [self._fixed + self._per_token * end for end in self._ends]
        told = _LAW_WEIGHT * sum(laws)
        by_law = self._fixed * weight + self._per_token * n
        ratio = (s + told) / (by_law + told) if told else 1.0
        for end, law in zip(self._ends, laws):
            weight += _LAW_WEIGHT
            n += _LAW_WEIGHT * end
            nn += _LAW_WEIGHT * end * end
            s += _LAW_WEIGHT * law * ratio
            ns += _LAW_WEIGHT * end * law * ratio
        slope = max(0.0, (weight * ns - n * s) / (weight * nn - n * n))
        return (s - slope * n) / weight, slope

    def __call__(self, n_draft: int, base_s: float) -> float:
        """Return the seconds of a draft of n_draft depths."""
        fixed, slope = self._line
        return max(0.0, fixed + slope * n_draft) * base_s if n_draft > 0 else 0.0
