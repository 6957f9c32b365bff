"""Acceptance by a script: what drafting would cost and gain with drafts that are right so often.

For measuring sizes without trained weights: every pass costs what it costs, and the script says how
many drafted tokens the text takes, whatever the target draws.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..errors import RequestError

MAX_RATES = 64


class ScriptedAccept:
    """Says how many tokens of a spine are accepted (`Speculation.accept`).

    rates: how often the token at position 1, 2, ... is accepted, 0 to 1, never rising. Further
    positions go on as the last two do. The same seed gives the same script.
    """

    def __init__(self, rates: Sequence[float], seed: int = 1) -> None:
        """Make the script.

        Raises:
            RequestError: there are no rates or too many, one is not in range, or they rise.
        """
        if not 1 <= len(rates) <= MAX_RATES:
            raise RequestError(f"{len(rates)} rates of acceptance; allowed: 1 to {MAX_RATES}")
        before = 1.0
        self._each: list[float] = []  # rates if all positions before are accepted
        for rate in rates:
            if not 0.0 <= rate <= before:
                raise RequestError(
                    f"rate of acceptance {rate:g}; allowed: 0 to {before:g}, because a position "
                    "counts only if all before it are accepted"
                )
            self._each.append(rate / before if before else 0.0)
            before = rate
        self._random = random.Random(seed)

    def __call__(self, n_spine: int) -> int:
        """Return how many of n_spine tokens are accepted."""
        for at in range(n_spine):
            if self._random.random() >= self._each[min(at, len(self._each) - 1)]:
                return at
        return n_spine
