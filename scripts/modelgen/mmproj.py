"""Write a picture encoder (mmproj) of Qwen3-VL's kind with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

_PATCH = 16
# Random numbers of a tensor before they repeat: enough to be no pattern, and quick for large files.
_DRAWN = 1 << 20


class Tower(NamedTuple):
    """Sizes of an encoder; side: of the square of learned positions."""

    dim: int
    ff: int
    heads: int
    layers: int
    side: int


SMALL = Tower(64, 96, 4, 2, 8)
# That of Qwen3.5 and Qwen3.6 35B-A3B, 122B-A10B and 397B-A17B.
TRUE = Tower(1152, 4304, 16, 27, 48)


def write_mmproj(path: Path, n_embd: int, seed: int = 0, tower: Tower = SMALL) -> Path:
    """Write an encoder for a model with rows of n_embd."""
    rng, dim = np.random.default_rng(seed), tower.dim
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", "qwen3vl_merger")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    keys = {
        "embedding_length": dim, "feed_forward_length": tower.ff, "block_count": tower.layers,
        "projection_dim": n_embd, "attention.head_count": tower.heads, "patch_size": _PATCH,
        "image_size": tower.side * _PATCH, "spatial_merge_size": 2,
    }  # fmt: skip
    for key, value in keys.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])

    def add(name: str, *ne: int, around: float = 0.0) -> None:
        scale = 1.0 / np.sqrt(np.prod(ne[:-1])) if len(ne) > 1 else 0.1
        drawn = rng.normal(0, scale, min(int(np.prod(ne)), _DRAWN)).astype(np.float32)
        data = np.resize(around + drawn, ne[::-1])
        is_large = len(ne) > 1 and name.endswith("weight") and "position" not in name
        writer.add_tensor(name, data.astype(np.float16) if is_large else data)

    def add_pair(name: str, n_in: int, n_out: int) -> None:
        add(f"{name}.weight", n_in, n_out)
        add(f"{name}.bias", n_out)

    def add_norm(name: str) -> None:
        add(f"{name}.weight", dim, around=1.0)
        add(f"{name}.bias", dim)

    for suffix in ("weight", "weight.1"):
        add(f"v.patch_embd.{suffix}", _PATCH, _PATCH, 3, dim)
    add("v.patch_embd.bias", dim)
    add("v.position_embd.weight", dim, tower.side**2)
    for il in range(tower.layers):
        block = f"v.blk.{il}"
        add_norm(f"{block}.ln1")
        add_norm(f"{block}.ln2")
        add_pair(f"{block}.attn_qkv", dim, 3 * dim)
        add_pair(f"{block}.attn_out", dim, dim)
        add_pair(f"{block}.ffn_up", dim, tower.ff)
        add_pair(f"{block}.ffn_down", tower.ff, dim)
    add_norm("v.post_ln")
    add_pair("mm.0", 4 * dim, 4 * dim)
    add_pair("mm.2", 4 * dim, n_embd)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
