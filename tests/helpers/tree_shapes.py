"""Shapes of trees of rows, as the parents of the rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Parents = list[int]


def chain(n: int, _: np.random.Generator) -> Parents:
    """Return a chain: row i continues row i - 1."""
    return [i - 1 for i in range(n)]


def star(n: int, _: np.random.Generator) -> Parents:
    """Return rows that all continue row 0."""
    return [min(i, 1) - 1 for i in range(n)]


def heap(n: int, _: np.random.Generator) -> Parents:
    """Return a complete binary tree whose root is the committed state: most states wait at once."""
    return [i // 2 - 1 for i in range(n)]


def forest(n: int, rng: np.random.Generator) -> Parents:
    """Return rows that continue any earlier row, or what is committed."""
    return [int(rng.integers(-1, i)) for i in range(n)]


def deep(n: int, rng: np.random.Generator) -> Parents:
    """Return a tree of one root where rows tend to continue recent ones."""
    return [max(i - int(rng.geometric(0.4)), 0) if i else -1 for i in range(n)]


TREES = (chain, star, heap, forest, deep)


def path(parents: Sequence[int], row: int) -> list[int]:
    """Return the rows from a root to `row`, both included."""
    rows = []
    while row >= 0:
        rows.append(row)
        row = parents[row]
    return rows[::-1]
