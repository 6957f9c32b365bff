"""Gated DeltaNet: short convolution and gated delta rule, both states updated in place."""

from __future__ import annotations

import math

from ..ggml.ops import Builder, Tensor
from ..hparams import HParams
from ..state import State
from ..weights import LayerWeights
from .inputs import PassShape
from .project import project

_PROJECTIONS = ("attn_qkv.weight", "attn_gate.weight", "ssm_beta.weight", "ssm_alpha.weight")


def build_deltanet(
    b: Builder, hp: HParams, w: LayerWeights, state: State, shape: PassShape, cur: Tensor, il: int
) -> Tensor:
    """Append one DeltaNet mixer: F32 [n_embd, n_rows] in and out.

    Source: mirrors llama.cpp src/models/qwen35moe.cpp build_layer_attn_linear. The state is read in
    place; upstream gathers it first, which copies it once more.
    """
    t, s, n_v, d_v = shape.n_tokens, shape.n_seqs, hp.n_v_heads, hp.head_v_dim

    qkv, z, beta, alpha = project(b, w, _PROJECTIONS, cur)
    qkv = b.name(b.reshape(qkv, hp.conv_dim, t, s), "linear_attn_qkv_mixed", il)
    z = b.name(z, "z", il)
    beta = b.name(b.reshape(beta, 1, n_v, t, s), "beta", il)
    # from here to k, in this order: one kernel on CUDA for few tokens
    beta = b.expand(b.name(b.sigmoid(beta), "beta_sigmoid", il))
    alpha = b.name(b.reshape(alpha, n_v, t, s), "alpha", il)
    softplus = b.name(b.softplus(b.add(alpha, w["ssm_dt.bias"])), "a_softplus", il)
    gate = b.expand(b.name(b.mul(softplus, w["ssm_a"]), "gate", il))  # log of the decay, <= 0
    gate = b.reshape(gate, 1, n_v, t, s)

    conv_input = _conv_input(b, hp, state, shape, qkv, il)
    conv = b.name(b.ssm_conv(conv_input, w["ssm_conv1d.weight"]), "conv_output_raw", il)
    conv = b.name(b.silu(conv), "conv_output_silu", il)
    q, k, v = _split_qkv(b, hp, shape, conv)
    q = b.expand(b.name(_l2_norm(b, q, hp.f_norm_rms_eps), "q_conv_predelta", il))
    k = b.expand(b.name(_l2_norm(b, k, hp.f_norm_rms_eps), "k_conv_predelta", il))
    v = b.name(v, "v_conv_predelta", il)

    out = _delta_rule(b, hp, state, shape, (q, k, v, gate, beta), il)
    out = b.norm(out, w["ssm_norm.weight"], hp.f_norm_rms_eps)
    out = b.mul(out, b.silu(b.reshape(z, d_v, n_v, t, s)))
    out = b.name(b.reshape(out, d_v * n_v, t, s), "final_output", il)
    out = b.name(b.mul_mat(w["ssm_out.weight"], out), "linear_attn_out", il)
    return b.reshape(out, hp.n_embd, t * s)


def _conv_input(
    b: Builder, hp: HParams, state: State, shape: PassShape, qkv: Tensor, il: int
) -> Tensor:
    """Put the last d_conv - 1 columns in front and keep the new last ones.

    Returns F32 [d_conv - 1 + n_tokens, conv_dim, n_seqs].
    """
    kept, row = hp.ssm_d_conv - 1, state.conv[il].nb[1]
    past = b.view(
        state.conv[il], (kept, hp.conv_dim, shape.n_seqs), (4 * kept, row), shape.seq0 * row
    )
    both = b.name(b.concat(past, b.transpose(qkv), 0), "conv_input", il)
    last = b.view(
        both, (kept, hp.conv_dim, shape.n_seqs), (both.nb[1], both.nb[2]), 4 * shape.n_tokens
    )
    slot = b.view(state.conv[il], (kept * hp.conv_dim, shape.n_seqs), (row,), shape.seq0 * row)
    b.expand(b.cpy(last, slot))
    return both


def _split_qkv(
    b: Builder, hp: HParams, shape: PassShape, conv: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """View q, k [head_k_dim, n_k_heads, T, S] and v [head_v_dim, n_v_heads, T, S]."""
    row = 4 * hp.conv_dim
    parts, offset = [], 0
    for d, n in ((hp.head_k_dim, hp.n_k_heads), (hp.head_k_dim, hp.n_k_heads),
                 (hp.head_v_dim, hp.n_v_heads)):
        ne = (d, n, shape.n_tokens, shape.n_seqs)
        parts.append(b.view(conv, ne, (4 * d, row, row * shape.n_tokens), offset))
        offset += 4 * d * n
    return parts[0], parts[1], parts[2]


def _l2_norm(b: Builder, x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum(x^2) + eps), written as rms_norm and scale: one kernel on CUDA."""
    n = x.ne[0]
    return b.scale(b.rms_norm(x, eps / n), 1.0 / math.sqrt(n))


def _delta_rule(
    b: Builder, hp: HParams, state: State, shape: PassShape, operands: tuple[Tensor, ...], il: int
) -> Tensor:
    """Run the recurrence and write the final state back: F32 [head_v_dim, n_v_heads, T, S].

    The copy right behind the op, into a plain view, is what CUDA fuses into an in-place update.
    """
    d, h, t, s = hp.head_v_dim, hp.n_v_heads, shape.n_tokens, shape.n_seqs
    row = state.ssm[il].nb[1]
    before = b.view(
        state.ssm[il], (d, d, h, s), (4 * d, 4 * d * d, row), shape.seq0 * row
    )
    both = b.gated_delta_net(*operands, before)
    out = b.view(both, (d, h, t, s), (4 * d, 4 * d * h, 4 * d * h * t))
    after = b.view(both, (d, d, h, s), (4 * d, 4 * d * d, 4 * d * d * h), 4 * d * h * t * s)
    slot = b.view(state.ssm[il], (d * d * h, s), (row,), shape.seq0 * row)
    b.expand(b.cpy(b.name(after, "new_state", il), slot))
    return b.name(out, "attn_output", il)
