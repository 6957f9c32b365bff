"""Hyper-parameters from GGUF keys that architectures share: ranges and relations are checked.

Names, meanings and defaults are llama.cpp's. The readers return arguments of `Architecture`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import UnsupportedModel
from ..gguf.metadata import Metadata

MAX_LAYERS = 512
MAX_EXPERTS = 1024
MAX_DIM = 1 << 20

MAX_CTX = 1 << 30
# llama.cpp's defaults; no key changes them.
_BETA_FAST, _BETA_SLOW = 32.0, 1.0


def read_sizes(meta: Metadata, n_vocab: int) -> dict[str, Any]:
    """Read the width, the trained context, and the constant of norms."""
    return {
        "n_vocab": n_vocab,
        "n_embd": meta.integer(".embedding_length", 1, MAX_DIM),
        "n_ctx_train": meta.integer(".context_length", 1, MAX_CTX),
        "f_norm_rms_eps": meta.number(".attention.layer_norm_rms_epsilon", 1e-12, 1.0),
    }


def read_layers(meta: Metadata, has_nextn: bool = False) -> dict[str, Any]:
    """Read the block counts; has_nextn: the family's prediction (MTP) blocks can be run."""
    if not meta.boolean(".attention.causal", True):
        what = "is false; moegraph runs models whose positions attend to earlier ones"
        raise meta.error(".attention.causal", what, UnsupportedModel)
    n_all, key = meta.integer(".block_count", 1, MAX_LAYERS), ".nextn_predict_layers"
    n_nextn = meta.integer(key, 0, n_all - 1, 0)
    if n_nextn and not has_nextn:
        what = f"is {n_nextn}; moegraph does not run prediction (MTP) blocks of these models"
        raise meta.error(key, what, UnsupportedModel)
    return {"n_layer": n_all - n_nextn, "n_layer_nextn": n_nextn}


def uniform(
    meta: Metadata, key: str, n_all: int, low: int, high: int, default: int | None = None
) -> int:
    """Read one value, or one value per layer; all layers must agree."""
    if default is not None and key not in meta:
        return default
    values = set(meta.integers(key, n_all, low, high))
    if len(values) > 1:
        what = f"differs between layers ({sorted(values)}); moegraph needs the same in all layers"
        raise meta.error(key, what, UnsupportedModel)
    return values.pop()


def read_attention(
    meta: Metadata, n_embd: int, n_all: int, rotates_all: bool = False
) -> dict[str, Any]:
    """Read heads, head sizes and the rotated part of a head; rotates_all: it must be a head."""
    n_head = uniform(meta, ".attention.head_count", n_all, 1, 65_536)
    n_head_kv = uniform(meta, ".attention.head_count_kv", n_all, 1, 65_536, n_head)
    if n_head % n_head_kv:
        what = f"is {n_head_kv}, which does not divide n_head {n_head}"
        raise meta.error(".attention.head_count_kv", what)
    head_k = meta.integer(".attention.key_length", 1, 65_536, max(1, n_embd // n_head))
    head_v = meta.integer(".attention.value_length", 1, 65_536, head_k)
    if head_k != head_v:
        what = f"is {head_v} but key heads have {head_k}; this architecture needs them equal"
        raise meta.error(".attention.value_length", what)
    n_rot = meta.integer(".rope.dimension_count", 2, 65_536, head_k)
    if n_rot % 2 or n_rot > head_k:
        raise meta.error(
            ".rope.dimension_count",
            f"makes rope rotate {n_rot} of {head_k} dimensions of a head; "
            "it must be even and at most that many",
        )
    if rotates_all and n_rot != head_k:
        what = f"is {n_rot}; this architecture rotates all {head_k} dimensions of a head"
        raise meta.error(".rope.dimension_count", what)
    return {
        "n_head": n_head,
        "n_head_kv": n_head_kv,
        "n_embd_head_k": head_k,
        "n_embd_head_v": head_v,
        "n_rot": n_rot,
    }


def read_experts(meta: Metadata, n_all: int, shared: bool, grouped: bool = False) -> dict[str, Any]:
    """Read the routed experts; shared: and the shared one. grouped: its router knows groups."""
    n_expert = meta.integer(".expert_count", 1, MAX_EXPERTS)
    n_used = uniform(meta, ".expert_used_count", n_all, 1, n_expert)
    groups = meta.integer(".expert_group_count", 0, MAX_EXPERTS, 0)
    if groups > 1 and not grouped:
        what = f"is {groups}; moegraph does not run grouped expert selection"
        raise meta.error(".expert_group_count", what, UnsupportedModel)
    n_ff = uniform(meta, ".feed_forward_length", n_all, 0, MAX_DIM, 0)
    key = ".expert_feed_forward_length"
    found = {key: uniform(meta, key, n_all, 0, MAX_DIM, 0) or n_ff // n_used}
    if shared:
        key = ".expert_shared_feed_forward_length"
        found[key] = meta.integer(key, 0, MAX_DIM, 0) or n_ff
    for key, size in found.items():
        if not size:
            what = f"is missing or 0 and {meta.full('.feed_forward_length')} cannot replace it"
            raise meta.error(key, what)
    n_ff_exp, n_ff_shexp = (*found.values(), 0)[:2]
    sizes = {"n_ff_exp": n_ff_exp, "n_ff_shexp": n_ff_shexp}
    return {"n_expert": n_expert, "n_expert_used": n_used, **sizes}


def read_plain(meta: Metadata, n_vocab: int) -> dict[str, Any]:
    """Read the hyper-parameters of a model of attention and routed experts in every layer."""
    sizes, layers = read_sizes(meta, n_vocab), read_layers(meta)
    n_layer = layers["n_layer"]
    return {
        **sizes,
        **layers,
        **read_attention(meta, sizes["n_embd"], n_layer, rotates_all=True),
        **read_experts(meta, n_layer, shared=False),
        **read_rope(meta, sizes["n_ctx_train"]),
    }


def read_rope(
    meta: Metadata, n_ctx_train: int, base: float | None = 10_000.0, scales_attn: bool = True
) -> dict[str, Any]:
    """Compute the arguments of ggml_rope_ext from the rope keys.

    base: what rope.freq_base is if the file does not say it; None: it must. scales_attn: YaRN
    scales what it rotates; otherwise the architecture does it elsewhere.

    Source: llama.cpp src/llama-model.cpp load_hparams, src/llama-context.cpp constructor.
    """
    kind = meta.string(".rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        what = f"is {kind[:40]!r}; moegraph runs rope scaling none, linear and yarn"
        raise meta.error(".rope.scaling.type", what, UnsupportedModel)
    legacy = meta.number(".rope.scale_linear", 0.0, 1e6, 0.0)
    factor = meta.number(".rope.scaling.factor", 0.0, 1e6, legacy)
    if 0.0 < factor < 1e-3:
        raise meta.error(".rope.scaling.factor", f"is {factor:g}; allowed are 0.001 to 1000000")
    freq_scale = 1.0 if kind == "none" or factor == 0.0 else float(1 / np.float32(factor))
    attn_factor = np.float32(meta.number(".rope.scaling.attn_factor", 1e-6, 1e6, 1.0))
    if kind == "yarn":
        attn_factor *= _yarn_attn_factor(freq_scale, scales_attn)
    n_ctx_orig = meta.integer(".rope.scaling.original_context_length", 0, MAX_CTX, n_ctx_train)
    return {
        "rope_freq_base": meta.number(".rope.freq_base", 1.0, 1e12, base),
        "rope_freq_scale": freq_scale,
        "rope_ext_factor": 1.0 if kind == "yarn" else 0.0,
        "rope_attn_factor": float(attn_factor),
        "rope_beta_fast": _BETA_FAST,
        "rope_beta_slow": _BETA_SLOW,
        "n_ctx_orig": n_ctx_orig or n_ctx_train,
    }


def _yarn_attn_factor(freq_scale: float, scales_attn: bool) -> np.floating[Any]:
    """Return the magnitude factor for YaRN, in float32 as llama.cpp computes it.

    If ext_factor is not 0, ggml multiplies by 1 + 0.1 ln(1 / freq_scale). This factor divides by
    the same number, so it is 1, up to rounding, for any extended context.
    """
    one, tenth = np.float32(1), np.float32(0.1)
    factor = one / np.float32(freq_scale)
    log = np.float32(math.log(factor))
    mscale = one if factor <= one or not scales_attn else tenth * log + one
    result: np.floating[Any] = mscale * (one / (one + tenth * log))
    return result
