"""A small model of each family, sparse, and what its own keys and tensors can have wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from helpers.ggufbytes import File, Q, T, Tensor, kv, kv_array
from helpers.shared import PRESETS
from modelgen.build import contents

N_FILES = 60
# Tensors of the model or of a layer without which a model of some family is whole.
OPTIONAL = (
    "output.weight", "attn_v.weight", "layer_output_scale.weight", "attn_q.bias", "attn_k.bias",
    "attn_v.bias", "exp_probs_b.bias",
)  # fmt: skip
_KINDS = {bool: T.BOOL, int: T.UINT32, float: T.FLOAT32, str: T.STRING}


def family_file(preset: str) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the keys and the tensors of a family's model."""
    shape, mix = PRESETS[preset].shape, PRESETS[preset].mix
    keys, tensors = contents(shape, mix)
    entries = (one.entry() for one in tensors.values())
    listed = [Tensor(one.name, one.ne, Q(one.ggml_type)) for one in entries]
    return {"general.architecture": shape.arch, **keys}, listed


def file_of(keys: dict[str, Any], tensors: list[Tensor]) -> File:
    """Return a file with keys as `gguf_write` writes them; bytes are the pair itself."""
    return File([_pair(key, value) for key, value in keys.items()], tensors)


def _pair(key: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, list):
        return _array(key, value)
    return kv(key, _KINDS[type(value)], value)


def _array(key: str, value: list[Any]) -> bytes:
    return kv_array(key, T.INT32 if type(value[0]) is int else _KINDS[type(value[0])], value)


def family_cases(preset: str) -> list[tuple[str, File]]:
    """Return names and files: N_FILES, from all over the keys and tensors."""
    keys, tensors = family_file(preset)
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
        yield "is short", _array(key, value[1:])
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
