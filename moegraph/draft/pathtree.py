"""Trees of the likeliest paths, where it is known what follows each of several tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .drafter import Ids
from .tree import DraftTree

# Log p that counts for one that is not a number, or less.
_LEAST = -100.0


@dataclass(frozen=True)
class PathLists:
    """What may follow what.

    tokens: for each depth I32 numpy [m, n_top], likeliest first; m is 1 at the first depth. log_p:
    their log probabilities, same shapes. before: for each depth the m tokens of the depth before
    that the rows follow; any at the first depth. What follows other tokens is not known.
    """

    tokens: Sequence[Ids]
    log_p: Sequence[npt.NDArray[np.float32]]
    before: Sequence[Sequence[int]]

    def spine(self) -> tuple[list[Ids], list[npt.NDArray[np.float32]]]:
        """Return the lists of the likeliest tokens, one after another, [n_top] each."""
        tokens, log_p = list[Ids](), list[npt.NDArray[np.float32]]()
        for depth, (ids, lp) in enumerate(zip(self.tokens, self.log_p)):
            if depth and tokens[-1][0] not in self.before[depth]:
                break
            column = list(self.before[depth]).index(tokens[-1][0]) if depth else 0
            tokens.append(ids[column])
            log_p.append(lp[column])
        return tokens, log_p


def best_paths(anchor: int, lists: PathLists, n_nodes: int) -> DraftTree:
    """Return the n_nodes rows that are likeliest to be accepted, the likeliest first.

    A row is as likely as its whole path, so it comes after its parent.
    """
    tokens, parents = [anchor], [-1]
    log_p = [np.maximum(np.nan_to_num(lp, nan=_LEAST), _LEAST) for lp in lists.log_p]
    # -log p of the path, a number that keeps the order, depth, list, place in the list, parent row
    heap: list[tuple[float, int, int, int, int, int]] = []

    def push(above: float, depth: int, column: int, rank: int, parent: int) -> None:
        if depth < len(log_p) and rank < log_p[depth].shape[1]:
            value = above + float(log_p[depth][column, rank])
            heapq.heappush(heap, (-value, n_pushed(), depth, column, rank, parent))

    pushed = [0]

    def n_pushed() -> int:
        pushed[0] += 1
        return pushed[0]

    push(0.0, 0, 0, 0, 0)
    while heap and len(tokens) <= n_nodes:
        negative, _, depth, column, rank, parent = heapq.heappop(heap)
        token, row = int(lists.tokens[depth][column, rank]), len(tokens)
        tokens.append(token)
        parents.append(parent)
        push(-negative - float(log_p[depth][column, rank]), depth, column, rank + 1, parent)
        if depth + 1 < len(log_p):
            known = list(lists.before[depth + 1])
            if token in known:
                push(-negative, depth + 1, known.index(token), 0, row)
    return DraftTree(tuple(tokens), tuple(parents))
