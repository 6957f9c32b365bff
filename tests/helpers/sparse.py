"""Sparse files of the presets of scripts/modelgen: a header, and weights that are a hole."""

from __future__ import annotations

from typing import Any

from modelgen.build import contents

from .ggufbytes import File, Q, T, Tensor, kv, kv_array
from .shared import PRESETS

_KINDS = {bool: T.BOOL, int: T.UINT32, float: T.FLOAT32, str: T.STRING}


def preset_contents(preset: str) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the keys and the tensors of a preset's model."""
    shape, mix = PRESETS[preset].shape, PRESETS[preset].mix
    keys, tensors = contents(shape, mix)
    entries = (one.entry() for one in tensors.values())
    listed = [Tensor(one.name, one.ne, Q(one.ggml_type)) for one in entries]
    return {"general.architecture": shape.arch, **keys}, listed


def file_of(keys: dict[str, Any], tensors: list[Tensor]) -> File:
    """Return a file with keys as `gguf_write` writes them; bytes are the pair itself."""
    return File([pair_of(key, value) for key, value in keys.items()], tensors)


def pair_of(key: str, value: Any) -> bytes:
    """Return a key-value pair."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, list):
        return kv_array(key, T.INT32 if type(value[0]) is int else _KINDS[type(value[0])], value)
    return kv(key, _KINDS[type(value)], value)
