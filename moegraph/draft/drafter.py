"""What every drafter is: something that proposes tokens after a known one; drafts, and their trees.

Row 0 of a tree is the anchor, the last token of the text; every other row is a drafted token. A row
comes after its parent. The likeliest tokens of all depths, one after another, are the spine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import InternalError
from ..sampling import SamplingParams

if TYPE_CHECKING:  # the room below needs the native libraries, drafts do not
    from ..runner.sweep_batch import HiddenReader

# Launches of a graph until a device that captures graphs has captured it.
N_CAPTURED = 3
# Nodes of a layer over a block, and of a step of the MTP block without its experts, at most.
N_NODES = 128
# Counts for a log probability that is lower, or not a number.
LEAST_LOG_P = -100.0

Ids = npt.NDArray[np.int32]
Parts = list[npt.NDArray[np.uint8]]
Piece = tuple[int, int, Parts]
# A sequence, a position, and the tokens that it took from there on.
Taken = tuple[int, int, Sequence[int]]


@dataclass(frozen=True)
class Draft:
    """Drafted tokens after a known token, the anchor, by depth; the first depth follows the anchor.

    tokens: I32, numpy shape [n_depth, n_top], all different at each depth. The first of each depth
    are the spine, and what a depth has follows the spine before it; the others are in the order of
    their worth. log_p: F32, same shape: the drafter's natural logarithms of their probabilities, by
    a softmax over everything that it can propose; None if it has none. confidence: F32 [n_depth],
    how probable the drafter thinks it is that the first token of a depth is right if those before
    are; None if it has nothing better than log_p.
    """

    tokens: Ids
    log_p: npt.NDArray[np.float32] | None = None
    confidence: npt.NDArray[np.float32] | None = None

    @classmethod
    def empty(cls) -> Draft:
        """Return a draft without tokens."""
        return cls(np.zeros((0, 1), dtype=np.int32))

    @property
    def n_depth(self) -> int:
        """Return how many tokens follow one another."""
        return len(self.tokens)

    def cut(self, n: int) -> Draft:
        """Return the first n depths at most."""
        log_p, confidence = self.log_p, self.confidence
        return Draft(
            self.tokens[:n],
            None if log_p is None else log_p[:n],
            None if confidence is None else confidence[:n],
        )

    def first(self, n_top: int) -> Draft:
        """Return the draft with the first n_top tokens of each depth at most."""
        log_p = None if self.log_p is None else self.log_p[:, :n_top]
        return Draft(self.tokens[:, :n_top], log_p, self.confidence)

    def ranks(self, drawn: Sequence[int]) -> tuple[int, ...]:
        """Return the rank of each drawn token at its depth, -1 if it has none, until one is not 0.

        drawn: what the target drew after the anchor, and after each drafted token that was right.
        """
        found: list[int] = []
        for candidates, token in zip(self.tokens.tolist(), drawn):
            found.append(candidates.index(token) if token in candidates else -1)
            if found[-1]:
                break
        return tuple(found)

    def problem(self, n_vocab: int) -> str:
        """Return what is wrong with the draft for a target with n_vocab tokens, or ''."""
        tokens, log_p = self.tokens, self.log_p
        if tokens.ndim != 2 or not tokens.shape[1]:
            return f"its tokens have shape {tokens.shape}, not [n_depth, n_top]"
        for part in (log_p, self.confidence):
            # nan fails the comparison too
            if part is not None and not (part <= 1.0).all():
                return "its probabilities are not numbers"
        if log_p is not None and log_p.shape != tokens.shape:
            return f"it has {log_p.size} probabilities for {tokens.size} tokens"
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < n_vocab:
            outside = tokens[(tokens < 0) | (tokens >= n_vocab)]
            return f"it proposes token {outside[0]} of {n_vocab}"
        return ""


def confidence(draft: Draft) -> tuple[float, ...]:
    """Return the drafter's log probability of the likeliest token at each depth, () if it has none.

    A drafter that estimates how probably it is right gives that instead.
    """
    if draft.confidence is not None:
        return tuple(np.log(np.maximum(draft.confidence.astype(np.float64), 1e-9)).tolist())
    return () if draft.log_p is None else tuple(draft.log_p[:, 0].tolist())


@dataclass(frozen=True)
class DraftTree:
    """The rows of one verify pass.

    tokens: their tokens; parents: the row that each continues, -1 for the anchor. No two children
    of a row have the same token.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    @cached_property
    def n_rows(self) -> int:
        """The number of rows, the anchor included."""
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


def spine_tree(anchor: int, draft: Draft, n_spine: int) -> DraftTree:
    """Return the first n_spine tokens of a draft as a chain."""
    spine = draft.tokens[:n_spine, 0].tolist()
    return DraftTree((anchor, *spine), tuple(range(-1, len(spine))))


@dataclass(frozen=True)
class Race:
    """What is known of the next draws of a sampler, see race.py.

    params: its settings. key: returns the key of the random numbers of the n-th draw from now on;
    draw 0 is that of the token after the anchor.
    """

    params: SamplingParams
    key: Callable[[int], int]


class Drafter(ABC):
    """Proposes tokens for the sequences of one target.

    It follows what each sequence holds: `restart` or `prompt_readers` tells it of tokens that a
    prompt brings, `committed` of those that passes brought, which may be some passes ago. Its
    proposals may be as wrong as they like; they cannot change the text.

    Attributes:
        name: "mtp", "dflash", "dspark" or "lookup".
        max_draft: the most tokens that it can propose after the anchor.
        is_free: a draft takes no time worth mentioning, and says how likely it is right.
        has_tree: it knows what follows each token, not only what follows the likeliest ones: it can
            build a `tree`.
        joins: it drafts for several sequences at once, hardly slower than for one (`draft_all`).
        target_layers: whose rows the target's passes must keep (`HiddenStates`): l_out of each;
            n_layer is h_nextn, the normed rows that the head gets.
    """

    name: str
    max_draft: int
    is_free = has_tree = joins = False
    target_layers: tuple[int, ...] = ()

    @property
    def n_bytes(self) -> int:
        """Return the device memory that it takes."""
        return 0

    @abstractmethod
    def restart(self, slot: int, ids: Ids) -> None:
        """Forget a sequence; it now holds ids, I32 numpy [n_past], whose rows were not read.

        What the drafter adds from now on starts at position n_past.
        """

    @abstractmethod
    def prompt_readers(self, slot: int, ids: Ids, first: int) -> dict[int, HiddenReader]:
        """Return what a sweep calls with hidden states of a prompt (`SweepBatch.readers`).

        ids: I32 numpy [n], the tokens of the positions from first on. A prompt that fails is
        followed by `truncate`.
        """

    @abstractmethod
    def committed(self, taken: Sequence[Taken]) -> None:
        """Note that sequences took tokens, each from the first position that is not known.

        Their rows are in the ring of `HiddenStates`. What that needs is enqueued, without waiting.
        """

    @abstractmethod
    def draft(self, slot: int, anchor: int, n: int, n_top: int, race: Race | None = None) -> Draft:
        """Propose at most n tokens after the anchor, and the n_top likeliest at each depth.

        It was told of all that the sequence holds. anchor: the last token of the text, which the
        sequence does not hold yet. n is at least 1 and at most max_draft; n_top is at least 1. The
        draft may be shorter than n, or empty, and may list fewer tokens than n_top.

        race: the text is sampled so. What follows is best drafted after the token that will
        probably win; that token then comes first at its depth.
        """

    def tree(
        self, slot: int, anchor: int, n_depth: int, n_most: int, race: Race | None = None
    ) -> tuple[Draft, DraftTree]:
        """Propose the likeliest paths after the anchor, as a tree of at most n_most more rows.

        The rows come in the order of their worth, so that the first of them are the best smaller
        tree. The draft has the tokens of the tree's spine, at most n_depth; `draft` says more.
        """
        raise InternalError(f"{self.name} builds no trees")

    def can_join(self, race: Race | None) -> bool:
        """Return whether a draft may be one of several. race: that `draft` would be given."""
        return self.joins

    def draft_all(self, anchors: Mapping[int, int], n: int, n_top: int) -> list[Draft]:
        """Propose at most n tokens after the anchor of each sequence, as `draft` does for one.

        anchors: the last token of each text, by sequence. Returns their drafts, in this order.
        """
        return [self.draft(slot, anchor, n, n_top) for slot, anchor in anchors.items()]

    def truncate(self, slot: int, n_past: int) -> None:  # noqa: B027 - some have nothing to forget
        """Forget what a sequence held from position n_past on."""

    @property
    def row_widths(self) -> list[int]:
        """Return the bytes of a position in each cache of its own, beside the target's."""
        return []

    def take_rows(self, slot: int, first: int, n: int) -> Parts:
        """Copy its own caches' rows of n positions, which it knows, and wait.

        Returns for each cache U8 numpy [m, bytes of a row], the rows of the last m positions.
        """
        return []

    def put_back(self, slot: int, ids: Ids, n_kept: int, pieces: Sequence[Piece]) -> None:
        """Note that a sequence holds ids, which were copied back but for the first n_kept.

        pieces: of runs of positions, in order: the first position, the number of positions, and
        what `take_rows` returned.
        """
        self.restart(slot, ids)

    def close(self) -> None:  # noqa: B027 - some have nothing to free
        """Wait for the device, then free everything."""
