"""Full attention over a KV cache, with an output gate."""

from __future__ import annotations

import math

from ..ggml.lib import C
from ..ggml.ops import Builder, Tensor
from ..modelfile.hparams import HParams
from ..resident.state import State
from ..resident.weights import LayerWeights
from .inputs import PassInputs, PassShape
from .project import project


def build_attention(
    b: Builder,
    hp: HParams,
    w: LayerWeights,
    state: State,
    inp: PassInputs,
    shape: PassShape,
    cur: Tensor,
    il: int,
) -> Tensor:
    """Append one full-attention mixer: F32 [n_embd, n_tokens] in and out.

    Source: mirrors llama.cpp src/models/qwen35moe.cpp build_layer_attn.
    """
    d, n_head, n_head_kv, n_tokens = hp.n_embd_head_k, hp.n_head, hp.n_head_kv, shape.n_tokens

    q_full, k, v = project(b, w, ("attn_q.weight", "attn_k.weight", "attn_v.weight"), cur)
    q_full = b.name(q_full, "Qcur_full", il)

    # each head of q_full: d query elements, then d gate elements
    strides = (8 * d, 8 * d * n_head)
    q = b.view(q_full, (d, n_head, n_tokens), strides)
    q = b.name(b.norm(q, w["attn_q_norm.weight"], hp.f_norm_rms_eps), "Qcur_normed", il)
    k = b.reshape(k, d, n_head_kv, n_tokens)
    k = b.name(b.norm(k, w["attn_k_norm.weight"], hp.f_norm_rms_eps), "Kcur_normed", il)
    gate = b.view(q_full, (d, n_head, n_tokens), strides, 4 * d)
    gate = b.name(b.cont(gate, d * n_head, n_tokens), "gate_reshaped", il)
    v = b.name(b.reshape(v, d, n_head_kv, n_tokens), "Vcur", il)

    q = b.name(b.rope(q, inp.pos, hp), "Qcur", il)
    k = b.name(b.rope(k, inp.pos, hp), "Kcur", il)

    cur = _attend(b, hp, state, inp, shape, (q, k, v), il)
    cur = b.name(cur, "attn_pregate", il)
    gate = b.name(b.sigmoid(gate), "gate_sigmoid", il)
    cur = b.name(b.mul(cur, gate), "attn_gated", il)
    return b.name(b.mul_mat(w["attn_output.weight"], cur), "attn_output", il)


def _attend(
    b: Builder,
    hp: HParams,
    state: State,
    inp: PassInputs,
    shape: PassShape,
    qkv: tuple[Tensor, Tensor, Tensor],
    il: int,
) -> Tensor:
    """Append the writes of K and V to the cache and the attention: F32 [d * n_head, n_tokens]."""
    q, k, v = qkv
    if state.rot_k is not None:
        q = b.mul_mat_hadamard(state.rot_k, q)
        k = b.mul_mat_hadamard(state.rot_k, k)
    if state.rot_v is not None:
        v = b.mul_mat_hadamard(state.rot_v, v)
    # K last: CUDA fuses rope, view and set_rows only if they follow one another
    for t in (q, v, k):
        b.expand(t)
    b.expand(b.set_rows(state.k[il], _merge_heads(b, k), inp.kv_idx))
    b.expand(b.set_rows(state.v[il], _merge_heads(b, v), inp.kv_idx))

    d, n_head, n_seq_tokens, n_seqs = hp.n_embd_head_k, hp.n_head, shape.n_seq_tokens, shape.n_seqs
    q = b.view(q, (d, n_head, n_seq_tokens, n_seqs), (q.nb[1], q.nb[2], q.nb[2] * n_seq_tokens))
    out = b.flash_attn(
        b.permute(q, 0, 2, 1, 3),
        b.permute(_cached(b, hp, state, shape, state.k[il]), 0, 2, 1, 3),
        b.permute(_cached(b, hp, state, shape, state.v[il]), 0, 2, 1, 3),
        inp.kq_mask,
        1.0 / math.sqrt(d),
        state.n_attention_parts,
    )
    out = b.expand(b.reshape(out, d * n_head, n_seq_tokens * n_seqs))
    return out if state.rot_v is None else b.mul_mat_hadamard(state.rot_v, out)


def _merge_heads(b: Builder, t: Tensor) -> Tensor:
    """View [d, n_head_kv, n_tokens] as [d * n_head_kv, n_tokens]; CUDA fuses only a view."""
    return b.view(t, (t.ne[0] * t.ne[1], t.ne[2]), (t.nb[2],))


def _cached(b: Builder, hp: HParams, state: State, shape: PassShape, cache: Tensor) -> Tensor:
    """View the first n_kv positions of the pass's sequences: [d, n_head_kv, n_kv, n_seqs]."""
    d, row = hp.n_embd_head_k, cache.nb[1]
    head = C.ggml_row_size(cache.type, d)
    return b.view(
        cache,
        (d, hp.n_head_kv, shape.n_kv, shape.n_seqs),
        (head, row, row * state.n_ctx),
        row * state.n_ctx * shape.seq0,
    )
