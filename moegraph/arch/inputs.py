"""What builders of graphs get: the shape and inputs of a pass, weights, and memory.

Weights and memory are protocols: the rooms above own them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from ..ggml.ops import Builder, Tensor

# As a KV length: graphs read K and V through lists of pages, and serve any length.
PAGED = 0


class PassShape(NamedTuple):
    """Everything that determines the graphs of a pass; which sequences it has is an input.

    n_seq_tokens rows for each of n_seqs sequences. Rows attend to n_kv positions, or, if n_kv is
    PAGED, to what is in the pages of their sequences. n_out rows reach the head: none, the last of
    each sequence, or all. is_tree: the rows of a sequence are a tree, and the pass leaves all
    states as they are. is_ragged: some of these rows are padding; which ones is an input. has_axes:
    rows have a position on each axis of the rope, as those of pictures do.
    """

    n_seq_tokens: int
    n_seqs: int
    n_kv: int
    n_out: int
    is_tree: bool = False
    is_ragged: bool = False
    has_axes: bool = False

    @property
    def is_paged(self) -> bool:
        """Whether attention reads K and V through lists of pages."""
        return self.n_kv == PAGED

    @property
    def n_tokens(self) -> int:
        """Rows of the pass."""
        return self.n_seq_tokens * self.n_seqs


@dataclass(frozen=True)
class JointRows:
    """Where the rows of a chunk are in a rectangle of T places for each of S sequences.

    Products, norms and experts are per row, so they take the rows of several sequences one after
    the other, without padding. Convolution, delta rule and attention are per sequence: for these
    the rows are spread over the rectangle, of which a sequence uses the first places, and gathered
    from it afterwards.

    Each number of rows has graphs of its own. So that few graphs serve many prompts, there may be
    more rows than the sequences have: the last ones are copies of the first row.

    places: I32 [T * S], the row of each place, and any row where a sequence has none. rows: I32
    [n_tokens], the place of each row. lengths: I32 [S], rows of each sequence. real: I32
    [n_tokens], the row that each row is a copy of. The rows of a single sequence are in their
    places already.
    """

    places: Tensor
    rows: Tensor
    lengths: Tensor
    real: Tensor

    def fill(self, b: Builder, x: Tensor) -> Tensor:
        """Append a copy of rows x F32 [m, n_tokens]; the last ones are copies of the first."""
        return b.get_rows(x, self.real)

    def spread(self, b: Builder, x: Tensor) -> Tensor:
        """Append a copy of rows x F32 [m, n_tokens] to their places: F32 [m, T * S]."""
        return x if self.lengths.ne[0] == 1 else b.get_rows(x, self.places)

    def gather(self, b: Builder, x: Tensor) -> Tensor:
        """Append a copy of the rows from their places: F32 [m, T * S] to [m, n_tokens]."""
        return x if self.lengths.ne[0] == 1 else b.get_rows(x, self.rows)


@dataclass(frozen=True)
class PassInputs:
    """The input tensors of one pass, besides the rows of the stage's first layer.

    pos I32 [n_tokens], or [4 * n_tokens] with axes; kv_idx I64 [n_tokens], rows of the KV caches;
    slots I32 [n_seqs], the recurrent states of the sequences; out_ids I32 [n_out], or None if n_out
    is 0 or n_tokens; kq_mask F16 [n_kv, n_seq_tokens, 1, n_seqs]. With layers that have a window:
    window, their kv_idx, and their pages, or kv_rows and kq_mask for as many positions as they
    need, and n_parts, in which a single row sums over them on the CPU. With several sequences in
    the engine: kv_rows I32 [n_kv * n_seqs], the rows of the KV caches that attention reads. With
    trees: parents I32 [n_seq_tokens, n_seqs]. With padding: padding I32 [n_tokens], the rows that
    are padding, of which some repeat; absent F32 [n_expert_used, n_tokens], ids of -1. With at most
    DRAW_ROWS results: draws I32 [DRAW_WORDS, n_out], for candidates (`RowSampler.draw`). With
    pages, in place of kq_mask and kv_rows: pages I32 [n_pages, n_seqs], rows I32 [ROW_WORDS,
    n_tokens]. With sequences of which each has its own number of rows: joint. For a drafter,
    without trees: hidden_rows I32 [n_tokens], where rows go in their ring. What a pass does not
    need is None.
    """

    pos: Tensor
    kv_idx: Tensor
    slots: Tensor
    out_ids: Tensor | None = None
    draws: Tensor | None = None
    kq_mask: Tensor | None = None
    window: PassInputs | None = None
    n_parts: int | None = None
    kv_rows: Tensor | None = None
    parents: Tensor | None = None
    padding: Tensor | None = None
    absent: Tensor | None = None
    pages: Tensor | None = None
    rows: Tensor | None = None
    hidden_rows: Tensor | None = None
    joint: JointRows | None = None


class Weights(Protocol):
    """The tensors of a layer by their name after `blk.N.`, for example `attn_norm.weight`.

    joined: matrices with the same input, joined into one, by the names of the parts.
    """

    joined: dict[tuple[str, ...], Tensor]

    def __getitem__(self, name: str, /) -> Tensor: ...

    def __contains__(self, name: object, /) -> bool: ...


class Drafts(Protocol):
    """Memory for what a verify pass keeps of its rows."""

    def keep(self, b: Builder, rows: Sequence[Tensor], il: int) -> None:
        """Have a graph leave the rows of layer il here."""


class Memory(Protocol):
    """What the sequences have in the layers of a stage; `resident.state.State` describes it."""

    k: dict[int, Tensor]
    v: dict[int, Tensor]
    k_words: dict[int, Tensor]
    v_words: dict[int, Tensor]
    rot_k: dict[int, Tensor]
    rot_v: dict[int, Tensor]
    page_size: int
    n_attention_parts: int
    layer_states: dict[int, tuple[Tensor, ...]]

    @property
    def drafts(self) -> Drafts:
        """Where verify passes leave what they keep of their rows."""


def project(b: Builder, w: Weights, names: Sequence[str], cur: Tensor) -> list[Tensor]:
    """Append the product of cur F32 [n_embd, n_tokens] with each named matrix.

    Each result is F32 [rows of the matrix, n_tokens]. For one row, matrices that are adjacent in
    memory become one product, and the results are views of it; every element is the same dot
    product. For several rows such views would not be contiguous, so each matrix has its own
    product. CUDA runs these as one kernel if they follow one another.
    """
    parts: dict[str, Tensor] = {}
    if cur.ne[1] == 1:
        for group, matrix in w.joined.items():
            if all(name in names for name in group):
                product, offset = b.mul_mat(matrix, cur), 0
                for name in group:
                    m = w[name].ne[1]
                    parts[name] = b.view(product, (m, 1), (4 * m,), offset)
                    offset += 4 * m
    return [parts[name] if name in parts else b.expand(b.mul_mat(w[name], cur)) for name in names]
