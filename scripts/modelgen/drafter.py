"""Synthetic DFlash and DSpark drafters of any shape, in every file format that moegraph reads."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from .gguf_write import Bytes, Keys, TensorEntry, write_gguf
from .vocab import vocabulary

Array = npt.NDArray[Any]
FORMATS = ("dflash", "dflash-draft", "qwen35-dflash-draft", "safetensors")


@dataclass(frozen=True)
class DraftShape:
    """The hyper-parameters of a drafter; the defaults are those of 35B-A3B's current revision.

    windows: a letter for each layer, s(liding) or f(ull). target_layers: those whose outputs
    it reads. n_vocab_draft: 0 for the target's vocabulary. markov_rank: 0 for DFlash, else DSpark.
    """

    n_vocab: int = 248320
    n_embd: int = 2048
    windows: str = "sssssf"
    n_head: int = 32
    n_head_kv: int = 8
    head_dim: int = 128
    n_ff: int = 6144
    n_ctx_train: int = 262144
    n_swa: int = 4096
    target_layers: tuple[int, ...] = (1, 6, 11, 16, 22, 27, 32, 37)
    mask_id: int = 248077
    block_size: int = 16
    is_causal: bool = False
    rope_freq_base: float = 1e7
    yarn_factor: float = 0.0
    yarn_orig: int = 4096
    f_norm_rms_eps: float = 1e-6
    n_vocab_draft: int = 0
    markov_rank: int = 0
    has_confidence: bool = True
    samples_anchor: bool = True
    has_embedding: bool = False  # of its own; it is the head too

    @property
    def n_layer(self) -> int:
        return len(self.windows)


# Both published revisions of the drafter of Qwen3.6-35B-A3B, DSpark of that shape, and drafters for
# half of its layers and for make_model.py's mini35b.
PRESETS = {
    "35b-current": DraftShape(),
    "35b-april": DraftShape(
        windows="f" * 8, n_head_kv=4, n_swa=0, target_layers=(1, 10, 19, 28, 37), mask_id=248070,
        yarn_factor=64.0,
    ),
    "35b-dspark": DraftShape(windows="fffff", n_swa=0, block_size=7, markov_rank=256),
    "half": DraftShape(target_layers=(1, 3, 6, 8, 11, 13, 16, 18)),
    "mini": DraftShape(
        n_vocab=1024, n_embd=512, windows="sf", n_head=4, n_head_kv=2, head_dim=64, n_ff=256,
        n_ctx_train=65536, n_swa=128, target_layers=(0, 1, 2), mask_id=1023, block_size=8,
    ),
}  # fmt: skip


def tensor_shapes(s: DraftShape) -> dict[str, tuple[int, ...]]:
    """Return the tensors, by llama.cpp's names, in ggml order."""
    q, kv = s.head_dim * s.n_head, s.head_dim * s.n_head_kv
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (len(s.target_layers) * s.n_embd, s.n_embd),
        "enc.output_norm.weight": (s.n_embd,),
        "output_norm.weight": (s.n_embd,),
    }
    for il in range(s.n_layer):
        found |= {
            f"blk.{il}.attn_norm.weight": (s.n_embd,),
            f"blk.{il}.attn_q.weight": (s.n_embd, q),
            f"blk.{il}.attn_k.weight": (s.n_embd, kv),
            f"blk.{il}.attn_v.weight": (s.n_embd, kv),
            f"blk.{il}.attn_output.weight": (q, s.n_embd),
            f"blk.{il}.attn_q_norm.weight": (s.head_dim,),
            f"blk.{il}.attn_k_norm.weight": (s.head_dim,),
            f"blk.{il}.ffn_norm.weight": (s.n_embd,),
            f"blk.{il}.ffn_gate.weight": (s.n_embd, s.n_ff),
            f"blk.{il}.ffn_up.weight": (s.n_embd, s.n_ff),
            f"blk.{il}.ffn_down.weight": (s.n_ff, s.n_embd),
        }
    if s.has_embedding:
        found["token_embd.weight"] = (s.n_embd, s.n_vocab)
    n_draft = s.n_vocab_draft or s.n_vocab
    if s.n_vocab_draft:
        found |= {"output.weight": (s.n_embd, n_draft), "d2t": (n_draft,)}
    if s.markov_rank:
        found["markov_w1.weight"] = (s.markov_rank, s.n_vocab)
        found["markov_w2.weight"] = (s.markov_rank, n_draft)
        if s.has_confidence:
            found["conf_proj.weight"] = (s.n_embd + s.markov_rank, 1)
            found["conf_proj.bias"] = (1,)
    return found


def values(s: DraftShape, seed: int = 0) -> Iterator[tuple[str, Array]]:
    """Yield every tensor, F32 (d2t: I64, tokens of the target), numpy shapes."""
    for name, ne in tensor_shapes(s).items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        if name == "d2t":
            yield name, np.sort(rng.choice(s.n_vocab, s.n_vocab_draft, replace=False))
            continue
        data: Array = rng.standard_normal(ne[::-1], dtype=np.float32)
        if name.endswith("norm.weight"):
            data = 1 + data / 8
        elif name.startswith("markov_w1"):
            data *= 2.0
        elif len(ne) > 1:
            data /= np.float32(np.sqrt(ne[0]))
        yield name, data


def encoded(x: Array, kind: str) -> bytes:
    """Return the bytes of a tensor, in the type of this name."""
    if kind == "I64":
        return x.astype(np.int64).tobytes()
    return gguf.quants.quantize(np.ascontiguousarray(x, np.float32), Type[kind]).tobytes()


def type_of(name: str, ne: tuple[int, ...], matrices: str) -> str:
    """Return the type of a tensor of a GGUF file whose matrices have a type."""
    if name == "d2t":
        return "I64"
    return matrices if len(ne) > 1 and ne[0] % 32 == 0 and not name.startswith("conf") else "F32"


def write_drafter(path: Path, s: DraftShape, kind: str, matrices: str, seed: int = 0) -> None:
    """Write a drafter as one of FORMATS; matrices: their type.

    For safetensors, config.json is written beside it, and all types are `matrices`.
    """
    if kind == "safetensors":
        _write_safetensors(path, s, matrices, seed)
        return
    shapes = {_spelled(name, kind): (name, ne) for name, ne in tensor_shapes(s).items()}
    types = {name: type_of(own, ne, matrices) for name, (own, ne) in shapes.items()}
    entries = [
        TensorEntry(name, ne, Type[types[name]], _n_bytes(ne, types[name]))
        for name, (_, ne) in shapes.items()
    ]
    made = values(s, seed)

    def data(entry: TensorEntry) -> Bytes:
        return encoded(next(made)[1], types[entry.name])

    keys = {"general.name": "a synthetic drafter", **draft_keys(s, kind)}
    if kind == "dflash":
        keys |= {**vocabulary(s.n_vocab), "tokenizer.ggml.mask_token_id": s.mask_id}
    write_gguf(path, kind, keys, entries, data)


def _n_bytes(ne: tuple[int, ...], kind: str) -> int:
    n_elem, n_bytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    return int(np.prod(ne)) // n_elem * n_bytes


def _spelled(name: str, kind: str) -> str:
    """Return what a dialect calls a tensor."""
    if kind == "dflash":
        return name
    mark = "_" if kind == "dflash-draft" else "."
    name = name.replace("enc.output_norm", f"dflash{mark}hidden_norm")
    return name.replace("ffn_norm", "post_attention_norm").replace("fc.", f"dflash{mark}fc.")


def draft_keys(s: DraftShape, kind: str = "dflash") -> Keys:
    """Return the keys of the architecture."""
    keys: Keys = {
        "attention.layer_norm_rms_epsilon": s.f_norm_rms_eps,
        "context_length": s.n_ctx_train,
        "embedding_length": s.n_embd,
        "block_count": s.n_layer,
        "feed_forward_length": s.n_ff,
        "attention.head_count": s.n_head,
        "attention.head_count_kv": s.n_head_kv,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "rope.freq_base": s.rope_freq_base,
    }
    if s.yarn_factor:
        keys["rope.scaling.type"] = "yarn"
        keys["rope.scaling.factor"] = s.yarn_factor
        keys["rope.scaling.original_context_length"] = s.yarn_orig
    if s.n_swa:
        keys["attention.sliding_window"] = s.n_swa
        keys["attention.sliding_window_pattern"] = [letter == "s" for letter in s.windows]
    keys["attention.causal"] = s.is_causal
    if kind != "dflash":
        keys["dflash.block_size"] = s.block_size
        keys["dflash.mask_token_id"] = s.mask_id
        keys["dflash.target_layer_ids"] = list(s.target_layers)
        keys["vocab_size"] = s.n_vocab
    else:
        keys["block_size"] = s.block_size
        # a layer's output, which the format names as the input of the next layer
        keys["target_layers"] = [layer + 1 for layer in s.target_layers]
        # the target counts positions in three dimensions, of which text uses the first
        keys["rope.dimension_sections"] = [s.head_dim // 2, 0, 0, 0]
        if s.markov_rank:
            keys["sample_from_anchor"] = s.samples_anchor
            keys["has_confidence_head"] = s.has_confidence
    return {f"{kind}.{name}": value for name, value in keys.items()}


_HF_NAMES = {
    "token_embd.weight": "embed_tokens.weight",
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
    "d2t": "d2t",
}
_HF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """Return the name of a tensor in safetensors."""
    if name in _HF_NAMES:
        return _HF_NAMES[name]
    _, il, part, _ = name.split(".")
    return f"layers.{il}.{_HF_LAYER[part]}.weight"


def hf_config(s: DraftShape, matrices: str = "BF16") -> dict[str, Any]:
    """Return config.json of a drafter."""
    scaling = None
    if s.yarn_factor:
        scaling = {
            "rope_type": "yarn", "factor": s.yarn_factor, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": s.yarn_orig,
        }  # fmt: skip
    kinds = [f"{'sliding' if letter == 's' else 'full'}_attention" for letter in s.windows]
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"], "attention_bias": False, "hidden_act": "silu",
        "dtype": {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[matrices],
        "head_dim": s.head_dim, "hidden_size": s.n_embd, "intermediate_size": s.n_ff,
        "layer_types": kinds, "max_position_embeddings": s.n_ctx_train, "model_type": "qwen3",
        "num_attention_heads": s.n_head, "num_hidden_layers": s.n_layer,
        "num_key_value_heads": s.n_head_kv, "rms_norm_eps": s.f_norm_rms_eps,
        "rope_scaling": scaling, "rope_theta": s.rope_freq_base, "sliding_window": s.n_swa or None,
        "tie_word_embeddings": False, "use_sliding_window": bool(s.n_swa), "vocab_size": s.n_vocab,
        "is_causal": s.is_causal,
    }  # fmt: skip
    inner = {"mask_token_id": s.mask_id, "target_layer_ids": list(s.target_layers)}
    if s.markov_rank:
        config |= {"architectures": ["DSparkDraftModel"], "markov_head_type": "vanilla"}
        config |= {"sample_from_anchor": s.samples_anchor}
        config |= {"draft_vocab_size": s.n_vocab_draft or s.n_vocab}
    # one published revision has it inside, the other at the top
    place = config if s.yarn_factor else inner
    place["block_size"] = s.block_size
    return {**config, "dflash_config": inner}


def _write_safetensors(path: Path, s: DraftShape, matrices: str, seed: int) -> None:
    config = json.dumps(hf_config(s, matrices), indent=2)
    path.with_name("config.json").write_text(config + "\n", encoding="utf-8")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, ne in tensor_shapes(s).items():
        kind = "I64" if name == "d2t" else matrices
        size = _n_bytes(ne, kind)
        shape = list(ne[::-1])
        header[hf_name(name)] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name, data in values(s, seed):
            if name == "d2t":  # there it holds differences
                data = data - np.arange(len(data))
            file.write(encoded(data, "I64" if name == "d2t" else matrices))
