"""Gated DeltaNet: a short convolution and the gated delta rule; both update the states.

In shapes, T is n_seq_tokens and S is n_seqs. The states are columns of `State.conv` and
`State.ssm`; slots I32 [S] names the column of each sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..arch.hparams import HParams
from ..ggml.ops import Builder, Tensor
from ..resident.state import State
from ..resident.weights import LayerWeights
from .inputs import PassShape
from .joint import JointRows, gather, spread
from .project import project

_PROJECTIONS = ("attn_qkv.weight", "attn_gate.weight", "ssm_beta.weight", "ssm_alpha.weight")


@dataclass(frozen=True)
class DeltaRows:
    """Inputs of one layer's recurrences; enough to run some of the rows again.

    qkv F32 [conv_dim, T, S], before the convolution. gate (log of the decay, <= 0) and beta: F32
    [1, n_v_heads, T, S].
    """

    qkv: Tensor
    gate: Tensor
    beta: Tensor


def build_deltanet(
    b: Builder, hp: HParams, w: LayerWeights, state: State, shape: PassShape, slots: Tensor,
    cur: Tensor, il: int, joint: JointRows | None = None,
) -> Tensor:  # fmt: skip
    """Append one DeltaNet mixer: F32 [n_embd, n_tokens] in and out.

    joint: the rows of the sequences are not equally many; shape has the rectangle.

    Source: mirrors llama.cpp src/models/qwen35moe.cpp build_layer_attn_linear, except that states
    are read and written in place; upstream copies them.
    """
    if joint is None:
        rows, z = project_rows(b, hp, w, shape, cur, il)
        out = build_recurrence(b, hp, w, state, rows, slots, il)
        return build_output(b, hp, w, shape, out, z, il)
    n, flat = cur.ne[1], PassShape(cur.ne[1], 1, shape.n_kv, 0)
    rows, z = project_rows(b, hp, w, flat, cur, il)
    rows = _spread_rows(b, rows, shape, joint)
    out = build_recurrence(b, hp, w, state, rows, slots, il, lengths=joint.lengths)
    out = gather(b, b.reshape(out, hp.value_dim, shape.n_tokens), joint)
    out = b.reshape(out, hp.head_v_dim, hp.n_v_heads, n, 1)
    return build_output(b, hp, w, flat, out, z, il)


def _spread_rows(b: Builder, rows: DeltaRows, shape: PassShape, joint: JointRows) -> DeltaRows:
    """Append copies of rows of several sequences to their places in the rectangle of shape."""
    n, t, s = rows.qkv.ne[1], shape.n_seq_tokens, shape.n_seqs
    n_channels, n_v = rows.qkv.ne[0], rows.gate.ne[1]
    qkv = b.reshape(spread(b, b.reshape(rows.qkv, n_channels, n), joint), n_channels, t, s)
    gate, beta = (
        b.expand(b.reshape(spread(b, b.reshape(one, n_v, n), joint), 1, n_v, t, s))
        for one in (rows.gate, rows.beta)
    )
    return DeltaRows(qkv, gate, beta)


def project_rows(
    b: Builder, hp: HParams, w: LayerWeights, shape: PassShape, cur: Tensor, il: int
) -> tuple[DeltaRows, Tensor]:
    """Append the projections of rows F32 [n_embd, n_tokens]; z is F32 [value_dim, n_tokens]."""
    t, s, n_v = shape.n_seq_tokens, shape.n_seqs, hp.n_v_heads

    qkv, z, beta, alpha = project(b, w, _PROJECTIONS, cur)
    qkv = b.name(b.reshape(qkv, hp.conv_dim, t, s), "linear_attn_qkv_mixed", il)
    z = b.name(z, "z", il)
    beta = b.name(b.reshape(beta, 1, n_v, t, s), "beta", il)
    # CUDA runs the nodes from here to k in build_recurrence as one kernel, in this order, for few
    # rows
    beta = b.expand(b.name(b.sigmoid(beta), "beta_sigmoid", il))
    alpha = b.name(b.reshape(alpha, n_v, t, s), "alpha", il)
    softplus = b.name(b.softplus(b.add(alpha, w["ssm_dt.bias"])), "a_softplus", il)
    gate = b.expand(b.name(b.mul(softplus, w["ssm_a"]), "gate", il))
    return DeltaRows(qkv, b.reshape(gate, 1, n_v, t, s), beta), z


def build_output(
    b: Builder, hp: HParams, w: LayerWeights, shape: PassShape, out: Tensor, z: Tensor, il: int
) -> Tensor:
    """Append norm, gate z and projection of out F32 [head_v_dim, n_v_heads, T, S].

    Returns F32 [n_embd, n_tokens].
    """
    d_v, n_v, t, s = hp.head_v_dim, hp.n_v_heads, shape.n_seq_tokens, shape.n_seqs
    out = b.norm(out, w["ssm_norm.weight"], hp.f_norm_rms_eps)
    out = b.mul(out, b.silu(b.reshape(z, d_v, n_v, t, s)))
    # one matrix of rows, also of several sequences: else CUDA would read the weights for each of
    # them, with a kernel whose sums have another order
    out = b.name(b.reshape(out, d_v * n_v, t * s), "final_output", il)
    return b.name(b.mul_mat(w["ssm_out.weight"], out), "linear_attn_out", il)


def build_recurrence(
    b: Builder, hp: HParams, w: LayerWeights, state: State, rows: DeltaRows, slots: Tensor, il: int,
    parents: Tensor | None = None, lengths: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Append convolution and delta rule: F32 [head_v_dim, n_v_heads, T, S].

    They store the new states. With parents I32 [T, S] (see graphs/tree.py) they store none. With
    lengths I32 [S], only the first lengths[s] rows of a sequence count.
    """
    conv = b.conv(rows.qkv, w["ssm_conv1d.weight"], state.conv[il], slots, parents, lengths)
    conv = b.name(b.silu(b.name(conv, "conv_output_raw", il)), "conv_output_silu", il)
    q, k, v = _split_qkv(b, hp, conv)
    q = b.expand(b.name(_l2_norm(b, q, hp.f_norm_rms_eps), "q_conv_predelta", il))
    k = b.expand(b.name(_l2_norm(b, k, hp.f_norm_rms_eps), "k_conv_predelta", il))
    b.name(v, "v_conv_predelta", il)
    args = (q, k, v, rows.gate, rows.beta, state.ssm[il], slots, parents, lengths)
    out = b.delta_net(*args)
    return b.expand(b.name(out, "attn_output", il))


def _split_qkv(b: Builder, hp: HParams, conv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """View q, k [head_k_dim, n_k_heads, T, S] and v [head_v_dim, n_v_heads, T, S]."""
    parts, offset = [], 0
    for d, n in (
        (hp.head_k_dim, hp.n_k_heads),
        (hp.head_k_dim, hp.n_k_heads),
        (hp.head_v_dim, hp.n_v_heads),
    ):
        ne = (d, n, conv.ne[1], conv.ne[2])
        parts.append(b.view(conv, ne, (4 * d, conv.nb[1], conv.nb[2]), offset))
        offset += 4 * d * n
    return parts[0], parts[1], parts[2]


def _l2_norm(b: Builder, x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum(x^2) + eps), as rms_norm and scale, which CUDA runs as one kernel."""
    n = x.ne[0]
    return b.scale(b.rms_norm(x, eps / n), 1.0 / math.sqrt(n))
