"""Drafts become trees: which drafted tokens a verify pass computes, and what each continues.

Row 0 of a tree is the anchor, the last token of the text; every other row is a drafted token. A row
comes after its parent. The likeliest tokens of all depths, one after another, are the spine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from .drafter import LEAST_LOG_P, Draft, Drafter, Ids, Race

LogP = npt.NDArray[np.float64]

# Tokens of a depth that trees compare.
MOST_TOP = 8


@dataclass(frozen=True)
class DraftTree:
    """The rows of one verify pass.

    tokens: their tokens; parents: the row that each continues, -1 for the anchor. No two children
    of a row have the same token.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def n_rows(self) -> int:
        """Return the number of rows, the anchor included."""
        return len(self.tokens)

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        return {(p, t): row for row, (p, t) in enumerate(zip(self.parents, self.tokens))}

    def child(self, row: int, token: int) -> int | None:
        """Return the row that continues a row with a token, or None."""
        return self._children.get((row, token))

    def walk(self, draw: Callable[[int], int | None]) -> list[int]:
        """Return the accepted rows, from the anchor on: those that the target draws itself.

        draw: returns the token that the target draws after a row; the text takes it, whether it was
        drafted or not. None: the text has ended, or ends with the token that was drawn there. Each
        row's draw is a draw of the target after exactly these tokens, so the text has the target's
        distribution with any sampler and any tree.
        """
        path, row = [0], 0
        while (token := draw(row)) is not None:
            child = self.child(row, token)
            if child is None:
                break
            path.append(child)
            row = child
        return path

    def cut(self, n_rows: int) -> DraftTree:
        """Return the first n_rows rows, at least the anchor."""
        n = max(1, n_rows)
        return self if n >= self.n_rows else DraftTree(self.tokens[:n], self.parents[:n])

    def only(self, keeps: Callable[[int], bool]) -> DraftTree:
        """Return the anchor, and the rows that are kept and whose parents are; this tree if all."""
        new, tokens, parents = {0: 0}, [self.tokens[0]], [-1]
        for row in range(1, self.n_rows):
            if self.parents[row] in new and keeps(row):
                new[row] = len(tokens)
                tokens.append(self.tokens[row])
                parents.append(new[self.parents[row]])
        return self if len(new) == self.n_rows else DraftTree(tuple(tokens), tuple(parents))

    def ahead(self, row: int) -> tuple[int, ...]:
        """Return the drafted tokens from the anchor to a row, the row's own included."""
        found: list[int] = []
        while row:
            found.append(self.tokens[row])
            row = self.parents[row]
        return tuple(reversed(found))


@runtime_checkable
class TreeDrafter(Drafter, Protocol):
    """A drafter that knows what follows each token, not only what follows the likeliest ones."""

    def tree(
        self, slot: int, anchor: int, n_depth: int, n_most: int, race: Race | None = None
    ) -> tuple[Draft, DraftTree]:
        """Propose the likeliest paths after the anchor, as a tree of at most n_most more rows.

        The rows come in the order of their worth, so that the first of them are the best smaller
        tree. The draft has the tokens of the tree's spine, at most n_depth; `Drafter.draft` says
        more about it.
        """


def spine_tree(anchor: int, draft: Draft, n_spine: int, leaves: Sequence[int] = ()) -> DraftTree:
    """Return the first n_spine tokens of a draft as a spine, with leaves beside it.

    leaves[d]: how many tokens of the d-th depth, the likeliest but the spine's, are leaves beside
    the spine. Leaves beyond its end, and more than the draft has, are left out.
    """
    spine = draft.tokens[:n_spine, 0].tolist()
    tokens, parents = [anchor, *spine], list(range(-1, len(spine)))
    for depth, n in enumerate(leaves[: len(spine)]):
        beside = draft.tokens[depth, 1 : 1 + n].tolist()
        tokens += beside
        parents += [depth] * len(beside)
    return DraftTree(tuple(tokens), tuple(parents))


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
