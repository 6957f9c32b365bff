"""What the keys and tensors of a small model of each family can have wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from helpers.ggufbytes import File, Q, T, Tensor, kv
from helpers.shared import PRESETS
from helpers.sparse import file_of, pair_of, preset_contents

N_FILES = 60
# Tensors of the model or of a layer without which a model of some family is whole.
OPTIONAL = (
    "output.weight", "attn_v.weight", "layer_output_scale.weight", "attn_q.bias", "attn_k.bias",
    "attn_v.bias", "exp_probs_b.bias",
)  # fmt: skip


def family_cases(preset: str) -> list[tuple[str, File]]:
    """Return names and files: N_FILES, from all over the keys and tensors."""
    keys, tensors = preset_contents(preset)
    found = [
        *((f"{key} {what}", file_of({**keys, key: pair}, tensors))
          for key, value in keys.items() if key.startswith(keys["general.architecture"])
          for what, pair in _wrong_pairs(key, value)),
        *((f"{name} {what}", file_of(keys, listed))
          for name, what, listed in _wrong_tensors(tensors, PRESETS[preset].shape.n_layer - 1)),
    ]  # fmt: skip
    return [found[i * len(found) // N_FILES] for i in range(N_FILES)]


def _wrong_pairs(key: str, value: Any) -> Iterator[tuple[str, bytes]]:
    if isinstance(value, list):
        yield "is short", pair_of(key, value[1:])
    if isinstance(value, float):
        yield "is NaN", kv(key, T.FLOAT32, float("nan"))
    if isinstance(value, int) and not isinstance(value, bool):
        yield "is 2^32-1", kv(key, T.UINT32, 2**32 - 1)
        yield "is -1", kv(key, T.INT64, -1)
    yield "is of another kind", kv(key, *((T.UINT8, 1) if isinstance(value, str) else (8, "x")))


def _wrong_tensors(tensors: list[Tensor], il: int) -> Iterator[tuple[str, str, list[Tensor]]]:
    first, last = "blk.0.", f"blk.{il}."
    for at, tensor in enumerate(tensors):
        name, rest = str(tensor.name), (tensors[:at], tensors[at + 1 :])
        if name.startswith("blk.") and not name.startswith((first, last)):
            continue
        if name.removeprefix(first).removeprefix(last) not in OPTIONAL:
            yield name, "is missing", [*rest[0], *rest[1]]
        yield name, "has another shape", [*rest[0], replace(tensor, ne=(256, 3)), *rest[1]]
        yield name, "is IQ1_S", [*rest[0], Tensor(name, (256, 8), Q.IQ1_S), *rest[1]]
