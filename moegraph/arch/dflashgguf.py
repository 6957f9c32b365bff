"""DFlash drafters in GGUF files: three dialects, which differ in keys and tensor names.

`dflash` is llama.cpp's. `dflash-draft` and `qwen35-dflash-draft` are those of other programs. Where
`dflash` numbers the layer whose input is tapped, the others number the one whose output is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedModel
from ..gguf.metadata import Metadata
from ..gguf.tensorfile import TensorInfo
from .dflash import MAX_BLOCK, MAX_LAYERS, MAX_TAPS, DFlashHParams, RopeParams, yarn
from .mtp import refuse_mtp_alone

ARCHITECTURE = "general.architecture"
UPSTREAM = "dflash"
DIALECTS = (UPSTREAM, "dflash-draft", "qwen35-dflash-draft")
_MAX_DIM, _MAX_CTX, _MAX_ID = 1 << 20, 1 << 30, 1 << 24
# of the dialects that may not say it
_EPS = 1e-6
_OTHER_NAMES = (
    (re.compile(r"dflash[._]fc\.weight"), "fc.weight"),
    (re.compile(r"dflash[._]hidden_norm\.weight"), "enc.output_norm.weight"),
    (re.compile(r"(blk\.\d+)\.post_attention_norm\.weight"), r"\1.ffn_norm.weight"),
)


def read_dialect(
    meta: Metadata, tensors: Mapping[str, TensorInfo]
) -> tuple[DFlashHParams, dict[str, TensorInfo]]:
    """Read hyper-parameters, and tensors by llama.cpp's names, of a drafter in any dialect."""
    arch = meta.string(ARCHITECTURE)
    refuse_mtp_alone(meta.path, tensors)
    if arch not in DIALECTS:
        raise UnsupportedModel(
            f"{meta.path}: architecture {arch!r} is no DFlash drafter; these are: "
            + ", ".join(DIALECTS)
        )
    keys = _Keys(meta, arch)
    _refuse_variants(keys)
    if arch == UPSTREAM:
        return _read(keys, tensors, _upstream(keys, tensors)), dict(tensors)
    named = {_renamed(name): info for name, info in tensors.items()}
    return _read(keys, named, _others(keys)), named


def _renamed(name: str) -> str:
    """Return llama.cpp's name of a tensor of the other dialects."""
    for pattern, to in _OTHER_NAMES:
        if pattern.fullmatch(name):
            return pattern.sub(to, name)
    return name


class _Keys:
    """Metadata of one architecture: keys without its prefix."""

    def __init__(self, meta: Metadata, arch: str) -> None:
        self.meta, self.arch = meta, arch

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.meta

    def key(self, name: str) -> str:
        return f"{self.arch}.{name}"

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        return self.meta.integer(self.key(name), low, high, default)

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        return self.meta.number(self.key(name), low, high, default)

    def flag(self, name: str, default: bool) -> bool:
        return self.meta.boolean(self.key(name), default)

    def taps(self, name: str, offset: int) -> tuple[int, ...]:
        """Return a list of layers, each plus offset."""
        value = self.meta.values.get(self.key(name))
        n = 1 if value is None or isinstance(value, (int, str)) else len(value)
        if not 1 <= n <= MAX_TAPS:
            raise self.meta.error(self.key(name), f"has {n} layers; allowed are 1 to {MAX_TAPS}")
        found = self.meta.integers(self.key(name), n, 0, MAX_LAYERS * 8)
        if min(found) + offset < 0:
            raise UnsupportedModel(
                f"{self.meta.path}: key {self.key(name)} taps the embeddings of the target; "
                "moegraph taps outputs of layers"
            )
        return tuple(layer + offset for layer in found)


def _refuse_variants(keys: _Keys) -> None:
    for name in ("conv_kernel_size", "selector_rank", "hyper_connection.count"):
        if name in keys and keys.integer(name, 0, _MAX_DIM):
            what = "DSpark for DeepSeek-V4" if name.startswith("hyper") else "DFlash2"
            raise UnsupportedModel(
                f"{keys.meta.path}: key {keys.key(name)}: moegraph does not run {what} drafters"
            )
    for name in ("embedding_scale", "attention.scale", "attention.value_scale"):
        if name in keys and keys.number(name, -1e9, 1e9) not in (0.0, 1.0):
            raise UnsupportedModel(
                f"{keys.meta.path}: key {keys.key(name)}: moegraph runs drafters without it"
            )
    act = keys.meta.string(keys.key("hidden_activation"), "silu")
    if act != "silu":
        raise UnsupportedModel(
            f"{keys.meta.path}: key {keys.key('hidden_activation')} is {act!r}; moegraph runs silu"
        )


def _upstream(keys: _Keys, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """Read what only llama.cpp's dialect spells this way.

    Source: llama.cpp src/models/dflash.cpp, common/speculative.cpp.
    """
    has_markov = "markov_w1.weight" in tensors
    tokens = keys.meta.values.get("tokenizer.ggml.tokens", ())
    return {
        "taps": keys.taps("target_layers", -1),
        "mask_id": keys.meta.integer("tokenizer.ggml.mask_token_id", 0, _MAX_ID),
        "block_size": keys.integer("block_size", 2, MAX_BLOCK, 16),
        "n_vocab": 0 if isinstance(tokens, (int, str)) else len(tokens),
        "samples_anchor": has_markov and keys.flag("sample_from_anchor", True),
        "f_norm_rms_eps": keys.number("attention.layer_norm_rms_epsilon", 1e-12, 1.0),
    }


def _others(keys: _Keys) -> dict[str, Any]:
    """Read what the other dialects spell this way."""
    return {
        "taps": keys.taps("dflash.target_layer_ids", 0),
        "mask_id": keys.integer("dflash.mask_token_id", 0, _MAX_ID),
        "block_size": keys.integer("dflash.block_size", 2, MAX_BLOCK),
        "n_vocab": keys.integer("vocab_size", 0, _MAX_ID, 0),
        "samples_anchor": False,
        "f_norm_rms_eps": keys.number("attention.layer_norm_rms_epsilon", 1e-12, 1.0, _EPS),
    }


def _read(keys: _Keys, tensors: Mapping[str, TensorInfo], spelled: dict[str, Any]) -> DFlashHParams:
    """Read what all dialects spell alike."""
    n_layer = keys.integer("block_count", 1, MAX_LAYERS)
    n_embd = keys.integer("embedding_length", 1, _MAX_DIM)
    n_head = keys.integer("attention.head_count", 1, 65_536)
    n_head_kv = keys.integer("attention.head_count_kv", 1, 65_536, n_head)
    if n_head % n_head_kv:
        name = keys.key("attention.head_count_kv")
        raise keys.meta.error(name, f"is {n_head_kv}, which does not divide {n_head} heads")
    d = keys.integer("attention.key_length", 1, 65_536, max(1, n_embd // n_head))
    keys.integer("attention.value_length", d, d, d)
    n_ctx = keys.integer("context_length", 0, _MAX_CTX, 0)
    n_swa, sliding = _windows(keys, n_layer)
    markov, d2t = tensors.get("markov_w1.weight"), tensors.get("d2t")
    return DFlashHParams(
        dialect=keys.arch, n_vocab_draft=d2t.ne[0] if d2t else 0, n_embd=n_embd, n_layer=n_layer,
        n_head=n_head, n_head_kv=n_head_kv, n_embd_head=d,
        n_ff=keys.integer("feed_forward_length", 1, _MAX_DIM), n_ctx_train=n_ctx,
        rope=_rope(keys, d, n_ctx), is_causal=keys.flag("attention.causal", False), n_swa=n_swa,
        sliding=sliding, markov_rank=markov.ne[0] if markov else 0, **spelled,
    )  # fmt: skip


def _windows(keys: _Keys, n_layer: int) -> tuple[int, tuple[bool, ...]]:
    """Return the window and which layers have it."""
    n_swa = keys.integer("attention.sliding_window", 0, _MAX_CTX, 0)
    name = "attention.sliding_window_pattern"
    if not n_swa or (name not in keys and keys.arch != UPSTREAM):
        return n_swa, (bool(n_swa),) * n_layer
    flags = keys.meta.integers(keys.key(name), n_layer, 0, 1)
    return n_swa, tuple(bool(flag) for flag in flags)


def _rope(keys: _Keys, d: int, n_ctx: int) -> RopeParams:
    """Return the rope of the file."""
    n_rot = keys.integer("rope.dimension_count", 2, d, d)
    if n_rot % 2:
        raise keys.meta.error(keys.key("rope.dimension_count"), f"is {n_rot}, which is odd")
    base = keys.number("rope.freq_base", 1.0, 1e12, 10_000.0 if keys.arch == UPSTREAM else None)
    kind = keys.meta.string(keys.key("rope.scaling.type"), "none")
    factor = keys.number("rope.scaling.factor", 0.0, 1e6, 0.0)
    if kind == "none" or factor == 0.0:
        return RopeParams(n_rot, n_ctx, base)
    if kind == "linear":
        return RopeParams(n_rot, n_ctx, base, 1.0 / factor, text=f"linear, factor {factor:g}")
    if kind != "yarn":
        raise UnsupportedModel(
            f"{keys.meta.path}: key {keys.key('rope.scaling.type')} is {kind!r}; moegraph runs "
            "rope scaling none, linear and yarn"
        )
    n_orig = keys.integer("rope.scaling.original_context_length", 1, _MAX_CTX, n_ctx or None)
    fast = keys.number("rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32.0)
    slow = keys.number("rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1.0)
    return yarn(n_rot, base, n_orig, factor, fast, slow)
