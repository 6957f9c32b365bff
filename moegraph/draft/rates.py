"""How often a drafter is right: by depth, by its own confidence, and which candidate instead.

A depth is observed only if the target accepted every token before it: a draft of five tokens whose
second one is wrong says nothing about the third. So each depth has its own counts, and what is not
observed is inferred from the depth before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Weight of an inferred rate against an observed one, in observations.
_PRIOR = 4.0
# How a depth that was never reached differs from the one before it.
_DEEPER = 0.98
# Limits of a rate: nothing is certain.
_LOW, _HIGH = 0.02, 0.99
# Edges of the classes of confidence: natural-log probabilities.
_EDGES = (-0.01, -0.05, -0.15, -0.4, -0.8, -1.5, -3.0)
# Weight of "as the depth says" in the rate of a class, in observations.
_CLASS_PRIOR = 6.0
# Probability of the candidates of rank 1 and 2 where the likeliest one was wrong, before any count.
_LEAVES = (0.30, 0.10)
_LEAF_PRIOR = 12.0
# Drafts that those of earlier runs count for, at most.
_REMEMBERED = 20.0
# What is kept of older counts at each observation: in a run of drafts, and in a single trial.
STEADY, TRIAL = 0.99, 0.80


class Acceptance:
    """Rates of one drafter.

    rates: by depth, the probability of acceptance if all before it were accepted.
    leaf: by rank from 1 on, the probability that the target draws this candidate where it does not
    draw the likeliest one; empty if the drafter names one candidate only.
    """

    def __init__(self, max_draft: int, prior: float, n_top: int = 1) -> None:
        self._prior = prior
        self._seen = [0.0] * max_draft
        self._hits = [0.0] * max_draft
        self._class_hits = [0.0] * (len(_EDGES) + 1)
        self._class_expected = [0.0] * (len(_EDGES) + 1)
        self._wrong = _LEAF_PRIOR
        self._ranked = [_LEAF_PRIOR * p for p in _LEAVES[: n_top - 1]]
        self.rates: list[float] = []
        self.leaf: tuple[float, ...] = ()
        self._infer()

    def forget(self, kept: float) -> None:
        """Have what was seen count only `kept` times as much: the text may be another now."""
        self._seen = [kept * n for n in self._seen]
        self._hits = [kept * n for n in self._hits]

    def remember(self, seen: Sequence[int], right: Sequence[int]) -> float:
        """Begin with counts of earlier runs, by depth; return the weight that they got.

        It is small, so that the text at hand soon counts for more.
        """
        scale = min(1.0, _REMEMBERED / seen[0])
        for depth, (n, hits) in enumerate(zip(seen[: len(self._seen)], right)):
            self._seen[depth], self._hits[depth] = scale * n, scale * hits
        self._infer()
        return scale * seen[0]

    def observe(
        self, ranks: Sequence[int], log_p: Sequence[float] = (), kept: float = STEADY
    ) -> None:
        """Count a verified draft; ranks, log_p: as in `Step`. kept: of what was counted before."""
        for depth, rank in enumerate(ranks):
            hit = 1.0 if rank == 0 else 0.0
            if depth < len(log_p):
                self._count_class(log_p[depth], hit, self.rates[depth])
            self._seen[depth] = kept * self._seen[depth] + 1.0
            self._hits[depth] = kept * self._hits[depth] + hit
        # what lies behind the end of this draft becomes old too, though less
        for depth in range(len(ranks), len(self._seen)):
            self._seen[depth] *= 0.995
            self._hits[depth] *= 0.995
        if ranks and ranks[-1] != 0:
            self._count_rank(ranks[-1])
        self._infer()

    def expect(self, accept: Sequence[float], first: int) -> None:
        """Count the depths from `first` on of a draft that will not be verified so far.

        accept: their rates by the drafter's confidence. Without them, only drafts of which the
        drafter is sure would count, and the rates would be too high.
        """
        reach = math.prod(accept[:first])
        for depth in range(first, len(accept)):
            kept = 1.0 - (1.0 - STEADY) * reach
            self._seen[depth] = kept * self._seen[depth] + reach
            self._hits[depth] = kept * self._hits[depth] + reach * accept[depth]
            reach *= accept[depth]

    def _count_class(self, log_p: float, hit: float, expected: float) -> None:
        at = _class_of(log_p)
        self._class_hits[at] = 0.99 * self._class_hits[at] + hit
        self._class_expected[at] = 0.99 * self._class_expected[at] + expected

    def _count_rank(self, rank: int) -> None:
        self._wrong = 0.99 * self._wrong + 1.0
        self._ranked = [0.99 * n for n in self._ranked]
        if 1 <= rank <= len(self._ranked):
            self._ranked[rank - 1] += 1.0

    def _infer(self) -> None:
        rates, inferred = [], self._prior
        for hits, seen in zip(self._hits, self._seen):
            rate = (hits + _PRIOR * inferred) / (seen + _PRIOR)
            rates.append(min(max(rate, _LOW), _HIGH))
            inferred = rates[-1] * _DEEPER
        self.rates = rates
        self.leaf = tuple(n / self._wrong for n in self._ranked)

    def hopes(self, deviations: float) -> list[float]:
        """Return the rates as high as they may well be, by how often each was observed.

        deviations: standard deviations by which each rate may be higher than it seems.
        """
        found: list[float] = []
        inferred = self._prior
        for hits, seen in zip(self._hits, self._seen):
            rate = (hits + _PRIOR * inferred) / (seen + _PRIOR)
            # a depth that was not observed is inferred from what is hoped of the one before it
            known = seen / (seen + 1.0) if found else 1.0
            rate += deviations * known * math.sqrt(rate * (1.0 - rate) / (seen + _PRIOR))
            found.append(min(max(rate, _LOW), _HIGH))
            inferred = found[-1] * _DEEPER
        return found

    def rates_of(self, log_p: Sequence[float]) -> list[float]:
        """Return the rates of one draft, by the drafter's confidence in each of its tokens.

        Each is the depth's rate, times how much oftener than expected tokens of its class of
        confidence were accepted.
        """
        found = []
        for rate, confidence in zip(self.rates, log_p):
            at = _class_of(confidence)
            over = (self._class_hits[at] + _CLASS_PRIOR) / (self._class_expected[at] + _CLASS_PRIOR)
            found.append(min(max(rate * over, _LOW), _HIGH))
        return found


def _class_of(log_p: float) -> int:
    if not math.isfinite(log_p):
        return len(_EDGES)
    return next((at for at, edge in enumerate(_EDGES) if log_p >= edge), len(_EDGES))
