"""DFlash drafters, whatever the format of the file: hyper-parameters, tensors and graph.

A DFlash drafter is a small transformer that proposes a block of tokens at once. It reads outputs of
some layers of the target, fused by one matrix. DSpark is DFlash with a Markov head, which makes
each token of the block depend on the one before, and perhaps a confidence head.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from gguf.constants import GGMLQuantizationType

from ..errors import UnsupportedModel
from ..gguf.tensorfile import TensorInfo
from .dspark import DrafterWeights, DraftResults, HeadMatrix, build_markov
from .tensors import MATRIX_TYPES, VECTOR_TYPES, Expected

if TYPE_CHECKING:
    from ..ggml.ops import Builder, Tensor

MAX_BLOCK = 32
MAX_LAYERS, MAX_TARGET_LAYERS = 128, 64
_FLOATS = frozenset({GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16})


@dataclass(frozen=True)
class RopeParams:
    """Arguments of ggml_rope_ext, with scaling applied; named as in `Architecture`."""

    n_rot: int
    n_ctx_orig: int
    rope_freq_base: float
    rope_freq_scale: float
    rope_ext_factor: float
    rope_attn_factor: float
    rope_beta_fast: float
    rope_beta_slow: float

    @property
    def text(self) -> str:
        """Return how positions are scaled, for people."""
        factor = f"factor {1.0 / self.rope_freq_scale:g}"
        if self.rope_ext_factor:
            return f"YaRN, {factor} of {self.n_ctx_orig} positions"
        return "plain" if self.rope_freq_scale == 1.0 else f"linear, {factor}"


@dataclass(frozen=True)
class DFlashHParams:
    """What a drafter's graphs need besides its weights.

    dialect: the format of the file. n_vocab: tokens of the target; 0 if the file does not say.
    n_vocab_draft: tokens that the drafter can propose; 0 for all. n_embd: width of the target, and
    of the drafter. target_layers: those of the target whose outputs it reads, in the order of the
    inputs of `fc`. mask_id: the token at the places to fill in. block_size: rows of a block, the
    anchor included. is_causal: a row of a block does not see later ones. samples_anchor: row i
    proposes the token after its own place, row 0 the first one; otherwise row i proposes the token
    at its place, and row 0 nothing. n_swa: positions that a layer with a window reaches back; 0 for
    none. sliding: which layers have the window. markov_rank: 0 without a Markov head.
    """

    dialect: str
    n_vocab: int
    n_vocab_draft: int
    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    n_embd_head: int
    n_ff: int
    f_norm_rms_eps: float
    target_layers: tuple[int, ...]
    mask_id: int
    block_size: int
    rope: RopeParams
    is_causal: bool = False
    samples_anchor: bool = False
    n_swa: int = 0
    sliding: tuple[bool, ...] = ()
    markov_rank: int = 0

    @property
    def name(self) -> str:
        """Return "dspark" with a Markov head, else "dflash"."""
        return "dspark" if self.markov_rank else "dflash"

    @property
    def max_draft(self) -> int:
        """Return the most tokens of a draft."""
        return self.block_size if self.samples_anchor else self.block_size - 1

    @property
    def n_embd_gqa(self) -> int:
        """Return the width of K, and of V, of a row."""
        return self.n_embd_head * self.n_head_kv

    def with_window(self, n_swa: int) -> DFlashHParams:
        """Return these, with a window for all layers but the last."""
        sliding = (*(True for _ in range(self.n_layer - 1)), False)
        return replace(self, n_swa=n_swa, sliding=sliding)

    def window(self, il: int) -> int:
        """Return how many positions layer il reaches back, its own included; 0 for all."""
        return self.n_swa if self.sliding[il] else 0


def expected_tensors(hp: DFlashHParams, n_vocab: int) -> dict[str, Expected]:
    """Return a drafter's tensors by llama.cpp's names; n_vocab: tokens of the target.

    Source: llama.cpp src/models/dflash.cpp load_arch_tensors.
    """
    n_draft = hp.n_vocab_draft or n_vocab
    vector, optional = Expected((hp.n_embd,), VECTOR_TYPES | _FLOATS), False
    found = {
        "fc.weight": Expected((len(hp.target_layers) * hp.n_embd, hp.n_embd), MATRIX_TYPES),
        "enc.output_norm.weight": vector,
        "output_norm.weight": vector,
        "token_embd.weight": Expected((hp.n_embd, n_vocab), MATRIX_TYPES, optional),
        "output.weight": Expected((hp.n_embd, n_draft), MATRIX_TYPES, bool(hp.n_vocab_draft)),
    }
    if hp.n_vocab_draft:
        found["d2t"] = Expected((n_draft,), frozenset({GGMLQuantizationType.I64}))
    if hp.markov_rank:
        width = hp.n_embd + hp.markov_rank
        found |= {
            "markov_w1.weight": Expected((hp.markov_rank, n_vocab), MATRIX_TYPES),
            "markov_w2.weight": Expected((hp.markov_rank, n_draft), MATRIX_TYPES),
            "conf_proj.weight": Expected((width, 1), MATRIX_TYPES, optional),
            "conf_proj.bias": Expected((1,), VECTOR_TYPES | _FLOATS, optional),
        }
    for il in range(hp.n_layer):
        found |= {f"blk.{il}.{name}": spec for name, spec in _layer(hp).items()}
    return found


def _layer(hp: DFlashHParams) -> dict[str, Expected]:
    d, n_embd = hp.n_embd_head, hp.n_embd
    shapes = {
        "attn_q": (n_embd, d * hp.n_head),
        "attn_k": (n_embd, hp.n_embd_gqa),
        "attn_v": (n_embd, hp.n_embd_gqa),
        "attn_output": (d * hp.n_head, n_embd),
        "ffn_gate": (n_embd, hp.n_ff),
        "ffn_up": (n_embd, hp.n_ff),
        "ffn_down": (hp.n_ff, n_embd),
    }
    norms = {"attn_norm": n_embd, "ffn_norm": n_embd, "attn_q_norm": d, "attn_k_norm": d}
    return {
        **{f"{name}.weight": Expected(ne, MATRIX_TYPES) for name, ne in shapes.items()},
        **{f"{name}.weight": Expected((n,), VECTOR_TYPES | _FLOATS) for name, n in norms.items()},
    }


def refuse_variant(path: os.PathLike[str], tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse tensors of variants that compute something else; they must not be ignored.

    tensors: by llama.cpp's names.
    """
    variants = {
        "selector_": "DFlash2 drafters",
        "hc_": "DSpark drafters for DeepSeek-V4",
        ".bias": "drafters with biases",
        ".scale": "drafters with per-tensor scales",
        "_sinks": "drafters with attention sinks",
        "post_attention_norm": "drafters with norms after attention",
        "post_ffw_norm": "drafters with norms after the FFN",
        "layer_output_scale": "drafters with scaled layers",
        "rope_freqs": "drafters with rope frequency factors",
        "_conv_": "DFlash2 drafters",
    }
    for name in tensors:
        for part, what in variants.items():
            if part in name and name != "conf_proj.bias":
                raise UnsupportedModel(f"{path}: tensor {name}: moegraph does not run {what}")


class Rings(Protocol):
    """Caches of a drafter's K and V; `resident.draftring.DraftRings` describes them."""

    k: list[Tensor]
    v: list[Tensor]
    kind: list[int]

    def view(self, b: Builder, cache: Tensor, slot: int, il: int, n: int) -> Tensor:
        """Return a view of a sequence's rows of a cache."""


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


def build_context(
    b: Builder, hp: DFlashHParams, w: DrafterWeights, rings: Rings, fused: Tensor, pos: Tensor,
    rows: Sequence[Tensor],
) -> None:  # fmt: skip
    """Append the writes of K and V of tokens that a sequence takes.

    fused: F32 [n_embd, n], sum over target layers of fc times output. pos: I32 [n]. rows: of each
    ring, I32 [n], where the tokens go.

    Source: llama.cpp src/models/dflash.cpp, batches of embeddings.
    """
    cur = b.norm(fused, w.tensors["enc.output_norm.weight"], hp.f_norm_rms_eps)
    for il in range(hp.n_layer):
        k, v = build_keys(b, hp, w, cur, pos, il)
        at = rows[rings.kind[il]]
        for cache, new in ((rings.k[il], k), (rings.v[il], v)):
            b.expand(b.set_rows(cache, new, at))


def build_keys(
    b: Builder, hp: DFlashHParams, w: DrafterWeights, cur: Tensor, pos: Tensor, il: int
) -> tuple[Tensor, Tensor]:
    """Append K and V of rows F32 [n_embd, n]: F32 [n_embd_gqa, n] each."""
    layer, d, n = w.layers[il], hp.n_embd_head, cur.ne[1]
    k = b.reshape(b.mul_mat(layer["attn_k.weight"], cur), d, hp.n_head_kv, n)
    k = b.rope(b.norm(k, layer["attn_k_norm.weight"], hp.f_norm_rms_eps), pos, hp.rope)
    v = b.mul_mat(layer["attn_v.weight"], cur)
    return b.reshape(k, hp.n_embd_gqa, n), v


def build_block(
    b: Builder, hp: DFlashHParams, w: DrafterWeights, embd: Tensor,
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
    b: Builder, hp: DFlashHParams, w: DrafterWeights, cur: Tensor, pos: Tensor, il: int
) -> Tensor:
    """Append the queries of rows F32 [n_embd, n]: F32 [d, n_head, n]."""
    layer, d, n = w.layers[il], hp.n_embd_head, cur.ne[1]
    q = b.reshape(b.mul_mat(layer["attn_q.weight"], cur), d, hp.n_head, n)
    return b.rope(b.norm(q, layer["attn_q_norm.weight"], hp.f_norm_rms_eps), pos, hp.rope)


def _attend(
    b: Builder, hp: DFlashHParams, w: DrafterWeights, rings: Rings, inp: BlockInputs, slot: int,
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
    row = rows.nb[1]
    return b.view(rows, (d, rows.ne[1], n_head), (row, row // n_head))


def build_rows(
    b: Builder, hp: DFlashHParams, w: DrafterWeights, rings: Rings, inp: BlockInputs,
    head: HeadMatrix, slot: int, n_draft: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Append the rows of a block that propose n tokens: F32 [n_embd, n]; and their logits."""
    cur = build_block(b, hp, w, inp.embd, partial(_attend, b, hp, w, rings, inp, slot))
    first = 0 if hp.samples_anchor else 1
    rows = b.view(cur, (hp.n_embd, n_draft), (cur.nb[1],), first * cur.nb[1])
    return rows, b.name(b.mul_mat(head.output, rows), "draft_logits")


def build_outputs(
    b: Builder, hp: DFlashHParams, w: DrafterWeights, rows: Tensor, logits: Tensor,
    anchors: Tensor, head: HeadMatrix, draws: Tensor,
) -> DraftResults:  # fmt: skip
    """Append the results of rows F32 [n_embd, n] that propose tokens, and of their logits.

    anchors: I32 [m], of each sequence. draws: I32 [DRAW_WORDS, n].
    """
    confidence = None
    if hp.markov_rank:
        logits, confidence = build_markov(b, w, logits, rows, anchors, head)
    candidates = b.expand(b.name(b.candidates(logits, draws), "draft_candidates"))
    return [b.output(candidates)], confidence
