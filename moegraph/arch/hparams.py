"""Hyper-parameters from GGUF keys that architectures share: ranges and relations are checked.

Names, meanings and defaults are llama.cpp's. The readers return arguments of `Architecture`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import ModelFileError, UnsupportedModel
from ..gguf.metadata import Metadata

MAX_LAYERS = 512
MAX_EXPERTS = 1024
MAX_DIM = 1 << 20

_KEYS = {
    "n_layer_all": "block_count",
    "n_layer_nextn": "nextn_predict_layers",
    "n_ctx_train": "context_length",
    "n_embd": "embedding_length",
    "n_ff": "feed_forward_length",
    "n_expert": "expert_count",
    "n_expert_used": "expert_used_count",
    "n_expert_groups": "expert_group_count",
    "n_ff_exp": "expert_feed_forward_length",
    "n_ff_shexp": "expert_shared_feed_forward_length",
    "n_head": "attention.head_count",
    "n_head_kv": "attention.head_count_kv",
    "n_embd_head_k": "attention.key_length",
    "n_embd_head_v": "attention.value_length",
    "f_norm_rms_eps": "attention.layer_norm_rms_epsilon",
    "recurrent": "attention.recurrent_layers",
    "interval": "full_attention_interval",
    "n_rot": "rope.dimension_count",
    "sections": "rope.dimension_sections",
    "freq_base": "rope.freq_base",
    "scale_linear": "rope.scale_linear",
    "scaling_type": "rope.scaling.type",
    "scaling_factor": "rope.scaling.factor",
    "attn_factor": "rope.scaling.attn_factor",
    "n_ctx_orig": "rope.scaling.original_context_length",
    "ssm_d_conv": "ssm.conv_kernel",
    "ssm_d_inner": "ssm.inner_size",
    "ssm_d_state": "ssm.state_size",
    "ssm_dt_rank": "ssm.time_step_rank",
    "ssm_n_group": "ssm.group_count",
}

_MAX_CTX = 1 << 30
# llama.cpp's defaults; no key changes them.
_BETA_FAST, _BETA_SLOW = 32.0, 1.0


def key(meta: Metadata, name: str) -> str:
    """Return the key of a hyper-parameter, of the architecture that the file names."""
    return f"{meta.string('general.architecture')}.{_KEYS[name]}"


def read_sizes(meta: Metadata, n_vocab: int) -> dict[str, Any]:
    """Read the width, the trained context, and the constant of norms."""
    return {
        "n_vocab": n_vocab,
        "n_embd": meta.integer(key(meta, "n_embd"), 1, MAX_DIM),
        "n_ctx_train": meta.integer(key(meta, "n_ctx_train"), 1, _MAX_CTX),
        "f_norm_rms_eps": meta.number(key(meta, "f_norm_rms_eps"), 1e-12, 1.0),
    }


def _uniform(meta: Metadata, name: str, n_all: int, low: int, high: int) -> int:
    """Read one value, or one value per layer; all layers must agree."""
    values = set(meta.integers(key(meta, name), n_all, low, high))
    if len(values) > 1:
        raise UnsupportedModel(
            f"{meta.path}: key {key(meta, name)} differs between layers ({sorted(values)}); "
            "moegraph needs the same value in all layers"
        )
    return values.pop()


def read_attention(meta: Metadata, n_embd: int, n_all: int) -> dict[str, Any]:
    """Read heads, head sizes and the rotated part of a head."""
    n_head = _uniform(meta, "n_head", n_all, 1, 65_536)
    n_head_kv = n_head
    if key(meta, "n_head_kv") in meta:
        n_head_kv = _uniform(meta, "n_head_kv", n_all, 1, 65_536)
    if n_head % n_head_kv:
        what = f"is {n_head_kv}, which does not divide n_head {n_head}"
        raise meta.error(key(meta, "n_head_kv"), what)
    default = max(1, n_embd // n_head)
    head_k = meta.integer(key(meta, "n_embd_head_k"), 1, 65_536, default)
    head_v = meta.integer(key(meta, "n_embd_head_v"), 1, 65_536, default)
    if head_k != head_v:
        raise meta.error(
            key(meta, "n_embd_head_v"),
            f"gives value heads of {head_v} but key heads have {head_k}; "
            "this architecture needs them equal",
        )
    n_rot = meta.integer(key(meta, "n_rot"), 2, 65_536, head_k)
    if n_rot % 2 or n_rot > head_k:
        raise meta.error(
            key(meta, "n_rot"),
            f"makes rope rotate {n_rot} of {head_k} dimensions of a head; "
            "it must be even and at most that many",
        )
    return {
        "n_head": n_head,
        "n_head_kv": n_head_kv,
        "n_embd_head_k": head_k,
        "n_embd_head_v": head_v,
        "n_rot": n_rot,
    }


def read_experts(meta: Metadata, n_all: int, shared: bool) -> dict[str, Any]:
    """Read the routed experts; shared: and the shared one."""
    n_expert = meta.integer(key(meta, "n_expert"), 1, MAX_EXPERTS)
    n_used = _uniform(meta, "n_expert_used", n_all, 1, n_expert)
    groups = meta.integer(key(meta, "n_expert_groups"), 0, MAX_EXPERTS, 0)
    if groups > 1:
        raise UnsupportedModel(
            f"{meta.path}: key {key(meta, 'n_expert_groups')} is {groups}; "
            "moegraph does not run grouped expert selection"
        )
    n_ff = _uniform(meta, "n_ff", n_all, 0, MAX_DIM) if key(meta, "n_ff") in meta else 0
    n_ff_exp = _uniform(meta, "n_ff_exp", n_all, 0, MAX_DIM) if key(meta, "n_ff_exp") in meta else 0
    sizes = {"n_ff_exp": n_ff_exp or n_ff // n_used}
    if shared:
        sizes["n_ff_shexp"] = meta.integer(key(meta, "n_ff_shexp"), 0, MAX_DIM, 0) or n_ff
    for name, size in sizes.items():
        if not size:
            raise ModelFileError(
                f"{meta.path}: key {key(meta, name)} is missing or 0 and {key(meta, 'n_ff')} "
                "cannot replace it"
            )
    return {"n_expert": n_expert, "n_expert_used": n_used, "n_ff_shexp": 0, **sizes}


def read_rope(meta: Metadata, n_ctx_train: int) -> dict[str, Any]:
    """Compute the arguments of ggml_rope_ext from the rope keys.

    Source: llama.cpp src/llama-model.cpp load_hparams, src/llama-context.cpp constructor.
    """
    kind = meta.string(key(meta, "scaling_type"), "linear")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModel(
            f"{meta.path}: key {key(meta, 'scaling_type')} is {kind!r}; "
            "moegraph runs rope scaling none, linear and yarn"
        )
    legacy = meta.number(key(meta, "scale_linear"), 0.0, 1e6, 0.0)
    factor = meta.number(key(meta, "scaling_factor"), 0.0, 1e6, legacy)
    if 0.0 < factor < 1e-3:
        raise meta.error(
            key(meta, "scaling_factor"), f"is {factor:g}; allowed are 0.001 to 1000000"
        )
    freq_scale = 1.0 if kind == "none" or factor == 0.0 else float(1 / np.float32(factor))
    attn_factor = np.float32(meta.number(key(meta, "attn_factor"), 1e-6, 1e6, 1.0))
    if kind == "yarn":
        attn_factor *= _yarn_attn_factor(freq_scale)
    n_ctx_orig = meta.integer(key(meta, "n_ctx_orig"), 0, _MAX_CTX, n_ctx_train)
    return {
        "rope_freq_base": meta.number(key(meta, "freq_base"), 1.0, 1e12, 10_000.0),
        "rope_freq_scale": freq_scale,
        "rope_ext_factor": 1.0 if kind == "yarn" else 0.0,
        "rope_attn_factor": float(attn_factor),
        "rope_beta_fast": _BETA_FAST,
        "rope_beta_slow": _BETA_SLOW,
        "n_ctx_orig": n_ctx_orig or n_ctx_train,
    }


def _yarn_attn_factor(freq_scale: float) -> np.floating[Any]:
    """Return the magnitude factor for YaRN, in float32 as llama.cpp computes it.

    If ext_factor is not 0, ggml multiplies by 1 + 0.1 ln(1 / freq_scale). This factor divides by
    the same number, so it is 1, up to rounding, for any extended context.
    """
    one, tenth = np.float32(1), np.float32(0.1)
    factor = one / np.float32(freq_scale)
    log = np.float32(math.log(factor))
    mscale = one if factor <= one else tenth * log + one
    result: np.floating[Any] = mscale * (one / (one + tenth * log))
    return result
