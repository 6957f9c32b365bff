"""DFlash drafters as their authors publish them: safetensors and a config.json beside them."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ModelFileError, UnsupportedModel
from ..gguf.tensorfile import TensorInfo
from .dflash import MAX_BLOCK, MAX_LAYERS, MAX_TAPS, DFlashHParams, RopeParams, yarn

_MAX_CONFIG = 1 << 20
_MAX_DIM, _MAX_CTX, _MAX_ID = 1 << 20, 1 << 30, 1 << 24
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


class Config:
    """Typed, range-checked access to an object of a config.json."""

    def __init__(self, path: os.PathLike[str], values: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self.values, self._prefix = path, values, prefix

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def error(self, key: str, what: str) -> ModelFileError:
        """Return a ModelFileError that names file and key."""
        return ModelFileError(f"{self.path}: {self._prefix}{key} {what}")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Return an integer in [low, high]."""
        value = self._value(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, f"is {_short(value)}; allowed are integers {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Return a finite number in [low, high]."""
        value = self._value(key, default)
        ok = type(value) in (int, float) and math.isfinite(value) and low <= value <= high
        if not ok:
            raise self.error(key, f"is {_short(value)}; allowed are numbers {low:g} to {high:g}")
        return float(value)

    def text(self, key: str, default: str) -> str:
        """Return a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {_short(value)}; expected a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {_short(value)}; expected true or false")
        return value

    def items(self, key: str, kind: type, most: int) -> list[Any]:
        """Return a list of 1 to `most` values of one type."""
        value = self._value(key, None)
        ok = isinstance(value, list) and all(type(v) is kind for v in value)
        if not ok or not 1 <= len(value) <= most:
            raise self.error(key, f"is {_short(value)}; expected a list of 1 to {most}")
        found: list[Any] = value
        return found

    def part(self, key: str) -> Config:
        """Return an object inside this one; an empty one if there is none."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(key, f"is {_short(value)}; expected an object")
        return Config(self.path, value or {}, f"{self._prefix}{key}.")

    def over(self, other: Config) -> Config:
        """Return the values of both; those of this one count if both have one."""
        own = {key: value for key, value in self.values.items() if value is not None}
        return Config(self.path, {**other.values, **own}, self._prefix)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(key, "is missing")
        return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def open_config(path: Path) -> Config:
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
    return Config(path, values)


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


def read_config(config: Config, tensors: Mapping[str, TensorInfo]) -> DFlashHParams:
    """Read the hyper-parameters; tensors: by llama.cpp's names.

    Source: what llama.cpp's conversion/qwen.py (DFlashModel, DSparkModel) makes of a config.
    """
    is_speculators = "transformer_layer_config" in config or "aux_hidden_state_layer_ids" in config
    config = config.part("transformer_layer_config").over(config)
    dflash = config.part("dflash_config").over(config)
    _refuse_variants(config, dflash)
    n_embd = config.integer("hidden_size", 1, _MAX_DIM)
    n_layer = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    n_head = config.integer("num_attention_heads", 1, 65_536)
    n_head_kv = config.integer("num_key_value_heads", 1, n_head, n_head)
    if n_head % n_head_kv:
        raise config.error("num_key_value_heads", f"is {n_head_kv}, not a divisor of {n_head}")
    d = config.integer("head_dim", 2, 65_536, max(2, n_embd // n_head))
    n_ctx = config.integer("max_position_embeddings", 1, _MAX_CTX, 32_768)
    n_swa, sliding = _windows(config, dflash, n_layer)
    markov = tensors.get("markov_w1.weight")
    return DFlashHParams(
        dialect="safetensors", n_vocab=config.integer("vocab_size", 1, _MAX_ID),
        n_vocab_draft=_n_vocab_draft(config, tensors), n_embd=n_embd, n_layer=n_layer,
        n_head=n_head, n_head_kv=n_head_kv, n_embd_head=d,
        n_ff=config.integer("intermediate_size", 1, _MAX_DIM), n_ctx_train=n_ctx,
        f_norm_rms_eps=config.number("rms_norm_eps", 1e-12, 1.0, 1e-6),
        taps=_taps(config, dflash), mask_id=dflash.integer("mask_token_id", 0, _MAX_ID),
        block_size=dflash.integer("block_size", 2, MAX_BLOCK, 16), rope=_rope(config, d, n_ctx),
        is_causal=config.flag("is_causal", dflash.flag("causal", False)),
        samples_anchor=bool(markov) and config.flag("sample_from_anchor", not is_speculators),
        n_swa=n_swa, sliding=sliding, markov_rank=markov.ne[0] if markov else 0,
    )  # fmt: skip


def _refuse_variants(config: Config, dflash: Config) -> None:
    refused = {
        "DFlash2": "conv_kernel_size" in dflash or "selector_rank" in dflash,
        "biased": config.flag("attention_bias", False),
        "scaled": any(
            key in dflash and dflash.number(key, -1e9, 1e9) not in (0.0, 1.0)
            for key in ("input_embedding_scale", "attention_value_scale")
        ),
        "interleaved-rope": not config.flag("rope_is_neox_style", True),
    }
    for what, is_so in refused.items():
        if is_so:
            raise UnsupportedModel(f"{config.path}: moegraph does not run {what} drafters")
    act = config.text("hidden_act", "silu")
    if act != "silu":
        raise UnsupportedModel(f"{config.path}: hidden_act is {act[:40]!r}; moegraph runs silu")
    head = config.text("markov_head_type", "vanilla")
    if head != "vanilla":
        raise UnsupportedModel(
            f"{config.path}: markov_head_type is {head[:40]!r}; moegraph runs 'vanilla'"
        )


def _taps(config: Config, dflash: Config) -> tuple[int, ...]:
    """Return the layers whose outputs are tapped."""
    key, offset, source = "target_layer_ids", 0, dflash
    if "aux_hidden_state_layer_ids" in config:
        key, offset, source = "aux_hidden_state_layer_ids", -1, config
    layers = [layer + offset for layer in source.items(key, int, MAX_TAPS)]
    if min(layers) < 0 or max(layers) > 8 * MAX_LAYERS:
        raise source.error(key, f"is {layers}; moegraph taps outputs of layers")
    return tuple(layers)


def _windows(config: Config, dflash: Config, n_layer: int) -> tuple[int, tuple[bool, ...]]:
    """Return the window and which layers have it; a type for each layer decides alone."""
    none = 0, (False,) * n_layer
    if dflash.flag("use_swa", False):
        key = "swa_window_size" if "swa_window_size" in dflash else "sliding_window"
        return dflash.integer(key, 1, _MAX_CTX), (True,) * n_layer
    if "sliding_window" not in config or not config.flag("use_sliding_window", True):
        return none
    if "layer_types" not in config:
        return none
    kinds = config.items("layer_types", str, MAX_LAYERS)
    if len(kinds) != n_layer or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise config.error("layer_types", f"is {_short(kinds)} for {n_layer} layers")
    sliding = tuple(kind == "sliding_attention" for kind in kinds)
    return (config.integer("sliding_window", 1, _MAX_CTX), sliding) if any(sliding) else none


def _n_vocab_draft(config: Config, tensors: Mapping[str, TensorInfo]) -> int:
    """Return the size of a reduced vocabulary; 0 for the target's."""
    n_vocab = config.integer("vocab_size", 1, _MAX_ID)
    n_draft = config.integer("draft_vocab_size", 1, n_vocab, n_vocab)
    if n_draft == n_vocab:
        return 0
    if "d2t" not in tensors:
        raise config.error("draft_vocab_size", f"is {n_draft} of {n_vocab}, but there is no d2t")
    return n_draft


def _rope(config: Config, d: int, n_ctx: int) -> RopeParams:
    """Return the rope of the config."""
    rope = config.part("rope_scaling").over(config.part("rope_parameters")).over(config)
    if "full_attention" in rope:
        rope = rope.part("full_attention").over(rope)
    n_rot = int(d * rope.number("partial_rotary_factor", 1e-3, 1.0, 1.0))
    base = rope.number("rope_theta", 1.0, 1e12)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if n_rot < 2 or n_rot % 2:
        raise config.error("partial_rotary_factor", f"rotates {n_rot} of {d} dimensions")
    if kind == "default":
        return RopeParams(n_rot, n_ctx, base)
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(
            f"{config.path}: rope_type is {kind[:40]!r}; moegraph runs default, linear and yarn"
        )
    factor = rope.number("factor", 1e-3, 1e6)
    if kind == "linear":
        return RopeParams(n_rot, n_ctx, base, 1.0 / factor, text=f"linear, factor {factor:g}")
    n_orig = rope.integer("original_max_position_embeddings", 1, _MAX_CTX, n_ctx)
    fast, slow = rope.number("beta_fast", 1e-3, 1e6, 32.0), rope.number("beta_slow", 1e-3, 1e6, 1.0)
    magnitude = rope.number("attention_factor", 0.0, 1e3, 0.0)
    return yarn(n_rot, base, n_orig, factor, fast, slow, magnitude)
