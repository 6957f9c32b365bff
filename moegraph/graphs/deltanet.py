"""Gated DeltaNet: a short convolution and the gated delta rule; both update the states.

In shapes, T is n_seq_tokens and S is n_seqs. slots I32 [S] are the rows of the states that belong
to the sequences of a pass: they are gathered and written back. None means the engine's only
sequence, whose state is updated in place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..ggml.lib import C
from ..ggml.ops import Builder, Tensor
from ..modelfile.hparams import HParams
from ..resident.state import State
from ..resident.weights import LayerWeights
from .inputs import PassShape
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
    b: Builder, hp: HParams, w: LayerWeights, state: State, shape: PassShape, slots: Tensor | None,
    cur: Tensor, il: int,
) -> Tensor:  # fmt: skip
    """Append one DeltaNet mixer: F32 [n_embd, n_tokens] in and out.

    Source: mirrors llama.cpp src/models/qwen35moe.cpp build_layer_attn_linear, except that the
    state is read in place; upstream copies it first.
    """
    rows, z = project_rows(b, hp, w, shape, cur, il)
    columns = advance_conv_state(b, hp, state, shape, slots, rows.qkv, il)
    conv = b.ssm_conv(columns, w["ssm_conv1d.weight"])
    q, k, v = delta_operands(b, hp, shape, conv, il)
    out = advance_delta_state(b, hp, state, shape, slots, (q, k, v, rows.gate, rows.beta), il)
    return build_output(b, hp, w, shape, out, z, il)


def project_rows(
    b: Builder, hp: HParams, w: LayerWeights, shape: PassShape, cur: Tensor, il: int
) -> tuple[DeltaRows, Tensor]:
    """Append the projections of rows F32 [n_embd, n_tokens]; z is F32 [value_dim, n_tokens]."""
    t, s, n_v = shape.n_seq_tokens, shape.n_seqs, hp.n_v_heads

    qkv, z, beta, alpha = project(b, w, _PROJECTIONS, cur)
    qkv = b.name(b.reshape(qkv, hp.conv_dim, t, s), "linear_attn_qkv_mixed", il)
    z = b.name(z, "z", il)
    beta = b.name(b.reshape(beta, 1, n_v, t, s), "beta", il)
    # CUDA runs the nodes from here to k in delta_operands as one kernel, in this order, for few
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
    out = b.name(b.reshape(out, d_v * n_v, t, s), "final_output", il)
    out = b.name(b.mul_mat(w["ssm_out.weight"], out), "linear_attn_out", il)
    return b.reshape(out, hp.n_embd, t * s)


def _read(b: Builder, states: Tensor, slots: Tensor | None, ne: tuple[int, ...]) -> Tensor:
    """Return the states of the sequences: F32 ne, contiguous, of which the last extent is S."""
    if slots is not None:
        return b.reshape(b.get_rows(states, slots), *ne)
    strides = [4 * math.prod(ne[: i + 1]) for i in range(len(ne) - 1)]
    return b.view(states, ne, strides)


def _write(b: Builder, states: Tensor, slots: Tensor | None, rows: Tensor) -> None:
    """Append the write of new states of the sequences; rows: F32 with n * S elements.

    CUDA updates the state in place if the copy into a plain view directly follows the op.
    """
    if slots is None:
        b.expand(b.cpy(rows, b.view(states, (states.ne[0], 1), (states.nb[1],))))
        return
    flat = b.reshape if C.ggml_is_contiguous(rows) else b.cont
    b.expand(b.set_rows(states, flat(rows, states.ne[0], slots.ne[0]), slots))


def conv_columns(
    b: Builder, hp: HParams, state: State, shape: PassShape, slots: Tensor | None, qkv: Tensor,
    il: int,
) -> Tensor:  # fmt: skip
    """Concatenate the state's columns and qkv's: F32 [d_conv - 1 + T, conv_dim, S]."""
    past = _read(b, state.conv[il], slots, (hp.ssm_d_conv - 1, hp.conv_dim, shape.n_seqs))
    return b.name(b.concat(past, b.transpose(qkv), 0), "conv_input", il)


def advance_conv_state(
    b: Builder, hp: HParams, state: State, shape: PassShape, slots: Tensor | None, qkv: Tensor,
    il: int,
) -> Tensor:  # fmt: skip
    """Store the last d_conv - 1 columns in the state; return all of `conv_columns`."""
    columns = conv_columns(b, hp, state, shape, slots, qkv, il)
    ne = (hp.ssm_d_conv - 1, hp.conv_dim, shape.n_seqs)
    last = b.view(columns, ne, (columns.nb[1], columns.nb[2]), 4 * shape.n_seq_tokens)
    _write(b, state.conv[il], slots, last)
    return columns


def delta_operands(
    b: Builder, hp: HParams, shape: PassShape, conv: Tensor, il: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Activate conv F32 [conv_dim, T, S]; split it into q, k (L2-normalised) and v of all heads.

    q, k: F32 [head_k_dim, n_k_heads, T, S]; v: F32 [head_v_dim, n_v_heads, T, S].
    """
    conv = b.name(b.silu(b.name(conv, "conv_output_raw", il)), "conv_output_silu", il)
    q, k, v = _split_qkv(b, hp, shape, conv)
    q = b.expand(b.name(_l2_norm(b, q, hp.f_norm_rms_eps), "q_conv_predelta", il))
    k = b.expand(b.name(_l2_norm(b, k, hp.f_norm_rms_eps), "k_conv_predelta", il))
    return q, k, b.name(v, "v_conv_predelta", il)


def _split_qkv(
    b: Builder, hp: HParams, shape: PassShape, conv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """View q, k [head_k_dim, n_k_heads, T, S] and v [head_v_dim, n_v_heads, T, S]."""
    row = 4 * hp.conv_dim
    parts, offset = [], 0
    for d, n in (
        (hp.head_k_dim, hp.n_k_heads),
        (hp.head_k_dim, hp.n_k_heads),
        (hp.head_v_dim, hp.n_v_heads),
    ):
        ne = (d, n, shape.n_seq_tokens, shape.n_seqs)
        parts.append(b.view(conv, ne, (4 * d, row, row * shape.n_seq_tokens), offset))
        offset += 4 * d * n
    return parts[0], parts[1], parts[2]


def _l2_norm(b: Builder, x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum(x^2) + eps), as rms_norm and scale, which CUDA runs as one kernel."""
    n = x.ne[0]
    return b.scale(b.rms_norm(x, eps / n), 1.0 / math.sqrt(n))


def delta_state(
    b: Builder, hp: HParams, state: State, shape: PassShape, slots: Tensor | None, il: int
) -> Tensor:
    """Return the recurrent states of the sequences: F32 [head_v_dim, head_v_dim, n_v_heads, S]."""
    d = hp.head_v_dim
    return _read(b, state.ssm[il], slots, (d, d, hp.n_v_heads, shape.n_seqs))


def advance_delta_state(
    b: Builder, hp: HParams, state: State, shape: PassShape, slots: Tensor | None,
    operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], il: int,
) -> Tensor:  # fmt: skip
    """Append the recurrence and the write of the final state: F32 [head_v_dim, n_v_heads, T, S].

    operands: q, k, v, gate, beta.
    """
    d, h, t, s = hp.head_v_dim, hp.n_v_heads, shape.n_seq_tokens, shape.n_seqs
    both = b.gated_delta_net(*operands, delta_state(b, hp, state, shape, slots, il))
    out = b.view(both, (d, h, t, s), (4 * d, 4 * d * h, 4 * d * h * t))
    after = b.view(both, (d, d, h, s), (4 * d, 4 * d * d, 4 * d * d * h), 4 * d * h * t * s)
    _write(b, state.ssm[il], slots, b.name(after, "new_state", il))
    return b.name(out, "attn_output", il)
