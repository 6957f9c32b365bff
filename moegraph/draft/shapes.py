"""The order in which rows of a verify pass are worth adding: spine and leaves by probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .plan import Shape


@dataclass(frozen=True)
class Growth:
    """Rows in the order in which they are added to the anchor.

    depths: of each added row; negative for a leaf. tokens: tokens that the text is expected to
    grow by with 0, 1, ... rows added; the token drawn after the path counts, so the first is 1.
    """

    depths: tuple[int, ...]
    tokens: tuple[float, ...]

    def shape(self, n_rows: int) -> Shape:
        """Return the shape of the first rows, n_rows with the anchor."""
        taken = self.depths[: n_rows - 1]
        beside = [-depth for depth in taken if depth < 0]
        leaves = [0] * max(beside, default=0)
        for depth in beside:
            leaves[depth - 1] += 1
        return Shape(len(taken) - len(beside), tuple(leaves))


# Rows that are accepted less often than this are not worth looking at.
_LEAST = 0.01


def grow(accept: Sequence[float], leaf: Sequence[float], most: int) -> Growth:
    """Return the best rows to add, at most `most`.

    accept: probability of the spine's token at depth 1, 2, ... if all before it are accepted.
    leaf: probability of the candidate of rank 1, 2, ... if the spine's token is not accepted.

    A row is worth the probability that it is accepted. A row never comes before the one that it
    continues, because it is never likelier than that. A leaf stands beside a row of the spine.
    """
    nodes: list[tuple[float, int, float]] = []  # order, depth, worth
    reach = 1.0
    for depth, p in enumerate(accept, 1):
        above, reach = reach, reach * p
        if reach < _LEAST:
            break
        nodes.append((-reach, depth, reach))
        for q in leaf:
            worth = above * (1.0 - p) * q
            # never before the spine's row at its depth
            nodes.append((-min(worth, reach), -depth, worth))
    if leaf:
        # of equal rows, the spine first, and from the anchor outwards
        nodes.sort(key=lambda node: (node[0], node[1] < 0, abs(node[1])))
    del nodes[max(most, 0) :]
    tokens = [1.0]
    for _, _, worth in nodes:
        tokens.append(tokens[-1] + worth)
    return Growth(tuple(depth for _, depth, _ in nodes), tuple(tokens))


def confident(log_p: Sequence[float], p_min: float) -> int:
    """Return how many tokens come before the first that is less probable than p_min."""
    limit = math.log(p_min)
    return next((depth for depth, p in enumerate(log_p) if p < limit), len(log_p))
