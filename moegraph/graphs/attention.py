"""Full attention over a KV cache, with an output gate."""

from __future__ import annotations

import math

from ..arch.hparams import HParams
from ..errors import InternalError
from ..ggml.lib import C
from ..ggml.ops import Builder, Tensor
from ..resident.layout import PAGE
from ..resident.state import State
from ..resident.weights import LayerWeights
from .inputs import PassInputs, PassShape
from .joint import gather, spread
from .length import spans
from .project import project

_KV = ("attn_k.weight", "attn_v.weight")


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
    d, n_head, n_tokens = hp.n_embd_head_k, hp.n_head, cur.ne[1]

    q_full, k, v = project(b, w, ("attn_q.weight", *_KV), cur)
    q_full = b.name(q_full, "Qcur_full", il)

    # each head of q_full: d query elements, then d gate elements
    strides = (8 * d, 8 * d * n_head)
    q = b.view(q_full, (d, n_head, n_tokens), strides)
    q = b.name(b.norm(q, w["attn_q_norm.weight"], hp.f_norm_rms_eps), "Qcur_normed", il)
    k = _normed_keys(b, hp, w, k, il)
    gate = b.view(q_full, (d, n_head, n_tokens), strides, 4 * d)
    gate = b.name(b.cont(gate, d * n_head, n_tokens), "gate_reshaped", il)
    v = _value_heads(b, hp, v, il)

    q = b.name(b.rope(q, inp.pos, hp), "Qcur", il)
    k = b.name(b.rope(k, inp.pos, hp), "Kcur", il)

    cur = _attend(b, hp, state, inp, shape, (q, k, v), il)
    cur = b.name(cur, "attn_pregate", il)
    gate = b.name(b.sigmoid(gate), "gate_sigmoid", il)
    cur = b.name(b.mul(cur, gate), "attn_gated", il)
    return b.name(b.mul_mat(w["attn_output.weight"], cur), "attn_output", il)


def build_keys_values(
    b: Builder, hp: HParams, w: LayerWeights, state: State, pos: Tensor, kv_idx: Tensor,
    cur: Tensor, il: int,
) -> None:  # fmt: skip
    """Append only the writes of K and V of rows F32 [n_embd, n_tokens], as `build_attention` does.

    pos I32 [n_tokens]; kv_idx I64 [n_tokens], rows of the caches.
    """
    k, v = project(b, w, _KV, cur)
    k = b.name(b.rope(_normed_keys(b, hp, w, k, il), pos, hp), "Kcur", il)
    _write(b, state, *_rotated(b, state, k, _value_heads(b, hp, v, il)), kv_idx, il)


def _normed_keys(b: Builder, hp: HParams, w: LayerWeights, k: Tensor, il: int) -> Tensor:
    """Append the norm of the heads of K: F32 [d, n_head_kv, n_tokens]."""
    k = b.reshape(k, hp.n_embd_head_k, hp.n_head_kv, k.ne[1])
    return b.name(b.norm(k, w["attn_k_norm.weight"], hp.f_norm_rms_eps), "Kcur_normed", il)


def _value_heads(b: Builder, hp: HParams, v: Tensor, il: int) -> Tensor:
    return b.name(b.reshape(v, hp.n_embd_head_v, hp.n_head_kv, v.ne[1]), "Vcur", il)


def _rotated(b: Builder, state: State, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Append the rotations of quantized K and V."""
    if state.rot_k is not None:
        k = b.mul_mat_hadamard(state.rot_k, k)
    if state.rot_v is not None:
        v = b.mul_mat_hadamard(state.rot_v, v)
    return k, v


def _write(b: Builder, state: State, k: Tensor, v: Tensor, kv_idx: Tensor, il: int) -> None:
    """Append the writes of K and V to rows kv_idx of the caches."""
    # K last: CUDA fuses rope, view and set_rows only if they follow one another
    for t in (v, k):
        b.expand(t)
    b.expand(b.set_rows(state.k[il], _merge_heads(b, k), kv_idx))
    b.expand(b.set_rows(state.v[il], _merge_heads(b, v), kv_idx))


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
    k, v = _rotated(b, state, k, v)
    b.expand(q)
    _write(b, state, k, v, inp.kv_idx, il)

    scale = 1.0 / math.sqrt(hp.n_embd_head_k)
    if inp.pages is not None and inp.rows is not None:
        out = b.paged_attn(q, state.k[il], state.v[il], inp.pages, inp.rows, PAGE, scale)
    else:
        out = _attend_by_mask(b, hp, state, inp, shape, q, scale, il)
    out = b.expand(out)
    return out if state.rot_v is None else b.mul_mat_hadamard(state.rot_v, out)


def _attend_by_mask(
    b: Builder, hp: HParams, state: State, inp: PassInputs, shape: PassShape, q: Tensor,
    scale: float, il: int,
) -> Tensor:  # fmt: skip
    """Append llama.cpp's attention over a view of the caches, or over the rows gathered from them.

    q F32 [d, n_head, n_tokens]; returns F32 [d * n_head, n_tokens].
    """
    if inp.kq_mask is None:
        raise InternalError("a pass has neither pages nor a mask")
    d, n_head, n_seq_tokens, n_seqs = hp.n_embd_head_k, hp.n_head, shape.n_seq_tokens, shape.n_seqs
    if inp.joint:
        q = spread(b, b.reshape(q, d * n_head, q.ne[2]), inp.joint)
        q = b.reshape(q, d, n_head, shape.n_tokens)
    q = b.view(q, (d, n_head, n_seq_tokens, n_seqs), (q.nb[1], q.nb[2], q.nb[2] * n_seq_tokens))
    if inp.kv_rows is None:  # the engine's only sequence: its positions are in order
        cached_k, cached_v = state.k[il], state.v[il]
    else:
        cached_k = _gathered(b, state.k_words[il], inp.kv_rows, state.k[il], shape.n_kv)
        cached_v = _gathered(b, state.v_words[il], inp.kv_rows, state.v[il], shape.n_kv)
    out = b.flash_attn(
        b.permute(q, 0, 2, 1, 3),
        _heads(b, hp, shape, cached_k),
        _heads(b, hp, shape, cached_v),
        inp.kq_mask,
        scale,
        state.n_attention_parts,
    )
    out = b.reshape(out, d * n_head, n_seq_tokens * n_seqs)
    return gather(b, out, inp.joint) if inp.joint else out


def _merge_heads(b: Builder, t: Tensor) -> Tensor:
    """View [d, n_head_kv, n_tokens] as [d * n_head_kv, n_tokens]; CUDA fuses only a view."""
    return b.view(t, (t.ne[0] * t.ne[1], t.ne[2]), (t.nb[2],))


def _gathered(b: Builder, words: Tensor, rows: Tensor, cache: Tensor, n_kv: int) -> Tensor:
    """Append a copy of rows I32 [n] of a cache, byte for byte: [n_embd_gqa, n], the cache's type.

    words: the cache's memory as F32. n: a multiple of n_kv.
    """
    found = spans(b, n_kv, b.get_rows(words, rows), 1, 2, 3)
    return spans(b, n_kv, b.retype(found, cache.type, cache.ne[0]), 1, 2, 3)


def _heads(b: Builder, hp: HParams, shape: PassShape, rows: Tensor) -> Tensor:
    """View rows of the pass's sequences as [d, n_kv, n_head_kv, n_seqs].

    rows: [n_embd_gqa, at least n_kv * n_seqs], first all positions of the first sequence.
    """
    d, row, n_kv = hp.n_embd_head_k, rows.nb[1], shape.n_kv
    ne = (d, hp.n_head_kv, n_kv, shape.n_seqs)
    heads = b.view(rows, ne, (C.ggml_row_size(rows.type, d), row, row * n_kv))
    return spans(b, n_kv, b.permute(spans(b, n_kv, heads, 2, 3), 0, 2, 1, 3), 1, 3)
