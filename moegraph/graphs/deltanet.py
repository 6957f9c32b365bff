"""Gated DeltaNet: short convolution and gated delta rule, both states updated in place."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..ggml.ops import Builder, Tensor
from ..hparams import HParams
from ..state import State
from ..weights import LayerWeights
from .inputs import PassShape
from .project import project

_PROJECTIONS = ("attn_qkv.weight", "attn_gate.weight", "ssm_beta.weight", "ssm_alpha.weight")


@dataclass(frozen=True)
class DeltaRows:
    """What the recurrences of one layer read: enough to run some rows again.

    qkv F32 [conv_dim, T, S], before the convolution; gate (log of the decay, <= 0) and beta F32
    [1, n_v_heads, T, S].
    """

    qkv: Tensor
    gate: Tensor
    beta: Tensor


def build_deltanet(
    b: Builder, hp: HParams, w: LayerWeights, state: State, shape: PassShape, cur: Tensor, il: int
) -> Tensor:
    """Append one DeltaNet mixer: F32 [n_embd, n_tokens] in and out.

    Source: mirrors llama.cpp src/models/qwen35moe.cpp build_layer_attn_linear. The state is read in
    place; upstream gathers it first, which copies it once more.
    """
    rows, z = project_rows(b, hp, w, shape, cur, il)
    columns = advance_conv_state(b, hp, state, shape, rows.qkv, il)
    conv = b.ssm_conv(columns, w["ssm_conv1d.weight"])
    q, k, v = delta_operands(b, hp, shape, conv, il)
    out = advance_delta_state(b, hp, state, shape, (q, k, v, rows.gate, rows.beta), il)
    return build_output(b, hp, w, shape, out, z, il)


def project_rows(
    b: Builder, hp: HParams, w: LayerWeights, shape: PassShape, cur: Tensor, il: int
) -> tuple[DeltaRows, Tensor]:
    """Project rows F32 [n_embd, n_tokens]: what the recurrences read, and z [value_dim,
    n_tokens].
    """
    t, s, n_v = shape.n_seq_tokens, shape.n_seqs, hp.n_v_heads

    qkv, z, beta, alpha = project(b, w, _PROJECTIONS, cur)
    qkv = b.name(b.reshape(qkv, hp.conv_dim, t, s), "linear_attn_qkv_mixed", il)
    z = b.name(z, "z", il)
    beta = b.name(b.reshape(beta, 1, n_v, t, s), "beta", il)
    # from here to k in delta_operands, in this order: one kernel on CUDA for few tokens
    beta = b.expand(b.name(b.sigmoid(beta), "beta_sigmoid", il))
    alpha = b.name(b.reshape(alpha, n_v, t, s), "alpha", il)
    softplus = b.name(b.softplus(b.add(alpha, w["ssm_dt.bias"])), "a_softplus", il)
    gate = b.expand(b.name(b.mul(softplus, w["ssm_a"]), "gate", il))
    return DeltaRows(qkv, b.reshape(gate, 1, n_v, t, s), beta), z


def build_output(
    b: Builder, hp: HParams, w: LayerWeights, shape: PassShape, out: Tensor, z: Tensor, il: int
) -> Tensor:
    """Norm, output gate and projection of F32 [head_v_dim, n_v_heads, T, S]: [n_embd, n_tokens]."""
    d_v, n_v, t, s = hp.head_v_dim, hp.n_v_heads, shape.n_seq_tokens, shape.n_seqs
    out = b.norm(out, w["ssm_norm.weight"], hp.f_norm_rms_eps)
    out = b.mul(out, b.silu(b.reshape(z, d_v, n_v, t, s)))
    out = b.name(b.reshape(out, d_v * n_v, t, s), "final_output", il)
    out = b.name(b.mul_mat(w["ssm_out.weight"], out), "linear_attn_out", il)
    return b.reshape(out, hp.n_embd, t * s)


def conv_columns(
    b: Builder, hp: HParams, state: State, shape: PassShape, qkv: Tensor, il: int
) -> Tensor:
    """Put the kept columns in front of qkv's: F32 [d_conv - 1 + n_seq_tokens, conv_dim, n_seqs]."""
    kept, row = hp.ssm_d_conv - 1, state.conv[il].nb[1]
    past = b.view(
        state.conv[il], (kept, hp.conv_dim, shape.n_seqs), (4 * kept, row), shape.seq0 * row
    )
    return b.name(b.concat(past, b.transpose(qkv), 0), "conv_input", il)


def advance_conv_state(
    b: Builder, hp: HParams, state: State, shape: PassShape, qkv: Tensor, il: int
) -> Tensor:
    """Keep the last d_conv - 1 of conv_columns, and return all of them."""
    kept, row = hp.ssm_d_conv - 1, state.conv[il].nb[1]
    both = conv_columns(b, hp, state, shape, qkv, il)
    last = b.view(
        both, (kept, hp.conv_dim, shape.n_seqs), (both.nb[1], both.nb[2]), 4 * shape.n_seq_tokens
    )
    slot = b.view(state.conv[il], (kept * hp.conv_dim, shape.n_seqs), (row,), shape.seq0 * row)
    b.expand(b.cpy(last, slot))
    return both


def delta_operands(
    b: Builder, hp: HParams, shape: PassShape, conv: Tensor, il: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Activate and split conv F32 [conv_dim, T, S] into q, k (of length 1) and v of all heads."""
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
    """x / sqrt(sum(x^2) + eps), written as rms_norm and scale: one kernel on CUDA."""
    n = x.ne[0]
    return b.scale(b.rms_norm(x, eps / n), 1.0 / math.sqrt(n))


def delta_state(b: Builder, hp: HParams, state: State, shape: PassShape, il: int) -> Tensor:
    """View the states of a pass's sequences: F32 [head_v_dim, head_v_dim, n_v_heads, S]."""
    d, row = hp.head_v_dim, state.ssm[il].nb[1]
    ne = (d, d, hp.n_v_heads, shape.n_seqs)
    return b.view(state.ssm[il], ne, (4 * d, 4 * d * d, row), shape.seq0 * row)


def advance_delta_state(
    b: Builder,
    hp: HParams,
    state: State,
    shape: PassShape,
    operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    il: int,
) -> Tensor:
    """Run the recurrence and write the final state back: F32 [head_v_dim, n_v_heads, T, S].

    The copy right behind the op, into a plain view, is what CUDA fuses into an in-place update.
    """
    d, h, t, s = hp.head_v_dim, hp.n_v_heads, shape.n_seq_tokens, shape.n_seqs
    row = state.ssm[il].nb[1]
    both = b.gated_delta_net(*operands, delta_state(b, hp, state, shape, il))
    out = b.view(both, (d, h, t, s), (4 * d, 4 * d * h, 4 * d * h * t))
    after = b.view(both, (d, d, h, s), (4 * d, 4 * d * d, 4 * d * d * h), 4 * d * h * t * s)
    slot = b.view(state.ssm[il], (d * d * h, s), (row,), shape.seq0 * row)
    b.expand(b.cpy(b.name(after, "new_state", il), slot))
    return b.name(out, "attn_output", il)
