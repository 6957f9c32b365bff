"""Attention over a KV cache: with or without norms of heads, biases, sinks and an output gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import InternalError
from ..base import Architecture, Layer
from ..inputs import Memory, PassInputs, PassShape, Weights, project
from ..tensors import Expected, matrix, vector
from .length import bound, spans

if TYPE_CHECKING:
    from ...ggml.ops import Builder, Tensor

_KV = ("attn_k.weight", "attn_v.weight")


def attention_layer(hp: Architecture) -> Layer:
    """Return what an attention layer keeps."""
    return Layer("attention", kv=(hp.n_embd_head_k * hp.n_head_kv, hp.n_embd_head_v * hp.n_head_kv))


def attention_tensors(
    hp: Architecture, gated: bool = False, varies: bool = False, wide_norms: bool = False
) -> dict[str, Expected]:
    """Return the tensors of an attention mixer; gated: each head of Q has a gate after it.

    varies: files may have biases of Q, K and V, and may have no norms of heads. wide_norms: norms
    of Q and K are over all heads together.
    """
    d = hp.n_embd_head_k
    sizes = {"q": d * hp.n_head, "k": d * hp.n_head_kv, "v": hp.n_embd_head_v * hp.n_head_kv}
    biases = {f"attn_{part}.bias": vector(n, required=False) for part, n in sizes.items()}
    return (biases if varies else {}) | {
        "attn_norm.weight": vector(hp.n_embd),
        "attn_q.weight": matrix(hp.n_embd, (1 + gated) * d * hp.n_head),
        "attn_k.weight": matrix(hp.n_embd, d * hp.n_head_kv),
        "attn_v.weight": matrix(hp.n_embd, hp.n_embd_head_v * hp.n_head_kv),
        "attn_output.weight": matrix(d * hp.n_head, hp.n_embd),
        "attn_q_norm.weight": vector(sizes["q"] if wide_norms else d, required=not varies),
        "attn_k_norm.weight": vector(sizes["k"] if wide_norms else d, required=not varies),
    }


def build_attention(
    b: Builder, hp: Architecture, w: Weights, memory: Memory, inp: PassInputs, shape: PassShape,
    cur: Tensor, il: int,
) -> Tensor:  # fmt: skip
    """Append one attention mixer: F32 [n_embd, n_tokens] in and out.

    If attn_q is wide enough, each head of it has d query elements, then d of a gate of the head's
    output.

    Source: mirrors llama.cpp src/models/qwen35moe.cpp build_layer_attn, and qwen3moe.cpp.
    """
    d, n_head, n_tokens = hp.n_embd_head_k, hp.n_head, cur.ne[1]
    q, k, v = _biased(b, w, project(b, w, ("attn_q.weight", *_KV), cur), "qkv")
    gate = None
    if q.ne[0] > d * n_head:
        q_full = b.name(q, "Qcur_full", il)
        strides = (8 * d, 8 * d * n_head)
        q = b.view(q_full, (d, n_head, n_tokens), strides)
        gate = b.view(q_full, (d, n_head, n_tokens), strides, 4 * d)
        q = _normed(b, hp, w, q, "q", il)
    else:
        q = _normed_heads(b, hp, w, q, "q", il)
    k = _normed_heads(b, hp, w, k, "k", il)
    if gate is not None:
        gate = b.name(b.cont(gate, d * n_head, n_tokens), "gate_reshaped", il)
    v = _value_heads(b, hp, v, il)

    q = b.name(b.rope(q, inp.pos, hp), "Qcur", il)
    k = b.name(b.rope(k, inp.pos, hp), "Kcur", il)

    sinks = w["attn_sinks.weight"] if hp.layer(il).has_sinks else None
    cur = attend(b, hp, memory, inp, shape, (q, k, v), il, sinks)
    if gate is not None:
        cur = b.name(cur, "attn_pregate", il)
        gate = b.name(b.sigmoid(gate), "gate_sigmoid", il)
        cur = b.name(b.mul(cur, gate), "attn_gated", il)
    out = b.mul_mat(w["attn_output.weight"], cur, in_f32=hp.sums_in_f32)
    (out,) = _biased(b, w, [out], ["output"])
    return b.name(out, "attn_output", il)


def build_keys_values(
    b: Builder, hp: Architecture, w: Weights, memory: Memory, pos: Tensor, kv_idx: Tensor,
    cur: Tensor, il: int,
) -> None:  # fmt: skip
    """Append only the writes of K and V of rows F32 [n_embd, n_tokens], as `build_attention` does.

    pos I32 [n_tokens]; kv_idx I64 [n_tokens], rows of the caches.
    """
    k, v = _biased(b, w, project(b, w, _KV, cur), "kv")
    k = b.name(b.rope(_normed_heads(b, hp, w, k, "k", il), pos, hp), "Kcur", il)
    _write(b, memory, *_rotated(b, memory, k, _value_heads(b, hp, v, il), il), kv_idx, il)


def _biased(b: Builder, w: Weights, rows: list[Tensor], parts: Sequence[str]) -> list[Tensor]:
    """Append the biases of projections F32 [m, n_tokens], if any: CUDA fuses them side by side."""
    biases = [f"attn_{part}.bias" for part in parts]
    return [b.expand(b.add(x, w[name])) if name in w else x for x, name in zip(rows, biases)]


def _normed(b: Builder, hp: Architecture, w: Weights, x: Tensor, part: str, il: int) -> Tensor:
    """Append the norm of Q or K over ne0, if there is one."""
    name = f"attn_{part}_norm.weight"
    if name not in w:
        return x
    return b.name(b.norm(x, w[name], hp.f_norm_rms_eps), f"{part.upper()}cur_normed", il)


def _normed_heads(
    b: Builder, hp: Architecture, w: Weights, x: Tensor, part: str, il: int
) -> Tensor:
    """Append heads F32 [d, n_heads, n_tokens] of rows of Q or K, and their norm, if there is one.

    The width of its weights says whether it is over a head or, before that, over a row.
    """
    d, name = hp.n_embd_head_k, f"attn_{part}_norm.weight"
    is_wide = name in w and w[name].ne[0] > d
    if is_wide:
        x = _normed(b, hp, w, x, part, il)
    x = b.reshape(x, d, x.ne[0] // d, x.ne[1])
    return x if is_wide else _normed(b, hp, w, x, part, il)


def _value_heads(b: Builder, hp: Architecture, v: Tensor, il: int) -> Tensor:
    return b.name(b.reshape(v, hp.n_embd_head_v, hp.n_head_kv, v.ne[1]), "Vcur", il)


def _rotated(b: Builder, memory: Memory, k: Tensor, v: Tensor, il: int) -> tuple[Tensor, Tensor]:
    """Append the rotations of quantized K and V."""
    if il in memory.rot_k:
        k = b.mul_mat_hadamard(memory.rot_k[il], k)
    if il in memory.rot_v:
        v = b.mul_mat_hadamard(memory.rot_v[il], v)
    return k, v


def _write(b: Builder, memory: Memory, k: Tensor, v: Tensor, kv_idx: Tensor, il: int) -> None:
    """Append the writes of K and V to rows kv_idx of the caches."""
    # K last: CUDA fuses rope, view and set_rows only if they follow one another
    for t in (v, k):
        b.expand(t)
    write_keys(b, memory, k, kv_idx, il)
    b.expand(b.set_rows(memory.v[il], _merge_heads(b, v), kv_idx))


def write_keys(b: Builder, memory: Memory, k: Tensor, kv_idx: Tensor, il: int) -> None:
    """Append the write of K F32 [d, n_head_kv, n] to rows kv_idx I64 [n] of the cache."""
    b.expand(b.set_rows(memory.k[il], _merge_heads(b, k), kv_idx))


def attend(
    b: Builder, hp: Architecture, memory: Memory, inp: PassInputs, shape: PassShape,
    qkv: tuple[Tensor, Tensor, Tensor], il: int, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Append the writes of K and V to the cache and the attention: F32 [d * n_head, n_tokens].

    hp: with the heads of layer il. qkv: heads of each row, F32 [d, n_head or n_head_kv, n_tokens].
    sinks: of each head, F32 [n_head].
    """
    q, k, v = qkv
    n_spans = len(b.spans)
    window = hp.layer(il).window or 0
    if window:
        if inp.window is None:
            raise InternalError("a pass lacks the inputs of layers with a window")
        inp = inp.window
        if inp.kq_mask is not None:
            shape = shape._replace(n_kv=inp.kq_mask.ne[0])
    if il in memory.rot_k:
        q = b.mul_mat_hadamard(memory.rot_k[il], q)
    k, v = _rotated(b, memory, k, v, il)
    b.expand(q)
    _write(b, memory, k, v, inp.kv_idx, il)

    scale = hp.attention_scale
    if inp.pages is not None and inp.rows is not None:
        out = b.paged_attn(
            q, memory.k[il], memory.v[il], inp.pages, inp.rows, memory.page_size, scale, sinks,
            window,
        )  # fmt: skip
    else:
        out = attend_by_mask(b, hp, memory, inp, shape, q, scale, il, sinks)
    if inp.n_parts is not None:
        bound(b, n_spans, shape.n_kv)
    out = b.expand(out)
    return b.mul_mat_hadamard(memory.rot_v[il], out) if il in memory.rot_v else out


def attend_by_mask(
    b: Builder, hp: Architecture, memory: Memory, inp: PassInputs, shape: PassShape, q: Tensor,
    scale: float, il: int, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Append llama.cpp's attention over a view of the caches, or over the rows gathered from them.

    q F32 [n_embd_head_k, n_head, n_tokens]; returns F32 [n_embd_head_v * n_head, n_tokens].
    """
    if inp.kq_mask is None:
        raise InternalError("a pass has neither pages nor a mask")
    d, n_head, n_seq_tokens, n_seqs = hp.n_embd_head_k, hp.n_head, shape.n_seq_tokens, shape.n_seqs
    if inp.joint:
        q = inp.joint.spread(b, b.reshape(q, d * n_head, q.ne[2]))
        q = b.reshape(q, d, n_head, shape.n_tokens)
    q = b.view(q, (d, n_head, n_seq_tokens, n_seqs), (q.nb[1], q.nb[2], q.nb[2] * n_seq_tokens))
    caches = [(memory.k, memory.k_words)]
    if not hp.layer(il).v_in_k:
        caches.append((memory.v, memory.v_words))
    if inp.kv_rows is None:  # the engine's only sequence: its positions are in order
        rows = [cache[il] for cache, _ in caches]
    else:
        rows = [
            _gathered(b, words[il], inp.kv_rows, cache[il], shape.n_kv) for cache, words in caches
        ]
    out = b.flash_attn(
        b.permute(q, 0, 2, 1, 3),
        _heads(b, hp, shape, rows[0], d),
        _heads(b, hp, shape, rows[-1], hp.n_embd_head_v),
        inp.kq_mask,
        scale,
        memory.n_attention_parts if inp.n_parts is None else inp.n_parts,
        sinks,
    )
    out = b.reshape(out, hp.n_embd_head_v * n_head, n_seq_tokens * n_seqs)
    return inp.joint.gather(b, out) if inp.joint else out


def _merge_heads(b: Builder, t: Tensor) -> Tensor:
    """View [d, n_head_kv, n_tokens] as [d * n_head_kv, n_tokens]; CUDA fuses only a view."""
    return b.view(t, (t.ne[0] * t.ne[1], t.ne[2]), (t.nb[2],))


def _gathered(b: Builder, words: Tensor, rows: Tensor, cache: Tensor, n_kv: int) -> Tensor:
    """Append a copy of rows I32 [n] of a cache, byte for byte: [n_embd_gqa, n], the cache's type.

    words: the cache's memory as F32. n: a multiple of n_kv.
    """
    found = spans(b, n_kv, b.get_rows(words, rows), 1, 2, 3)
    return spans(b, n_kv, b.retype(found, cache.type, cache.ne[0]), 1, 2, 3)


def _heads(b: Builder, hp: Architecture, shape: PassShape, rows: Tensor, d: int) -> Tensor:
    """View the first d elements of heads of the pass's sequences as [d, n_kv, n_head_kv, n_seqs].

    rows: [n_embd_gqa, at least n_kv * n_seqs], first all positions of the first sequence.
    """
    row, n_kv = rows.nb[1], shape.n_kv
    ne = (d, hp.n_head_kv, n_kv, shape.n_seqs)
    heads = b.view(rows, ne, (row // hp.n_head_kv, row, row * n_kv))
    return spans(b, n_kv, b.permute(spans(b, n_kv, heads, 2, 3), 0, 2, 1, 3), 1, 3)
