"""Write the trained model as GGUF, quantized by ggml's own functions.

    python export_tiny.py CHECKPOINT TOKENIZER OUT.gguf --ggml LIBGGML_BASE [--family gpt-oss]

CHECKPOINT is train_tiny.py's checkpoint.safetensors, TOKENIZER tokenize_text.py's tokenizer.json or
a model file that has the tokenizer, and LIBGGML_BASE a libggml-base shared library, whose
ggml_quantize_chunk does the quantization.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from pathlib import Path

import gguf
import numpy as np
import shape
from gguf import GGMLQuantizationType as Type
from mapping import entries, to_gguf
from merge_mtp import copy_fields, finish
from modelgen.gguf_write import add_key
from safetensors import safe_open

# Types vary by layer, as in dynamically quantized files: the first and last layers and the
# full-attention layers keep more bits. Rows of the down projection (n_ff_exp 128) are shorter
# than a K-quant block.
GATE_UP = (Type.Q5_K, Type.Q4_K, Type.Q4_K, Type.Q5_K, Type.Q4_K, Type.Q4_K, Type.Q4_K, Type.Q5_K)
DOWN = (Type.Q8_0, Type.Q5_0, Type.Q5_0, Type.Q5_1, Type.Q5_0, Type.Q5_0, Type.Q5_0, Type.Q5_1)
BY_SUFFIX = {
    "token_embd": Type.Q6_K, "output": Type.Q6_K, "attn_q": Type.Q5_K, "attn_k": Type.Q8_0,
    "attn_v": Type.Q6_K, "attn_output": Type.Q5_K, "attn_qkv": Type.Q5_K, "attn_gate": Type.Q5_K,
    "ssm_out": Type.Q6_K, "ssm_beta": Type.Q8_0, "ssm_alpha": Type.Q8_0,
    "ffn_gate_shexp": Type.Q6_K, "ffn_up_shexp": Type.Q6_K, "ffn_down_shexp": Type.Q8_0,
}  # fmt: skip
# The experts of gpt-oss have MXFP4, as published.
GPT_OSS = {
    **BY_SUFFIX, "token_embd": Type.Q4_K, "attn_k": Type.Q5_K, "ffn_gate_exps": Type.MXFP4,
    "ffn_up_exps": Type.MXFP4, "ffn_down_exps": Type.MXFP4,
}  # fmt: skip
NORMAL, CONTROL = 1, 3


def tensor_type(name: str, arch: str) -> Type:
    """Return the type of a tensor in the file."""
    parts = name.split(".")
    if parts[-1] == "bias":
        return Type.F32
    if arch == "gpt-oss":
        return GPT_OSS.get(parts[-2], Type.F32)
    if parts[0] == "blk":
        il, stem = int(parts[1]), parts[2]
        if stem in ("ffn_gate_exps", "ffn_up_exps"):
            return GATE_UP[il]
        if stem == "ffn_down_exps":
            return DOWN[il]
        return BY_SUFFIX.get(stem, Type.F32)
    return BY_SUFFIX.get(parts[0], Type.F32)


class Quantizer:
    """Calls ggml_quantize_chunk of a libggml-base shared library."""

    def __init__(self, library: Path) -> None:
        self.chunk = ctypes.CDLL(str(library)).ggml_quantize_chunk
        self.chunk.restype = ctypes.c_size_t
        pointer = ctypes.c_void_p
        self.chunk.argtypes = [ctypes.c_int, pointer, pointer, *[ctypes.c_int64] * 3, pointer]

    def __call__(self, x: np.ndarray, kind: Type) -> np.ndarray:
        """Return x [..., row] as bytes [..., row bytes] of the given type."""
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if x.shape[-1] % block:
            raise SystemExit(f"a row of {x.shape[-1]} is not a multiple of {kind.name}'s {block}")
        x = np.ascontiguousarray(x, np.float32)
        out = np.empty((*x.shape[:-1], x.shape[-1] // block * size), np.uint8)
        rows = x.size // x.shape[-1]
        n = self.chunk(kind, x.ctypes.data, out.ctypes.data, 0, rows, x.shape[-1], None)
        if n != out.nbytes:
            raise SystemExit(f"{kind.name}: {n} bytes written, {out.nbytes} expected")
        return out


def add_tokenizer(writer: gguf.GGUFWriter, path: Path) -> None:
    """Write the vocabulary, merges, special tokens and chat template."""
    if path.suffix == ".gguf":
        copy_fields(gguf.GGUFReader(str(path)), writer, "tokenizer.")
        return
    data = json.loads(path.read_text(encoding="utf-8"))
    vocab = data["model"]["vocab"] | {t["content"]: t["id"] for t in data["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    if [vocab[t] for t in tokens] != list(range(shape.SHAPE.n_vocab)):
        raise SystemExit(f"{path}: ids are not 0 to {shape.SHAPE.n_vocab - 1}")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(shape.PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if t in shape.SPECIAL_TOKENS else NORMAL for t in tokens])
    pairs = data["model"]["merges"]
    writer.add_token_merges([p if isinstance(p, str) else " ".join(p) for p in pairs])
    writer.add_bos_token_id(vocab[shape.EOT])
    writer.add_eos_token_id(vocab[shape.EOT])
    writer.add_pad_token_id(vocab[shape.EOT])
    writer.add_eot_token_id(vocab[shape.IM_END])
    writer.add_mask_token_id(vocab[shape.MASK])
    writer.add_add_bos_token(False)
    writer.add_chat_template(shape.CHAT_TEMPLATE)


def add_general(writer: gguf.GGUFWriter, name: str) -> None:
    """Write the keys that describe the model and the origin of its training text."""
    writer.add_name(f"moegraph {name}")
    writer.add_description(
        "A small Mixture-of-Experts model of Python source, trained from scratch for tests and"
        " demonstrations; see scripts/training of moegraph."
    )
    writer.add_license("MIT")
    writer.add_string(
        "general.dataset.description",
        "CPython standard library (PSF-2.0) and packages under BSD-3-Clause and MIT",
    )
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def write_model(
    s: shape.Shape, checkpoint: Path, tokenizer: Path, out: Path, quantize: Quantizer
) -> None:
    """Write the whole GGUF file."""
    writer = gguf.GGUFWriter(str(out), s.arch)
    add_general(writer, out.stem)
    for key, value in s.metadata().items():
        add_key(writer, key, value)
    add_tokenizer(writer, tokenizer)
    with safe_open(str(checkpoint), "pt") as state:
        unused = set(state.keys())
        for entry in entries(s):
            unused.discard(entry.param)
            x = to_gguf(entry, state.get_tensor(entry.param).float().numpy())
            kind = tensor_type(entry.gguf, s.arch)
            if kind != Type.F32:
                x = quantize(x, kind)
            writer.add_tensor(entry.gguf, x, raw_dtype=kind)
    if unused:
        raise SystemExit(f"parameters without a tensor: {sorted(unused)}")
    finish(writer, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=shape.SHAPES, default="qwen35moe")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ggml", type=Path, required=True)
    args = parser.parse_args()
    s, quantizer = shape.SHAPES[args.family], Quantizer(args.ggml)
    write_model(s, args.checkpoint, args.tokenizer, args.out, quantizer)


if __name__ == "__main__":
    main()
