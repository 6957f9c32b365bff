"""DeltaNet layers over trees of rows, and the commit of one path through a tree.

A tree of drafted tokens is verified without changing the states and without a copy of them for
each row. The accepted rows then run through the recurrences again, from their saved inputs
(`DeltaRows`): a few small nodes for each layer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import InternalError
from ..ggml.lib import C
from ..ggml.ops import MAX_TREE_ROWS, Builder, Tensor
from ..modelfile.hparams import HParams
from ..resident.state import State
from ..resident.weights import LayerWeights
from .deltanet import (
    DeltaRows,
    advance_conv_state,
    advance_delta_state,
    build_output,
    conv_columns,
    delta_operands,
    delta_state,
    project_rows,
)
from .inputs import PassShape


def check_parents(parents: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Return the parents of rows as I32, numpy shape [n_seqs, n_seq_tokens].

    A parent is an earlier row, or -1 for a root.

    Raises:
        InternalError: no rows, more than MAX_TREE_ROWS, or a parent that is neither.
    """
    given = np.atleast_2d(np.asarray(parents))
    if not 0 < given.shape[-1] <= MAX_TREE_ROWS:
        raise InternalError(f"a tree has {given.shape[-1]} rows, not 1 to {MAX_TREE_ROWS}")
    bad = np.argwhere((given < -1) | (given >= np.arange(given.shape[-1])))
    if len(bad):
        seq, row = bad[0].tolist()
        raise InternalError(
            f"tree {seq}: the parent of row {row} is {given[seq, row]}, not -1 to {row - 1}"
        )
    return given.astype(np.int32)


def build_tree_deltanet(
    b: Builder, hp: HParams, w: LayerWeights, state: State, shape: PassShape,
    slots: Tensor | None, parents: Tensor, cur: Tensor, il: int,
) -> tuple[Tensor, DeltaRows]:  # fmt: skip
    """Append one DeltaNet mixer over trees of rows: F32 [n_embd, n_tokens] in and out.

    parents: I32 [n_seq_tokens, n_seqs], see check_parents. Each row continues its parent; a root
    continues the states, which do not change. The second result is for build_commit; the caller
    must keep these rows in memory that no other node of this graph uses (`DraftRows`).
    """
    rows, z = project_rows(b, hp, w, shape, cur, il)
    columns = conv_columns(b, hp, state, shape, slots, rows.qkv, il)
    conv = b.ssm_conv(columns, w["ssm_conv1d.weight"], parents)
    q, k, v = delta_operands(b, hp, shape, conv, il)
    before = delta_state(b, hp, state, shape, slots, il)
    out = b.gated_delta_net(q, k, v, rows.gate, rows.beta, before, parents)
    out = b.reshape(out, hp.head_v_dim, hp.n_v_heads, shape.n_seq_tokens, shape.n_seqs)
    return build_output(b, hp, w, shape, b.name(out, "attn_output", il), z, il), rows


def build_commit(
    b: Builder, hp: HParams, w: LayerWeights, state: State, slots: Tensor | None, rows: DeltaRows,
    path: Tensor, il: int,
) -> None:  # fmt: skip
    """Append the update of a layer's states by the rows of one path through each sequence's tree.

    rows: those of build_tree_deltanet, or of several such passes. path: I32 [n_accepted, S], rows
    counted over all sequences (row r of sequence s is s * T + r), of each tree from its root on.
    The operations of build_deltanet run over the path alone, so the states are those of a pass
    without the rest of the tree.
    """
    n, s, n_v = path.ne[0], path.ne[1], hp.n_v_heads
    flat = b.reshape(path, n * s)

    def along(a: Tensor, width: int) -> Tensor:
        n_rows = C.ggml_nelements(a) // width
        return b.get_rows(b.reshape(a, width, n_rows), flat)

    accepted = PassShape(n_seq_tokens=n, n_seqs=s, n_kv=0, n_out=0)
    qkv = b.reshape(along(rows.qkv, hp.conv_dim), hp.conv_dim, n, s)
    columns = advance_conv_state(b, hp, state, accepted, slots, qkv, il)
    conv = b.ssm_conv(columns, w["ssm_conv1d.weight"])
    _, k, v = delta_operands(b, hp, accepted, conv, il)
    gate = b.reshape(along(rows.gate, n_v), 1, n_v, n, s)
    beta = b.reshape(along(rows.beta, n_v), 1, n_v, n, s)
    # k in place of q: the output is not read, so q need not be computed
    advance_delta_state(b, hp, state, accepted, slots, (k, k, v, gate, beta), il)
