"""Acceptance by a script: what drafting would cost and gain with drafts that are right so often.

For measuring sizes without trained weights: every pass costs what it costs, and the script says how
many drafted tokens the text takes, whatever the target draws.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from ..errors import RequestError

MAX_RATES = 64
# Drafts after which the rates have come true.
STRATA = 32


class ScriptedAccept:
    """Says how many tokens of a spine are accepted (`Speculation.accept`).

    rates: how often the token at position 1, 2, ... is accepted, 0 to 1, never rising. Further
    positions go on as the last two do. The same seed gives the same script.

    A draft is decided by one number between 0 and 1: tokens at positions of which the rate is above
    it are accepted. Of each `STRATA` drafts in a row, one number is from each `STRATA`th of the
    range, in an order by chance. So drafts are right by chance, and rates come true in short texts
    too.
    """

    def __init__(self, rates: Sequence[float], seed: int = 1) -> None:
        """Make the script."""
        if not 1 <= len(rates) <= MAX_RATES:
            raise RequestError(f"{len(rates)} rates of acceptance; allowed: 1 to {MAX_RATES}")
        before = 1.0
        for rate in rates:
            if not 0.0 <= rate <= before:
                raise RequestError(
                    f"rate of acceptance {rate:g}; allowed: 0 to {before:g}, because a position "
                    "counts only if all before it are accepted"
                )
            before = rate
        self._rates = tuple(rates)
        self._further = rates[-1] / ([1.0, *rates][-2] or 1.0)
        self._random = random.Random(seed)
        self._strata: list[int] = []

    def __call__(self, n_spine: int) -> int:
        """Return how many of n_spine tokens are accepted."""
        if not self._strata:
            self._strata = self._random.sample(range(STRATA), STRATA)
        limit = (self._strata.pop() + self._random.random()) / STRATA
        return sum(rate > limit for rate in self._first(n_spine))

    def expected(self, n_spine: int) -> float:
        """Return how many tokens of a spine are accepted on average."""
        return sum(self._first(n_spine))

    def _first(self, n: int) -> Iterator[float]:
        """Yield the rates of the first n positions."""
        rate = 1.0
        for at in range(n):
            rate = self._rates[at] if at < len(self._rates) else rate * self._further
            yield rate
