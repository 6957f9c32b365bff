"""A DFlash drafter's graphs: features of the target become K and V, and a block is filled in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ..arch.drafter import DFlashHParams
from ..ggml.lib import C
from ..ggml.ops import Builder, Tensor
from ..resident.draftring import DraftRings
from ..resident.draftweights import DraftWeights
from .dspark import HeadMatrix, build_markov


@dataclass(frozen=True)
class BlockInputs:
    """Inputs of a block of n rows.

    embd F32 [n_embd, n]: of the anchor and of masks. pos I32 [n]. anchor I32 [1]. masks: of each
    ring, F16 [length, n]. draws I32 [DRAW_WORDS, n_draft]: for candidates.
    """

    embd: Tensor
    pos: Tensor
    anchor: Tensor
    masks: Sequence[Tensor]
    draws: Tensor


@dataclass(frozen=True)
class DraftOutputs:
    """Results for each of n drafted tokens.

    candidates: I32 [words, n], see `likeliest_rows`. confidence: F32 [1, n], or None.
    """

    candidates: Tensor
    confidence: Tensor | None


def build_context(
    b: Builder, hp: DFlashHParams, w: DraftWeights, rings: DraftRings, fused: Tensor, pos: Tensor,
    rows: Sequence[Tensor],
) -> None:  # fmt: skip
    """Append the writes of K and V of tokens that a sequence takes.

    fused: F32 [n_embd, n], the sum over taps of fc times the tap. pos: I32 [n]. rows: of each ring,
    I32 [n], where the tokens go.

    Source: llama.cpp src/models/dflash.cpp, batches of embeddings.
    """
    cur = b.norm(fused, w.tensors["enc.output_norm.weight"], hp.f_norm_rms_eps)
    for il in range(hp.n_layer):
        k, v = build_keys(b, hp, w, cur, pos, il)
        at = rows[rings.kind[il]]
        for cache, new in ((rings.k[il], k), (rings.v[il], v)):
            b.expand(b.set_rows(cache, new, at))


def build_keys(
    b: Builder, hp: DFlashHParams, w: DraftWeights, cur: Tensor, pos: Tensor, il: int
) -> tuple[Tensor, Tensor]:
    """Append K and V of rows F32 [n_embd, n]: F32 [n_embd_gqa, n] each."""
    layer, d, n = w.layers[il], hp.n_embd_head, cur.ne[1]
    k = b.reshape(b.mul_mat(layer["attn_k.weight"], cur), d, hp.n_head_kv, n)
    k = b.rope(b.norm(k, layer["attn_k_norm.weight"], hp.f_norm_rms_eps), pos, hp.rope)
    v = b.mul_mat(layer["attn_v.weight"], cur)
    return b.reshape(k, hp.n_embd_gqa, n), v


def build_block(
    b: Builder, hp: DFlashHParams, w: DraftWeights, embd: Tensor,
    attend: Callable[[Tensor, int], Tensor],
) -> Tensor:  # fmt: skip
    """Append the layers over blocks; return their normed rows F32 [n_embd, n].

    embd: F32 [n_embd, n]. attend: appends the attention of a layer: of normed rows, as they are.

    Source: llama.cpp src/models/dflash.cpp, batches of tokens.
    """
    x, eps = embd, hp.f_norm_rms_eps
    for il in range(hp.n_layer):
        layer = w.layers[il]
        cur = b.norm(x, layer["attn_norm.weight"], eps)
        x = b.name(b.add(attend(cur, il), x), "draft_attn", il)
        cur = b.norm(x, layer["ffn_norm.weight"], eps)
        gate = b.mul_mat(layer["ffn_gate.weight"], cur)
        cur = b.swiglu(gate, b.mul_mat(layer["ffn_up.weight"], cur))
        x = b.name(b.add(b.mul_mat(layer["ffn_down.weight"], cur), x), "draft_l_out", il)
    return b.name(b.norm(x, w.tensors["output_norm.weight"], eps), "draft_norm")


def build_queries(
    b: Builder, hp: DFlashHParams, w: DraftWeights, cur: Tensor, pos: Tensor, il: int
) -> Tensor:
    """Append the queries of rows F32 [n_embd, n]: F32 [d, n_head, n]."""
    layer, d, n = w.layers[il], hp.n_embd_head, cur.ne[1]
    q = b.reshape(b.mul_mat(layer["attn_q.weight"], cur), d, hp.n_head, n)
    return b.rope(b.norm(q, layer["attn_q_norm.weight"], hp.f_norm_rms_eps), pos, hp.rope)


def _attend(
    b: Builder, hp: DFlashHParams, w: DraftWeights, rings: DraftRings, inp: BlockInputs, slot: int,
    cur: Tensor, il: int,
) -> Tensor:  # fmt: skip
    """Append the attention of a layer: the block attends to what is held and to itself."""
    d, n = hp.n_embd_head, cur.ne[1]
    q = build_queries(b, hp, w, cur, inp.pos, il)
    k, v = build_keys(b, hp, w, cur, inp.pos, il)
    for cache, new in ((rings.k[il], k), (rings.v[il], v)):
        b.expand(b.cpy(new, rings.view(b, cache, slot, il, n)))
    mask = inp.masks[rings.kind[il]]
    k, v = (
        _by_head(b, rings.view(b, cache, slot, il, mask.ne[0]), d, hp.n_head_kv)
        for cache in (rings.k[il], rings.v[il])
    )
    out = b.flash_attn(b.permute(q, 0, 2, 1, 3), k, v, mask, 1.0 / math.sqrt(d))
    return b.mul_mat(w.layers[il]["attn_output.weight"], b.reshape(out, d * hp.n_head, n))


def _by_head(b: Builder, rows: Tensor, d: int, n_head: int) -> Tensor:
    """View rows [d * n_head, n] as [d, n, n_head]."""
    size, row = C.ggml_row_size(rows.type, d), rows.nb[1]
    return b.view(rows, (d, rows.ne[1], n_head), (row, size))


def build_rows(
    b: Builder, hp: DFlashHParams, w: DraftWeights, rings: DraftRings, inp: BlockInputs,
    head: HeadMatrix, slot: int, n_draft: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Append the rows of a block that propose n tokens: F32 [n_embd, n]; and their logits."""
    cur = build_block(b, hp, w, inp.embd, partial(_attend, b, hp, w, rings, inp, slot))
    first = 0 if hp.samples_anchor else 1
    rows = b.view(cur, (hp.n_embd, n_draft), (cur.nb[1],), first * cur.nb[1])
    return rows, b.name(b.mul_mat(head.output, rows), "draft_logits")


def build_draft(
    b: Builder, hp: DFlashHParams, w: DraftWeights, rings: DraftRings, inp: BlockInputs,
    head: HeadMatrix, slot: int, n_draft: int,
) -> DraftOutputs:  # fmt: skip
    """Append a whole draft of n_draft tokens after the anchor."""
    rows, logits = build_rows(b, hp, w, rings, inp, head, slot, n_draft)
    confidence = None
    if hp.markov_rank:
        logits, confidence = build_markov(b, w, logits, rows, inp.anchor, head)
    candidates = b.expand(b.name(b.candidates(logits, inp.draws), "draft_candidates"))
    C.ggml_set_output(candidates)
    return DraftOutputs(candidates, confidence)
