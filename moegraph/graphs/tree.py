"""DeltaNet layers over trees of rows, and the commit of one path through a tree.

A tree of drafted tokens is verified without changing the states and without a copy of them for
each row. The accepted rows then run through the recurrences again, from their saved inputs
(`DeltaRows`): a few small nodes for each layer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..arch.hparams import HParams
from ..errors import InternalError
from ..ggml.lib import C
from ..ggml.ops import MAX_TREE_ROWS, Builder, Tensor
from ..resident.state import State
from ..resident.weights import LayerWeights
from .deltanet import DeltaRows, build_output, build_recurrence, project_rows
from .inputs import PassShape

# As a parent: the row is none of the tree's.
PADDING = -2


def check_parents(parents: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Return the parents of rows as I32, numpy shape [n_seqs, n_seq_tokens].

    A parent is an earlier row, -1 for a root, or PADDING for a row that counts for nothing.

    Raises:
        InternalError: no rows, more than MAX_TREE_ROWS, or a parent that is none of these or
            padding itself.
    """
    given = np.atleast_2d(np.asarray(parents))
    if not 0 < given.shape[-1] <= MAX_TREE_ROWS:
        raise InternalError(f"a tree has {given.shape[-1]} rows, not 1 to {MAX_TREE_ROWS}")
    bad = np.argwhere((given < PADDING) | (given >= np.arange(given.shape[-1])))
    if len(bad):
        seq, row = bad[0].tolist()
        raise InternalError(
            f"tree {seq}: the parent of row {row} is {given[seq, row]}, not {PADDING} to {row - 1}"
        )
    above = np.take_along_axis(given, np.maximum(given, 0).astype(np.int64), -1)
    lost = np.argwhere((given >= 0) & (above == PADDING))
    if len(lost):
        seq, row = lost[0].tolist()
        raise InternalError(
            f"tree {seq}: the parent of row {row} is row {given[seq, row]}, which is padding"
        )
    return given.astype(np.int32)


def build_tree_deltanet(
    b: Builder, hp: HParams, w: LayerWeights, state: State, shape: PassShape, slots: Tensor,
    parents: Tensor, cur: Tensor, il: int,
) -> tuple[Tensor, DeltaRows]:  # fmt: skip
    """Append one DeltaNet mixer over trees of rows: F32 [n_embd, n_tokens] in and out.

    slots: see deltanet.py. parents: I32 [n_seq_tokens, n_seqs], see check_parents. Each row
    continues its parent; a root continues the states, which do not change. The second result is
    for build_commit; the caller must keep these rows in memory that no other node of this graph
    uses (`DraftRows`).
    """
    rows, z = project_rows(b, hp, w, shape, cur, il)
    out = build_recurrence(b, hp, w, state, rows, slots, il, parents)
    return build_output(b, hp, w, shape, out, z, il), rows


def build_commit(
    b: Builder, hp: HParams, w: LayerWeights, state: State, rows: DeltaRows, slots: Tensor,
    path: Tensor, lengths: Tensor, il: int,
) -> None:  # fmt: skip
    """Append the update of a layer's states by the rows of one path through each sequence's tree.

    rows: those of build_tree_deltanet, or of several such passes. path: I32 [n_accepted, S], rows
    counted over all sequences (row r of sequence s is s * T + r), of each tree from its root on;
    lengths: I32 [S], how many of them count. The recurrences of build_deltanet run over the path
    alone, so the states are those of a pass without the rest of the tree.
    """
    n, s, n_v = path.ne[0], path.ne[1], hp.n_v_heads
    flat = b.reshape(path, n * s)

    def along(a: Tensor, width: int) -> Tensor:
        n_rows = C.ggml_nelements(a) // width
        return b.get_rows(b.reshape(a, width, n_rows), flat)

    qkv = b.reshape(along(rows.qkv, hp.conv_dim), hp.conv_dim, n, s)
    gate, beta = (b.reshape(along(a, n_v), 1, n_v, n, s) for a in (rows.gate, rows.beta))
    accepted = DeltaRows(qkv, gate, beta)
    build_recurrence(b, hp, w, state, accepted, slots, il, lengths=lengths)
