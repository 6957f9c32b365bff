"""What every drafter is: something that proposes tokens after a known one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..sampling import SamplingParams

if TYPE_CHECKING:  # the room below needs the native libraries, drafts do not
    from ..runner.sweep_batch import Tap

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
            return f"it proposes token {_outside(tokens, n_vocab)} of {n_vocab}"
        return ""


def _outside(tokens: Ids, n_vocab: int) -> int:
    return int(tokens[(tokens < 0) | (tokens >= n_vocab)][0])


def confidence(draft: Draft) -> tuple[float, ...]:
    """Return the drafter's log probability of the likeliest token at each depth, () if it has none.

    A drafter that estimates how probably it is right gives that instead.
    """
    if draft.confidence is not None:
        return tuple(math.log(max(p, 1e-9)) for p in draft.confidence.tolist())
    return () if draft.log_p is None else tuple(draft.log_p[:, 0].tolist())


def empty_draft() -> Draft:
    """Return a draft without tokens."""
    return Draft(np.zeros((0, 1), dtype=np.int32))


@dataclass(frozen=True)
class Race:
    """What is known of the next draws of a sampler, see race.py.

    params: its settings. key: returns the key of the random numbers of the n-th draw from now on;
    draw 0 is that of the token after the anchor.
    """

    params: SamplingParams
    key: Callable[[int], int]


class Drafter(Protocol):
    """Proposes tokens for the sequences of one target.

    It follows what each sequence holds: `restart` or `prompt_taps` tells it of tokens that a prompt
    brings, `committed` of those that passes brought, which may be some passes ago. Its proposals
    may be as wrong as they like; they cannot change the text.

    Attributes:
        name: "mtp", "dflash", "dspark" or "lookup".
        max_draft: the most tokens that it can propose after the anchor.
        is_free: a draft takes no time worth mentioning, and says how likely it is right.
        taps: what the target's passes must keep of each row (`TapRows`): il is l_out of layer il,
            n_layer is h_nextn, the normed rows that the head gets.
    """

    name: str
    max_draft: int
    is_free: bool
    taps: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Return the device memory that it takes."""

    def restart(self, slot: int, ids: Ids) -> None:
        """Forget a sequence; it now holds ids, I32 numpy [n_past], whose rows were not tapped.

        What the drafter adds from now on starts at position n_past.
        """

    def prompt_taps(self, slot: int, ids: Ids, first: int) -> dict[int, Tap]:
        """Return what a sweep calls with the taps of a prompt (`SweepBatch.taps`).

        ids: I32 numpy [n], the tokens of the positions from first on. A prompt that fails is
        followed by `truncate`.
        """

    def committed(self, taken: Sequence[Taken]) -> None:
        """Note that sequences took tokens, each from the first position that is not known.

        Their rows are in the ring of `TapRows`. What that needs is enqueued, without waiting.
        """

    def draft(self, slot: int, anchor: int, n: int, n_top: int, race: Race | None = None) -> Draft:
        """Propose at most n tokens after the anchor, and the n_top likeliest at each depth.

        It was told of all that the sequence holds. anchor: the last token of the text, which the
        sequence does not hold yet. n is at least 1 and at most max_draft; n_top is at least 1. The
        draft may be shorter than n, or empty, and may list fewer tokens than n_top.

        race: the text is sampled so. What follows is best drafted after the token that will
        probably win; that token then comes first at its depth.
        """

    def truncate(self, slot: int, n_past: int) -> None:
        """Forget what a sequence held from position n_past on."""

    @property
    def row_widths(self) -> Sequence[int]:
        """Return the bytes of a position in each cache of its own (`RowKeeper`)."""

    def close(self) -> None:
        """Wait for the device, then free everything."""


@runtime_checkable
class RowKeeper(Drafter, Protocol):
    """A drafter that has something of positions in caches of its own, not in the target's."""

    def take_rows(self, slot: int, first: int, n: int) -> Parts:
        """Copy its own caches' rows of n positions, which it knows, and wait.

        Returns for each cache U8 numpy [m, bytes of a row], the rows of the last m positions.
        """

    def put_back(self, slot: int, ids: Ids, n_kept: int, pieces: Sequence[Piece]) -> None:
        """Note that a sequence holds ids, which were copied back but for the first n_kept.

        pieces: of runs of positions, in order: the first position, the number of positions, and
        what `take_rows` returned.
        """


class JointDrafter(Drafter, Protocol):
    """A drafter that can draft for several sequences at once, hardly slower than for one.

    joins: whether its device can.
    """

    joins: bool

    def can_join(self, race: Race | None) -> bool:
        """Return whether a draft may be one of several. race: that `draft` would be given."""

    def draft_all(self, anchors: Mapping[int, int], n: int, n_top: int) -> list[Draft]:
        """Propose at most n tokens after the anchor of each sequence, as `draft` does for one.

        anchors: the last token of each text, by sequence. Returns their drafts, in this order.
        """


def as_joint(drafter: Drafter | None) -> JointDrafter | None:
    """Return a drafter that can draft for several sequences at once; None if it cannot."""
    return cast(JointDrafter, drafter) if getattr(drafter, "joins", False) else None
