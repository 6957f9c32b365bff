"""Trees of the likeliest paths, where more than a spine with leaves is verified."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .drafter import LEAST_LOG_P, Draft, DraftTree, Ids

LogP = npt.NDArray[np.float64]

# Tokens of a depth that trees compare.
MOST_TOP = 8


@dataclass(frozen=True)
class PathLists:
    """What may follow what.

    tokens: for each depth I32 numpy [m, n_top], likeliest first; m is 1 at the first depth. log_p:
    their log probabilities, same shapes. before: for each depth the m tokens of the depth before
    that the rows follow, and None if its only row follows any. What follows others is not known.
    """

    tokens: Sequence[Ids]
    log_p: Sequence[npt.NDArray[np.floating[Any]]]
    before: Sequence[Sequence[int] | None]

    def row(self, depth: int, token: int) -> int | None:
        """Return which row of a depth follows a token; None if that is not known."""
        known = self.before[depth]
        if known is None:
            return 0
        return list(known).index(token) if token in known else None

    def spine(self) -> tuple[list[Ids], list[npt.NDArray[np.floating[Any]]]]:
        """Return the lists of the likeliest tokens, one after another, [n_top] each."""
        tokens, log_p = list[Ids](), list[npt.NDArray[np.floating[Any]]]()
        for depth, (ids, lp) in enumerate(zip(self.tokens, self.log_p)):
            row = self.row(depth, int(tokens[-1][0])) if depth else 0
            if row is None:
                break
            tokens.append(ids[row])
            log_p.append(lp[row])
        return tokens, log_p


def best_paths(anchor: int, lists: PathLists, n_nodes: int, chain_seed: bool = False) -> DraftTree:
    """Return the n_nodes rows that are likeliest to be accepted, the likeliest first.

    A row is as likely as its whole path, so it comes after its parent. Of equally likely rows,
    those of lower ranks come first. chain_seed: the spine precedes all others.
    """
    tokens, parents = [anchor], [-1]
    log_p = [_clipped(lp) for lp in lists.log_p]
    # whether other rows precede it, -log p, ranks of the path, row of the list, parent
    heap: list[tuple[bool, float, tuple[int, ...], int, int]] = []

    def push(above: float, ranks: tuple[int, ...], row: int, parent: int) -> None:
        depth, rank = len(ranks) - 1, ranks[-1]
        if rank < log_p[depth].shape[1]:
            value = above + float(log_p[depth][row, rank])
            heapq.heappush(heap, (chain_seed and any(ranks), -value, ranks, row, parent))

    if log_p:
        push(0.0, (0,), 0, 0)
    while heap and len(tokens) <= n_nodes:
        _, negative, ranks, row, parent = heapq.heappop(heap)
        depth, rank = len(ranks) - 1, ranks[-1]
        tokens.append(int(lists.tokens[depth][row, rank]))
        parents.append(parent)
        push(-negative - float(log_p[depth][row, rank]), (*ranks[:-1], rank + 1), row, parent)
        after = lists.row(depth + 1, tokens[-1]) if depth + 1 < len(log_p) else None
        if after is not None:
            push(-negative, (*ranks, 0), after, len(tokens) - 1)
    return DraftTree(tuple(tokens), tuple(parents))


@dataclass(frozen=True)
class DDTree:
    """Trees of the likeliest paths, if each depth's probabilities hold whatever comes before.

    budget: rows besides the anchor. temperature: flattens or sharpens the drafter's probabilities
    before paths are compared; it has nothing to do with sampling. chain_seed: as of `best_paths`.
    """

    budget: int = 64
    temperature: float = 1.0
    chain_seed: bool = True

    def n_top(self, n_depth: int) -> int:
        """Return how many tokens of each depth are compared in a tree over n_depth depths."""
        return 1 if self.chain_seed and self.budget <= n_depth else min(MOST_TOP, self.budget)

    def tree(self, anchor: int, draft: Draft) -> DraftTree:
        """Return the tree of a draft, in the order in which nodes are found."""
        given, n = draft.log_p, draft.n_depth
        known = np.zeros((n, 1)) if given is None else tempered(given, self.temperature)
        lists = PathLists([t[None] for t in draft.tokens], [p[None] for p in known], [None] * n)
        return best_paths(anchor, lists, self.budget, self.chain_seed)


def tempered(log_p: npt.NDArray[np.float32], temperature: float) -> LogP:
    """Return the log probabilities of a softmax at a temperature, numpy shape [n_depth, n_top].

    log_p: those at temperature 1. Of the tokens that are not listed only the sum is known; they
    count as tokens that are as likely as the last one that is listed.
    """
    lp = _clipped(log_p)
    if temperature == 1.0:
        return lp
    scaled = lp / max(temperature, 1e-3)
    scaled -= scaled[:, :1]
    n_rest = np.maximum(1.0 - np.exp(lp).sum(axis=1), 0.0) / np.exp(lp[:, -1])
    total = np.exp(scaled).sum(axis=1) + n_rest * np.exp(scaled[:, -1])
    normed: LogP = scaled - np.log(total)[:, None]
    return normed


def _clipped(log_p: npt.NDArray[np.floating[Any]]) -> LogP:
    """Return log probabilities without infinities, as F32 has of unlikely tokens, and NaN."""
    return np.maximum(np.nan_to_num(log_p.astype(np.float64), nan=LEAST_LOG_P), LEAST_LOG_P)
