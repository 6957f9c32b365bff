"""What a pass of several rows costs beside a pass of one: measured once, as tables. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from .cost import Curve

# Time of a pass over that of one row, with every expert resident: up to 16 rows as measured of a
# 35B-A3B (docs/benchmarks/drafts.jsonl), beyond as measured of an earlier version, scaled to that.
pass_time = cache(Curve((
    (1, 1.0), (2, 1.28), (3, 1.43), (4, 1.56), (8, 2.03), (12, 2.38), (16, 2.7), (23, 3.15),
    (32, 3.7), (65, 5.7),
)))  # fmt: skip
# How many rows of different texts choose as many experts as so many rows of one text.
independent_rows = Curve(
    ((1, 1.0), (2, 1.71), (4, 2.86), (8, 4.62), (16, 7.11), (32, 10.33), (65, 15.0))
)


@dataclass(frozen=True)
class Experts:
    """What missing experts cost. n_expert, n_expert_used: of the model.

    n_layer: layers with a router. miss_s: seconds that a pass takes longer for each missing expert.
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
