"""Hyper-parameters of DFlash drafters, from GGUF keys in four dialects.

`dflash` is llama.cpp's. `dflash-draft` and `qwen35-dflash-draft` are those of other programs, and
`safetensors` is what dflashhf.py makes of a config.json. Where `dflash` numbers the layer whose
input is read, the others number the one whose output is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import UnsupportedModel
from ..gguf.metadata import Metadata
from ..gguf.tensorfile import TensorInfo
from .dflash import MAX_BLOCK, MAX_LAYERS, MAX_TARGET_LAYERS, DFlashHParams, RopeParams
from .hparams import MAX_CTX, MAX_DIM, read_attention, read_rope
from .mtp import refuse_mtp_alone

ARCHITECTURE = "general.architecture"
UPSTREAM = "dflash"
DIALECTS = (UPSTREAM, "dflash-draft", "qwen35-dflash-draft")
_MAX_ID = 1 << 24
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
    """Read hyper-parameters, and tensors by llama.cpp's names, of a GGUF file in any dialect."""
    arch = meta.string(ARCHITECTURE)
    refuse_mtp_alone(meta.path, tensors)
    if arch not in DIALECTS:
        raise UnsupportedModel(
            f"{meta.path}: architecture {arch!r} is no DFlash drafter; these are: "
            + ", ".join(DIALECTS)
        )
    named = dict(tensors)
    if arch != UPSTREAM:
        named = {_renamed(name): info for name, info in tensors.items()}
    return read_hparams(meta, named), named


def _renamed(name: str) -> str:
    """Return llama.cpp's name of a tensor of the other dialects."""
    for pattern, to in _OTHER_NAMES:
        if pattern.fullmatch(name):
            return pattern.sub(to, name)
    return name


def read_hparams(meta: Metadata, tensors: Mapping[str, TensorInfo]) -> DFlashHParams:
    """Read the hyper-parameters of a drafter; tensors: by llama.cpp's names.

    Source: llama.cpp src/models/dflash.cpp, common/speculative.cpp.
    """
    is_upstream = meta.string(ARCHITECTURE) == UPSTREAM
    _refuse_variants(meta)
    n_layer = meta.integer(".block_count", 1, MAX_LAYERS)
    n_embd = meta.integer(".embedding_length", 1, MAX_DIM)
    heads = read_attention(meta, n_embd, n_layer)
    n_swa, sliding = _windows(meta, n_layer, is_upstream)
    markov, d2t = tensors.get("markov_w1.weight"), tensors.get("d2t")
    if is_upstream:
        target_layers = _target_layers(meta, ".target_layers", -1)
        mask_id = meta.integer("tokenizer.ggml.mask_token_id", 0, _MAX_ID)
        block_size = meta.integer(".block_size", 2, MAX_BLOCK, 16)
        tokens = meta.values.get("tokenizer.ggml.tokens", ())
        n_vocab = 0 if isinstance(tokens, (int, str)) else len(tokens)
    else:
        target_layers = _target_layers(meta, ".dflash.target_layer_ids", 0)
        mask_id = meta.integer(".dflash.mask_token_id", 0, _MAX_ID)
        block_size = meta.integer(".dflash.block_size", 2, MAX_BLOCK)
        n_vocab = meta.integer(".vocab_size", 0, _MAX_ID, 0)
    samples_anchor = meta.boolean(".sample_from_anchor", is_upstream)
    eps = meta.number(
        ".attention.layer_norm_rms_epsilon", 1e-12, 1.0, None if is_upstream else _EPS
    )
    return DFlashHParams(
        dialect=meta.string(ARCHITECTURE), n_vocab=n_vocab, n_vocab_draft=d2t.ne[0] if d2t else 0,
        n_embd=n_embd, n_layer=n_layer, n_head=heads["n_head"], n_head_kv=heads["n_head_kv"],
        n_embd_head=heads["n_embd_head_k"], n_ff=meta.integer(".feed_forward_length", 1, MAX_DIM),
        f_norm_rms_eps=eps, target_layers=target_layers, mask_id=mask_id, block_size=block_size,
        rope=_rope(meta, heads["n_rot"], is_upstream),
        is_causal=meta.boolean(".attention.causal", False),
        samples_anchor=bool(markov) and samples_anchor, n_swa=n_swa, sliding=sliding,
        markov_rank=markov.ne[0] if markov else 0,
    )  # fmt: skip


def _refuse_variants(meta: Metadata) -> None:
    for key in (".conv_kernel_size", ".selector_rank", ".hyper_connection.count"):
        if meta.integer(key, 0, MAX_DIM, 0):
            what = "DSpark for DeepSeek-V4" if key.startswith(".hyper") else "DFlash2"
            what = f"is set; moegraph does not run {what} drafters"
            raise meta.error(key, what, UnsupportedModel)
    for key in (".embedding_scale", ".attention.scale", ".attention.value_scale"):
        if meta.number(key, -1e9, 1e9, 1.0) not in (0.0, 1.0):
            what = "is set; moegraph does not run scaled drafters"
            raise meta.error(key, what, UnsupportedModel)
    act = meta.string(".hidden_activation", "silu")
    if act != "silu":
        what = f"is {act[:40]!r}; moegraph runs silu"
        raise meta.error(".hidden_activation", what, UnsupportedModel)


def _target_layers(meta: Metadata, key: str, offset: int) -> tuple[int, ...]:
    """Return a list of layers, each plus offset."""
    value = meta.values.get(meta.full(key))
    n = 1 if value is None or isinstance(value, (int, str)) else len(value)
    if not 1 <= n <= MAX_TARGET_LAYERS:
        raise meta.error(key, f"has {n} layers; allowed are 1 to {MAX_TARGET_LAYERS}")
    found = meta.integers(key, n, 0, MAX_LAYERS * 8)
    if min(found) + offset < 0:
        what = "reads the embeddings of the target; moegraph reads outputs of layers"
        raise meta.error(key, what, UnsupportedModel)
    return tuple(layer + offset for layer in found)


def _windows(meta: Metadata, n_layer: int, is_upstream: bool) -> tuple[int, tuple[bool, ...]]:
    """Return the window and which layers have it."""
    n_swa = meta.integer(".attention.sliding_window", 0, MAX_CTX, 0)
    key = ".attention.sliding_window_pattern"
    if not n_swa or (key not in meta and not is_upstream):
        return n_swa, (bool(n_swa),) * n_layer
    sliding = tuple(bool(flag) for flag in meta.integers(key, n_layer, 0, 1))
    return n_swa if any(sliding) else 0, sliding


def _rope(meta: Metadata, n_rot: int, is_upstream: bool) -> RopeParams:
    n_ctx = meta.integer(".context_length", 0, MAX_CTX, 0)
    found = read_rope(meta, n_ctx, 10_000.0 if is_upstream else None) | {
        "rope_beta_fast": meta.number(".rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32.0),
        "rope_beta_slow": meta.number(".rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1.0),
    }
    if found["rope_ext_factor"] and not found["n_ctx_orig"]:
        raise meta.error(".rope.scaling.original_context_length", "is missing, and YaRN needs it")
    return RopeParams(n_rot, **found)
