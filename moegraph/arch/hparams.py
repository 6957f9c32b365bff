"""Hyper-parameters of a qwen35moe model: read from GGUF keys, ranges and relations checked.

Names, meanings and defaults are llama.cpp's for this architecture. Keys that llama.cpp ignores here
(expert_weights_scale, attention.scale, the yarn_* keys) are ignored too, so that both programs give
the same results for the same file.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from ..errors import ModelFileError, UnsupportedModel
from ..gguf.metadata import Metadata

ARCH = "qwen35moe"
MAX_LAYERS = 512
MAX_EXPERTS = 1024

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
KEY = {name: f"{ARCH}.{suffix}" for name, suffix in _KEYS.items()}

_MAX_CTX = 1 << 30
_MAX_DIM = 1 << 20
# llama.cpp's defaults; no key of this architecture changes them.
_BETA_FAST, _BETA_SLOW = 32.0, 1.0


@dataclass(frozen=True)
class HParams:
    """What a model's graphs need besides its weights.

    n_layer: layers of a pass. n_layer_nextn: prediction (MTP) blocks after them, which only draft.
    rope_*, n_ctx_orig: arguments of ggml_rope_ext, with scaling applied.

    Source: llama.cpp src/models/qwen35moe.cpp load_arch_hparams, src/llama-context.cpp.
    """

    n_vocab: int
    n_embd: int
    n_layer: int
    n_layer_nextn: int
    n_ctx_train: int
    n_head: int
    n_head_kv: int
    n_embd_head_k: int
    n_embd_head_v: int
    n_rot: int
    n_ff_exp: int
    n_ff_shexp: int
    n_expert: int
    n_expert_used: int
    f_norm_rms_eps: float
    rope_freq_base: float
    rope_freq_scale: float
    rope_ext_factor: float
    rope_attn_factor: float
    rope_beta_fast: float
    rope_beta_slow: float
    n_ctx_orig: int
    ssm_d_conv: int
    ssm_d_inner: int
    ssm_d_state: int
    ssm_dt_rank: int
    ssm_n_group: int
    recurrent: tuple[bool, ...]

    @property
    def head_k_dim(self) -> int:
        """Return the width of a DeltaNet key head."""
        return self.ssm_d_state

    @property
    def head_v_dim(self) -> int:
        """Return the width of a DeltaNet value head."""
        return self.ssm_d_inner // self.ssm_dt_rank

    @property
    def n_k_heads(self) -> int:
        """Return the number of DeltaNet key heads; value head h reads key head h % n_k_heads."""
        return self.ssm_n_group

    @property
    def n_v_heads(self) -> int:
        """Return the number of DeltaNet value heads."""
        return self.ssm_dt_rank

    @property
    def key_dim(self) -> int:
        """Return the width of all DeltaNet key heads together."""
        return self.head_k_dim * self.n_k_heads

    @property
    def value_dim(self) -> int:
        """Return the width of all DeltaNet value heads together."""
        return self.head_v_dim * self.n_v_heads

    @property
    def conv_dim(self) -> int:
        """Return the number of convolution channels: q, k and v side by side."""
        return 2 * self.key_dim + self.value_dim

    @property
    def n_layer_recurrent(self) -> int:
        """Return how many of the n_layer layers are DeltaNet layers."""
        return sum(self.recurrent)

    def is_recurrent(self, il: int) -> bool:
        """Return whether layer il is a DeltaNet layer; prediction blocks have full attention."""
        return il < self.n_layer and self.recurrent[il]


def read_hparams(meta: Metadata, n_vocab: int) -> HParams:
    """Read the hyper-parameters from a header; n_vocab is that of tokenizer and embedding.

    Raises:
        ModelFileError: a key is missing, of the wrong type, out of range, or contradicts another.
        UnsupportedModel: a well-formed variant that moegraph does not run.
    """
    n_embd = meta.integer(KEY["n_embd"], 1, _MAX_DIM)
    n_ctx_train = meta.integer(KEY["n_ctx_train"], 1, _MAX_CTX)
    layers = _layers(meta)
    return HParams(
        n_vocab=n_vocab,
        n_embd=n_embd,
        n_ctx_train=n_ctx_train,
        f_norm_rms_eps=meta.number(KEY["f_norm_rms_eps"], 1e-12, 1.0),
        **layers,
        **_attention(meta, n_embd, layers["n_layer"] + layers["n_layer_nextn"]),
        **_experts(meta, layers["n_layer"] + layers["n_layer_nextn"]),
        **_rope_scaling(meta, n_ctx_train),
        **_delta_net(meta),
    )


def _layers(meta: Metadata) -> dict[str, Any]:
    """Read the block counts and which layers are recurrent."""
    n_all = meta.integer(KEY["n_layer_all"], 1, MAX_LAYERS)
    n_nextn = meta.integer(KEY["n_layer_nextn"], 0, MAX_LAYERS, 0)
    if n_nextn >= n_all:
        raise meta.error(KEY["n_layer_nextn"], f"is {n_nextn}, but there are {n_all} blocks in all")
    n_layer = n_all - n_nextn
    if KEY["recurrent"] in meta:
        flags = meta.integers(KEY["recurrent"], n_all, 0, 1)[:n_layer]
        recurrent = tuple(bool(flag) for flag in flags)
    else:
        interval = meta.integer(KEY["interval"], 1, 1 << 31, 4)
        recurrent = tuple((il + 1) % interval != 0 for il in range(n_layer))
    return {"n_layer": n_layer, "n_layer_nextn": n_nextn, "recurrent": recurrent}


def _uniform(meta: Metadata, name: str, n_all: int, low: int, high: int) -> int:
    """Read one value, or one value per layer; all layers must agree."""
    values = set(meta.integers(KEY[name], n_all, low, high))
    if len(values) > 1:
        raise UnsupportedModel(
            f"{meta.path}: key {KEY[name]} differs between layers ({sorted(values)}); "
            "moegraph needs the same value in all layers"
        )
    return values.pop()


def _attention(meta: Metadata, n_embd: int, n_all: int) -> dict[str, Any]:
    """Read heads, head sizes and the rotated part of a head."""
    n_head = _uniform(meta, "n_head", n_all, 1, 65_536)
    n_head_kv = n_head
    if KEY["n_head_kv"] in meta:
        n_head_kv = _uniform(meta, "n_head_kv", n_all, 1, 65_536)
    if n_head % n_head_kv:
        raise meta.error(KEY["n_head_kv"], f"is {n_head_kv}, which does not divide n_head {n_head}")
    default = max(1, n_embd // n_head)
    head_k = meta.integer(KEY["n_embd_head_k"], 1, 65_536, default)
    head_v = meta.integer(KEY["n_embd_head_v"], 1, 65_536, default)
    if head_k != head_v:
        raise meta.error(
            KEY["n_embd_head_v"],
            f"gives value heads of {head_v} but key heads have {head_k}; "
            "this architecture needs them equal",
        )
    n_rot = meta.integer(KEY["n_rot"], 2, 65_536, head_k)
    if n_rot % 2 or n_rot > head_k:
        raise meta.error(
            KEY["n_rot"],
            f"makes rope rotate {n_rot} of {head_k} dimensions of a head; "
            "it must be even and at most that many",
        )
    _check_sections(meta, n_rot, head_k)
    return {
        "n_head": n_head,
        "n_head_kv": n_head_kv,
        "n_embd_head_k": head_k,
        "n_embd_head_v": head_v,
        "n_rot": n_rot,
    }


def _check_sections(meta: Metadata, n_rot: int, n_embd_head: int) -> None:
    """Check that interleaved M-RoPE of a text position equals plain NEOX rope.

    A text position is equal in the first three of its four components and 0 in the fourth, so
    no rotated pair may take its angle from the fourth.

    Source: llama.cpp ggml/src/ggml-cpu/ops.cpp ggml_mrope_cache_init.
    """
    sections = meta.integers(KEY["sections"], 4, 0, _MAX_DIM)
    total = sum(sections)
    if not any(sections[:3]) or total > n_embd_head:
        raise meta.error(
            KEY["sections"],
            f"is {list(sections)}; the first three cannot all be 0 and the sum "
            f"cannot exceed the head size {n_embd_head}",
        )
    for pair in range(n_rot // 2):
        sector = pair % total
        if sector >= 3 * sections[sector % 3]:
            raise UnsupportedModel(
                f"{meta.path}: key {KEY['sections']} is {list(sections)}, which leaves rotary pair "
                f"{pair} of {n_rot // 2} without a text position; moegraph runs text models"
            )


def _experts(meta: Metadata, n_all: int) -> dict[str, Any]:
    """Read the routed experts and the shared one."""
    n_expert = meta.integer(KEY["n_expert"], 1, MAX_EXPERTS)
    n_used = _uniform(meta, "n_expert_used", n_all, 1, n_expert)
    groups = meta.integer(KEY["n_expert_groups"], 0, MAX_EXPERTS, 0)
    if groups > 1:
        raise UnsupportedModel(
            f"{meta.path}: key {KEY['n_expert_groups']} is {groups}; "
            "moegraph does not run grouped expert selection"
        )
    n_ff = _uniform(meta, "n_ff", n_all, 0, _MAX_DIM) if KEY["n_ff"] in meta else 0
    n_ff_exp = _uniform(meta, "n_ff_exp", n_all, 0, _MAX_DIM) if KEY["n_ff_exp"] in meta else 0
    n_ff_shexp = meta.integer(KEY["n_ff_shexp"], 0, _MAX_DIM, 0)
    sizes = {"n_ff_exp": n_ff_exp or n_ff // n_used, "n_ff_shexp": n_ff_shexp or n_ff}
    for name, size in sizes.items():
        if not size:
            raise ModelFileError(
                f"{meta.path}: key {KEY[name]} is missing or 0 and {KEY['n_ff']} cannot replace it"
            )
    return {"n_expert": n_expert, "n_expert_used": n_used, **sizes}


def _delta_net(meta: Metadata) -> dict[str, Any]:
    """Read the sizes of the gated DeltaNet layers."""
    d_conv = meta.integer(KEY["ssm_d_conv"], 2, 64)
    d_inner = meta.integer(KEY["ssm_d_inner"], 1, _MAX_DIM)
    d_state = meta.integer(KEY["ssm_d_state"], 1, _MAX_DIM)
    dt_rank = meta.integer(KEY["ssm_dt_rank"], 1, _MAX_DIM)
    n_group = meta.integer(KEY["ssm_n_group"], 1, _MAX_DIM)
    if d_inner != dt_rank * d_state:
        raise meta.error(
            KEY["ssm_d_inner"],
            f"is {d_inner}; it must be {dt_rank} value heads "
            f"({KEY['ssm_dt_rank']}) times the state size {d_state} ({KEY['ssm_d_state']})",
        )
    if dt_rank % n_group:
        raise meta.error(
            KEY["ssm_n_group"],
            f"gives {n_group} key heads, "
            f"which do not divide the {dt_rank} value heads ({KEY['ssm_dt_rank']})",
        )
    return {
        "ssm_d_conv": d_conv,
        "ssm_d_inner": d_inner,
        "ssm_d_state": d_state,
        "ssm_dt_rank": dt_rank,
        "ssm_n_group": n_group,
    }


def _rope_scaling(meta: Metadata, n_ctx_train: int) -> dict[str, Any]:
    """Compute the arguments of ggml_rope_ext from the rope keys.

    Source: llama.cpp src/llama-model.cpp load_hparams, src/llama-context.cpp constructor.
    """
    kind = meta.string(KEY["scaling_type"], "linear")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModel(
            f"{meta.path}: key {KEY['scaling_type']} is {kind!r}; "
            "moegraph runs rope scaling none, linear and yarn"
        )
    legacy = meta.number(KEY["scale_linear"], 0.0, 1e6, 0.0)
    factor = meta.number(KEY["scaling_factor"], 0.0, 1e6, legacy)
    if 0.0 < factor < 1e-3:
        raise meta.error(KEY["scaling_factor"], f"is {factor:g}; allowed are 0.001 to 1000000")
    freq_scale = 1.0 if kind == "none" or factor == 0.0 else float(1 / np.float32(factor))
    attn_factor = np.float32(meta.number(KEY["attn_factor"], 1e-6, 1e6, 1.0))
    if kind == "yarn":
        attn_factor *= _yarn_attn_factor(freq_scale)
    n_ctx_orig = meta.integer(KEY["n_ctx_orig"], 0, _MAX_CTX, n_ctx_train)
    return {
        "rope_freq_base": meta.number(KEY["freq_base"], 1.0, 1e12, 10_000.0),
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


def refuse_mtp_alone(path: PathLike[str] | str, names: Collection[str]) -> None:
    """Refuse a file with the tensors of a prediction (MTP) block and not those of its model.

    Raises:
        UnsupportedModel: names has tensors of such a block, and no token embedding.
    """
    if "token_embd.weight" not in names and any(".nextn." in name for name in names):
        raise UnsupportedModel(
            f"{path}: this is a prediction (MTP) block alone; it drafts only as a part of its "
            "model's file (docs/drafting.md)"
        )
