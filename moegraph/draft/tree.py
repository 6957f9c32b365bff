"""Drafts become trees: which drafted tokens a verify pass computes, and what each continues.

Row 0 of a tree is the anchor, the last token of the text; every other row is a drafted token. A row
comes after its parent. The likeliest tokens of all depths, one after another, are the spine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from .drafter import Draft, Drafter, Race

LogP = npt.NDArray[np.float64]

# Tokens of a depth that the reference compares, and its lowest temperature.
_MOST_TOP, _COLDEST = 8, 1e-3
_LEAST = -100.0  # log p


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
        self, slot: int, anchor: int, n_depth: int, n_nodes: int, race: Race | None = None
    ) -> tuple[Draft, DraftTree]:
        """Propose the likeliest paths after the anchor, as a tree of at most n_nodes more rows.

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
class DDTree:
    """Trees of the likeliest paths, if each depth's probabilities hold whatever comes before.

    budget: rows besides the anchor. temperature: flattens or sharpens the drafter's probabilities
    before paths are compared; it has nothing to do with sampling. chain_seed: the spine comes
    first, as long as the budget allows; the rest is best-first.
    """

    budget: int = 64
    temperature: float = 1.0
    chain_seed: bool = True

    def n_top(self, n_depth: int) -> int:
        """Return how many tokens of each depth are compared in a tree over n_depth depths."""
        return 1 if self.chain_seed and self.budget <= n_depth else min(_MOST_TOP, self.budget)

    def tree(self, anchor: int, draft: Draft) -> DraftTree:
        """Return the tree of a draft, in the order in which nodes are found."""
        budget = self.budget
        tokens, parents = [anchor], [-1]
        given = draft.log_p
        known = np.zeros((draft.n_depth, 1)) if given is None else tempered(given, self.temperature)
        search = _BestFirst(known)
        seeds = search.spine(budget) if self.chain_seed else search.start()
        for depth, rank, parent in seeds:
            tokens.append(int(draft.tokens[depth, rank]))
            parents.append(parent)
        while search.heap and len(tokens) <= budget:
            depth, rank, parent = search.pop(len(tokens))
            tokens.append(int(draft.tokens[depth, rank]))
            parents.append(parent)
        return DraftTree(tuple(tokens), tuple(parents))


class _BestFirst:
    """The front of a search over paths; a path is the ranks of its tokens, by depth.

    heap: paths that may come next, the likeliest first; of equal ones that with the lower ranks.
    """

    def __init__(self, lp: LogP) -> None:
        self._lp = lp
        self.heap: list[tuple[float, tuple[int, ...], int]] = []  # -log p, ranks, parent row

    def start(self) -> list[tuple[int, int, int]]:
        """Put the first path into the heap; return no node."""
        if len(self._lp):
            self._push(float(self._lp[0, 0]), (0,), 0)
        return []

    def spine(self, budget: int) -> list[tuple[int, int, int]]:
        """Return the nodes of the spine, (depth, rank, parent); their siblings are in the heap."""
        log_w = 0.0
        nodes = []
        for depth in range(min(len(self._lp), budget)):
            log_w += float(self._lp[depth, 0])
            nodes.append((depth, 0, depth))
            self._push_sibling(log_w, (0,) * (depth + 1), depth)
        return nodes

    def pop(self, row: int) -> tuple[int, int, int]:
        """Return the likeliest node, which becomes a row; its sibling and child may follow."""
        negative, ranks, parent = heapq.heappop(self.heap)
        depth = len(ranks) - 1
        self._push_sibling(-negative, ranks, parent)
        if depth + 1 < len(self._lp):
            self._push(-negative + float(self._lp[depth + 1, 0]), (*ranks, 0), row)
        return depth, ranks[-1], parent

    def _push_sibling(self, log_w: float, ranks: tuple[int, ...], parent: int) -> None:
        lp, rank = self._lp[len(ranks) - 1], ranks[-1]
        if rank + 1 < len(lp):
            beside = log_w - float(lp[rank]) + float(lp[rank + 1])
            self._push(beside, (*ranks[:-1], rank + 1), parent)

    def _push(self, log_w: float, ranks: tuple[int, ...], parent: int) -> None:
        heapq.heappush(self.heap, (-log_w, ranks, parent))


def tempered(log_p: npt.NDArray[np.float32], temperature: float) -> LogP:
    """Return the log probabilities of a softmax at a temperature, numpy shape [n_depth, n_top].

    log_p: those at temperature 1. Of the tokens that are not listed only the sum is known; they
    count as tokens that are as likely as the last one that is listed.
    """
    lp = _clipped(log_p)
    if temperature == 1.0:
        return lp
    scaled = lp / max(temperature, _COLDEST)
    scaled -= scaled[:, :1]
    n_rest = np.maximum(1.0 - np.exp(lp).sum(axis=1), 0.0) / np.exp(lp[:, -1])
    total = np.exp(scaled).sum(axis=1) + n_rest * np.exp(scaled[:, -1])
    normed: LogP = scaled - np.log(total)[:, None]
    return normed


def _clipped(log_p: npt.NDArray[np.float32]) -> LogP:
    """Return log probabilities without infinities: F32 loses those of very unlikely tokens."""
    return np.maximum(log_p.astype(np.float64), _LEAST)
