"""DSpark's heads: each token of a block is made to depend on the one before.

The Markov head adds to the logits of a row what the token before says, a product of two small
matrices. So the head can also say what follows other tokens than the likeliest ones: that makes
lists of which the host builds a tree (`build_lists`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..ggml.ops import Builder, Tensor

# Byte of the ids in a row of candidates (struct moegraph_listed).
_IDS = 16

# Candidates of drafted tokens, I32 [words, n] (see `likeliest_rows`), in one tensor or several; and
# how sure the drafter is of each token, F32 [1, n], if it has a head for that.
DraftResults = tuple["Sequence[Tensor]", "Tensor | None"]


class DrafterWeights(Protocol):
    """A drafter's tensors by their names, and those of each layer."""

    tensors: dict[str, Tensor]
    layers: list[dict[str, Tensor]]


@dataclass(frozen=True)
class HeadMatrix:
    """What gives logits: output [n_embd, n_draft], the target's head or the drafter's own.

    d2t: I32 [1, n_draft], the target's token of each; None if they are the target's.
    """

    output: Tensor
    d2t: Tensor | None


@dataclass(frozen=True)
class Scratch:
    """Fixed memory for ids of m tokens: numbers F32 [m], ids I32 [m]."""

    numbers: Tensor
    ids: Tensor


def build_markov(
    b: Builder, w: DrafterWeights, logits: Tensor, rows: Tensor, anchors: Tensor, head: HeadMatrix
) -> tuple[Tensor, Tensor | None]:
    """Append the Markov head: each row's logits, given the likeliest token of the one before.

    anchors: I32 [m], the token before the first row of each of m sequences. logits F32 [n_draft,
    m * n], of rows F32 [n_embd, m * n]: the first row of every sequence, then all second ones.
    Returns logits of that shape, and confidence F32 [1, m * n] or None.

    Source: llama.cpp src/models/dflash.cpp build_dspark_markov_head.
    """
    before, m = anchors, anchors.ne[0]
    n = logits.ne[1] // m
    biased, traits = [], []
    for i in range(n):
        trait, bias = _build_bias(b, w, before)
        biased.append(b.add(_columns(b, logits, m * i, m), bias))
        traits.append(trait)
        if i + 1 < n:  # of NaN it is -1: tables have something readable before their first row
            before = _as_target(b, b.argmax(biased[-1]), head)
    return _joined(b, biased), _build_confidence(b, w, rows, traits)


def build_drawn(
    b: Builder, w: DrafterWeights, logits: Tensor, anchor: Tensor, races: Tensor,
    scratch: Sequence[Scratch], winner_at: int,
) -> list[Tensor]:  # fmt: skip
    """Append the Markov head where each row is given the winner of the race before it.

    For a drafter of the target's tokens. races: I32 [DRAW_WORDS, n], what the race of each row
    depends on. scratch: for each row but the last, for one id. winner_at: byte of the
    winner's id in candidates. Returns the candidates of each row,
    I32 [words, 1].
    """
    before, found = anchor, []
    for i in range(logits.ne[1]):
        _, bias = _build_bias(b, w, before)
        biased = b.add(_columns(b, logits, i, 1), bias)
        found.append(b.expand(b.candidates(biased, _columns(b, races, i, 1))))
        b.output(found[-1])
        if i + 1 < logits.ne[1]:
            before = _ids_at(b, found[-1], winner_at, scratch[i], logits.ne[0])
    return found


def build_lists(
    b: Builder, w: DrafterWeights, logits: Tensor, rows: Tensor, anchor: Tensor, head: HeadMatrix,
    draws: Tensor, scratch: Sequence[Scratch],
) -> DraftResults:  # fmt: skip
    """Append the Markov head for several tokens before each row; arguments as in `build_markov`.

    draws: I32 [DRAW_WORDS, at least m], for candidates. scratch: for each row but the last; its
    size is m. The candidates are I32 [words, 1] for the token after the anchor, then [words, m]:
    column i is what follows the i-th of the tokens before, the first m of column 0 there.
    """
    before, n = anchor, logits.ne[1]
    found, traits = [], []
    for i in range(n):
        trait, bias = _build_bias(b, w, before)
        traits.append(_columns(b, trait, 0, 1))
        biased = b.add(bias, _columns(b, logits, i, 1))
        found.append(b.candidates(biased, _columns(b, draws, 0, biased.ne[1])))
        b.output(b.expand(found[-1]))
        if i + 1 < n:
            ids = _ids_at(b, found[-1], _IDS, scratch[i], logits.ne[0])
            before = _as_target(b, ids, head)
    return found, _build_confidence(b, w, rows, traits)


def _build_bias(b: Builder, w: DrafterWeights, before: Tensor) -> tuple[Tensor, Tensor]:
    """Append what the tokens before m rows add to their logits: traits, and F32 [n_draft, m]."""
    trait = b.get_rows(w.tensors["markov_w1.weight"], before)
    return trait, b.mul_mat(w.tensors["markov_w2.weight"], trait)


def _columns(b: Builder, t: Tensor, first: int, n: int) -> Tensor:
    """View n columns of a tensor [m, ...] from `first` on."""
    return b.view(t, (t.ne[0], n), (t.nb[1],), first * t.nb[1])


def _ids_at(b: Builder, candidates: Tensor, at: int, scratch: Scratch, n_vocab: int) -> Tensor:
    """Append ids from a byte of column 0 of candidates on, I32 [m], in the range of tokens.

    There may be no list, of NaN for example; then anything may be where the ids are.
    """
    ids = b.view(candidates, (scratch.ids.ne[0],), (), at)
    numbers = b.clamp(b.cpy(ids, scratch.numbers), 0.0, n_vocab - 1.0)
    return b.cpy(numbers, scratch.ids)


def _as_target(b: Builder, ids: Tensor, head: HeadMatrix) -> Tensor:
    """Return the target's tokens for ids I32 [m] of the drafter."""
    return ids if head.d2t is None else b.reshape(b.get_rows(head.d2t, ids), ids.ne[0])


def _build_confidence(
    b: Builder, w: DrafterWeights, rows: Tensor, traits: Sequence[Tensor]
) -> Tensor | None:
    """Append how probable it is that each token is right if those before are: F32 [1, n]."""
    weight, bias = w.tensors.get("conf_proj.weight"), w.tensors.get("conf_proj.bias")
    if weight is None:
        return None
    found = b.mul_mat(b.reshape(weight, weight.ne[0], 1), b.concat(rows, _joined(b, traits), 0))
    found = found if bias is None else b.add(found, bias)
    found = b.expand(b.sigmoid(found))
    b.output(found)
    return found


def _joined(b: Builder, columns: Sequence[Tensor]) -> Tensor:
    """Append one tensor of columns [m, 1]: [m, n]."""
    joined = columns[0]
    for column in columns[1:]:
        joined = b.concat(joined, column, 1)
    return joined
