"""DeltaNet layers over trees of rows, and the commit of one path through a tree.

A tree of drafted tokens is verified without changing the states and without a copy of them for
each row. The accepted rows then run through the recurrences again, from their saved inputs
(`DeltaRows`): a few small nodes for each layer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..errors import InternalError
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
    b: Builder, hp: HParams, w: LayerWeights, state: State, shape: PassShape, parents: Tensor,
    cur: Tensor, il: int,
) -> tuple[Tensor, DeltaRows]:  # fmt: skip
    """Append one DeltaNet mixer over trees of rows: F32 [n_embd, n_tokens] in and out.

    parents: I32 [n_seq_tokens, n_seqs], see check_parents. Each row continues its parent; a root
    continues the states, which do not change. The second result is for build_commit; the caller
    must give these nodes memory that no other node of this graph uses.
    """
    rows, z = project_rows(b, hp, w, shape, cur, il)
    columns = conv_columns(b, hp, state, shape, rows.qkv, il)
    conv = b.ssm_conv(columns, w["ssm_conv1d.weight"], parents)
    q, k, v = delta_operands(b, hp, shape, conv, il)
    before = delta_state(b, hp, state, shape, il)
    out = b.gated_delta_net(q, k, v, rows.gate, rows.beta, before, parents)
    out = b.reshape(out, hp.head_v_dim, hp.n_v_heads, shape.n_seq_tokens, shape.n_seqs)
    return build_output(b, hp, w, shape, b.name(out, "attn_output", il), z, il), rows


def build_commit(
    b: Builder, hp: HParams, w: LayerWeights, state: State, shape: PassShape, rows: DeltaRows,
    path: Tensor, il: int,
) -> None:  # fmt: skip
    """Append the update of a layer's states by the rows of one path through each sequence's tree.

    shape and rows: those of build_tree_deltanet. path: I32 [n_accepted, n_seqs], rows of each tree
    from its root on. The operations of build_deltanet run over the path alone, so the states are
    those of a pass without the rest of the tree.
    """

    def along(a: Tensor, n: int) -> Tensor:
        return b.get_rows(b.reshape(a, n, shape.n_seq_tokens, shape.n_seqs), path)

    n_v, n = hp.n_v_heads, path.ne[0]
    accepted = replace(shape, n_seq_tokens=n)
    columns = advance_conv_state(b, hp, state, accepted, along(rows.qkv, hp.conv_dim), il)
    conv = b.ssm_conv(columns, w["ssm_conv1d.weight"])
    _, k, v = delta_operands(b, hp, accepted, conv, il)
    gate = b.reshape(along(rows.gate, n_v), 1, n_v, n, shape.n_seqs)
    beta = b.reshape(along(rows.beta, n_v), 1, n_v, n, shape.n_seqs)
    # k in place of q: the output is not read, so q need not be computed
    advance_delta_state(b, hp, state, accepted, (k, k, v, gate, beta), il)
