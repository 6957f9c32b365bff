"""Write a picture encoder (mmproj) of Qwen3-VL's kind with random weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

_DIM, _FF, _HEADS, _LAYERS, _PATCH, _SIDE = 64, 96, 4, 2, 16, 8


def write_mmproj(path: Path, n_embd: int, seed: int = 0) -> Path:
    """Write a small encoder for a model with rows of n_embd; _SIDE: of the learned positions."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", "qwen3vl_merger")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    keys = {
        "embedding_length": _DIM, "feed_forward_length": _FF, "block_count": _LAYERS,
        "projection_dim": n_embd, "attention.head_count": _HEADS, "patch_size": _PATCH,
        "image_size": _SIDE * _PATCH, "spatial_merge_size": 2,
    }  # fmt: skip
    for key, value in keys.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])

    def add(name: str, *ne: int, around: float = 0.0) -> None:
        scale = 1.0 / np.sqrt(np.prod(ne[:-1])) if len(ne) > 1 else 0.1
        data = (around + rng.normal(0, scale, ne[::-1])).astype(np.float32)
        is_large = len(ne) > 1 and name.endswith("weight") and "position" not in name
        writer.add_tensor(name, data.astype(np.float16) if is_large else data)

    def add_pair(name: str, n_in: int, n_out: int) -> None:
        add(f"{name}.weight", n_in, n_out)
        add(f"{name}.bias", n_out)

    def add_norm(name: str) -> None:
        add(f"{name}.weight", _DIM, around=1.0)
        add(f"{name}.bias", _DIM)

    for suffix in ("weight", "weight.1"):
        add(f"v.patch_embd.{suffix}", _PATCH, _PATCH, 3, _DIM)
    add("v.patch_embd.bias", _DIM)
    add("v.position_embd.weight", _DIM, _SIDE * _SIDE)
    for il in range(_LAYERS):
        block = f"v.blk.{il}"
        add_norm(f"{block}.ln1")
        add_norm(f"{block}.ln2")
        add_pair(f"{block}.attn_qkv", _DIM, 3 * _DIM)
        add_pair(f"{block}.attn_out", _DIM, _DIM)
        add_pair(f"{block}.ffn_up", _DIM, _FF)
        add_pair(f"{block}.ffn_down", _FF, _DIM)
    add_norm("v.post_ln")
    add_pair("mm.0", 4 * _DIM, 4 * _DIM)
    add_pair("mm.2", 4 * _DIM, n_embd)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
