"""DFlash drafters as their authors publish them: safetensors and a config.json beside them.

A config is translated to the keys of a GGUF file, and then read and checked as such
(dflashgguf.py). Messages name the config's own keys.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelFileError, UnsupportedModel
from ..gguf.metadata import Metadata
from ..gguf.tensorfile import TensorInfo
from .dflashgguf import ARCHITECTURE
from .hparams import MAX_CTX, MAX_DIM

_DIALECT = "safetensors"
_WINDOWS = ("sliding_attention", "full_attention")
_MAX_CONFIG = 1 << 20
# Integers up to this are exact as floats, and numpy has a type for them.
_MAX_INTEGER = 1 << 53
# GGUF's key after the name of the architecture, and the config's.
_KEYS = {
    ".block_count": "num_hidden_layers",
    ".context_length": "max_position_embeddings",
    ".embedding_length": "hidden_size",
    ".feed_forward_length": "intermediate_size",
    ".vocab_size": "vocab_size",
    ".hidden_activation": "hidden_act",
    ".sample_from_anchor": "sample_from_anchor",
    ".attention.causal": "is_causal",
    ".attention.head_count": "num_attention_heads",
    ".attention.head_count_kv": "num_key_value_heads",
    ".attention.key_length": "head_dim",
    ".attention.layer_norm_rms_epsilon": "rms_norm_eps",
    ".attention.sliding_window": "sliding_window",
    ".attention.sliding_window_pattern": "layer_types",
    ".attention.value_scale": "attention_value_scale",
    ".embedding_scale": "input_embedding_scale",
    ".conv_kernel_size": "conv_kernel_size",
    ".selector_rank": "selector_rank",
    ".dflash.block_size": "block_size",
    ".dflash.mask_token_id": "mask_token_id",
    ".dflash.target_layer_ids": "target_layer_ids",
    ".rope.dimension_count": "partial_rotary_factor",
    ".rope.freq_base": "rope_theta",
    ".rope.scaling.type": "rope_type",
    ".rope.scaling.factor": "factor",
    ".rope.scaling.original_context_length": "original_max_position_embeddings",
    ".rope.scaling.attn_factor": "attention_factor",
    ".rope.scaling.yarn_beta_fast": "beta_fast",
    ".rope.scaling.yarn_beta_slow": "beta_slow",
}
_FLOATS = {
    "attention_factor", "attention_value_scale", "beta_fast", "beta_slow", "factor",
    "input_embedding_scale", "partial_rotary_factor", "rms_norm_eps", "rope_theta",
}  # fmt: skip
# Objects whose values replace those of the object around them, in this order.
_PARTS = (
    "transformer_layer_config", "dflash_config", "rope_parameters", "rope_scaling",
    "full_attention",
)  # fmt: skip
_NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "d2t": "d2t",
}
_LAYER = re.compile(r"layers\.(\d{1,4})\.(.+)")
_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
IGNORED = ("t2d",)


def open_config(path: Path) -> dict[str, Any]:
    """Read a config.json."""
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_CONFIG + 1)
        values = json.loads(raw[:_MAX_CONFIG].decode("utf-8"))
    except OSError as error:
        text = f"{path}: cannot open: {error.strerror}; a drafter in safetensors needs it"
        raise ModelFileError(text) from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not JSON: {type(error).__name__}") from error
    if not isinstance(values, dict):
        raise ModelFileError(f"{path}: not an object")
    return values


def renamed(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors by llama.cpp's names; unknown ones keep theirs."""
    found = {}
    for name, info in tensors.items():
        short = name.removeprefix("model.")
        layer = _LAYER.fullmatch(short)
        if layer and layer[2] in _LAYER_NAMES:
            found[f"blk.{int(layer[1])}.{_LAYER_NAMES[layer[2]]}"] = info
        elif short not in IGNORED:
            found[_NAMES.get(short, short)] = info
    return found


def translated(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> Metadata:
    """Return what a config says as the keys of a GGUF file; tensors: by llama.cpp's names.

    Source: what llama.cpp's conversion/qwen.py (DFlashModel, DSparkModel) makes of a config.
    """
    is_speculators = "transformer_layer_config" in config or "aux_hidden_state_layer_ids" in config
    values: dict[str, Any] = {"block_size": 16, "max_position_embeddings": 32_768}
    values["sample_from_anchor"] = not is_speculators
    _put(values, config)
    for part in _PARTS:
        inner = values.get(part, {})
        if not isinstance(inner, dict):
            raise ModelFileError(f"{path}: {part} is not an object")
        _put(values, inner)
    raw = Metadata(path, values, {})
    _refuse_variants(raw)
    n_vocab = raw.integer("vocab_size", 1, _MAX_INTEGER)
    n_draft = raw.integer("draft_vocab_size", 1, n_vocab, n_vocab)
    if n_draft < n_vocab and "d2t" not in tensors:
        raise raw.error("draft_vocab_size", f"is {n_draft} of {n_vocab}, but there is no d2t")
    values.setdefault("is_causal", raw.boolean("causal", False))
    layers = values.get("aux_hidden_state_layer_ids")
    if layers is not None:  # of the inputs of these layers
        values["target_layer_ids"] = layers - 1 if isinstance(layers, np.ndarray) else layers
    _translate_windows(raw)
    _translate_rope(raw)
    spelled = {f"{_DIALECT}{key}": name for key, name in _KEYS.items()}
    found = {key: values[name] for key, name in spelled.items() if name in values}
    return Metadata(path, {ARCHITECTURE: _DIALECT, **found}, {}, spelled)


def _put(values: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add values as a GGUF file has them, where null is no value."""
    for name, value in more.items():
        if value is None:
            continue
        if name in _FLOATS and type(value) is int and abs(value) <= _MAX_INTEGER:
            value = float(value)
        if isinstance(value, list) and all(
            type(v) in (int, float) and abs(v) <= _MAX_INTEGER for v in value
        ):
            value = np.array(value)
        values[name] = value


def _refuse_variants(raw: Metadata) -> None:
    what = ""
    if raw.boolean("attention_bias", False):
        what = "biased drafters"
    if not raw.boolean("rope_is_neox_style", True):
        what = "interleaved-rope drafters"
    if raw.string("markov_head_type", "vanilla") != "vanilla":
        what = "this markov_head_type, only 'vanilla'"
    if what:
        raise UnsupportedModel(f"{raw.path}: moegraph does not run {what}")


def _translate_windows(raw: Metadata) -> None:
    """Say which layers have a window: all, or what a type for each layer says, or none."""
    values, kinds = raw.values, raw.values.pop("layer_types", None)
    if raw.boolean("use_swa", False):
        key = "swa_window_size" if "swa_window_size" in raw else "sliding_window"
        values["sliding_window"] = raw.integer(key, 1, MAX_CTX)
        return
    if kinds is None or not raw.boolean("use_sliding_window", True):
        values.pop("sliding_window", None)
        return
    if not isinstance(kinds, list) or {*map(str, kinds)} - {*_WINDOWS}:
        raise raw.error("layer_types", f"is not a list of {' and '.join(_WINDOWS)}")
    values["layer_types"] = np.array([kind == _WINDOWS[0] for kind in kinds])


def _translate_rope(raw: Metadata) -> None:
    values = raw.values
    kind = values.setdefault("rope_type", values.get("type", "default"))
    magnitude = raw.number("attention_factor", 0.0, 1e3, 0.0)
    values.pop("attention_factor", None)
    if kind == "default":
        values["rope_type"] = "none"
    if kind in ("linear", "yarn"):
        factor = raw.number("factor", 1e-3, 1e6)
        if kind == "yarn" and magnitude:  # ggml multiplies by the usual one itself
            values["attention_factor"] = magnitude / (0.1 * math.log(max(1.0, factor)) + 1.0)
    share = raw.number("partial_rotary_factor", 1e-3, 1.0, 1.0)
    if share < 1.0:
        n_head = raw.integer("num_attention_heads", 1, 65_536)
        n_each = raw.integer("hidden_size", 1, MAX_DIM) // n_head
        d = raw.integer("head_dim", 2, 65_536, max(2, n_each))
        values["partial_rotary_factor"] = n_rot = int(d * share)
        if n_rot < 2 or n_rot % 2:
            raise raw.error("partial_rotary_factor", f"rotates {n_rot} of {d} dimensions")
    else:
        values.pop("partial_rotary_factor", None)
