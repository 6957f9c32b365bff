"""Writes GGUF files through llama.cpp's own writer: keys, tensor table, then tensor by tensor."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

Bytes = bytes | memoryview


Keys = dict[str, Any]
# What a key is in the file, by the type of its value; a list is of such values.
_KINDS = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
    list: GGUFValueType.ARRAY,
}


@dataclass(frozen=True)
class TensorEntry:
    """A row of the tensor table; ne in ggml order."""

    name: str
    ne: tuple[int, ...]
    ggml_type: int
    n_bytes: int


def write_gguf(
    path: Path,
    arch: str,
    keys: Keys,
    tensors: Sequence[TensorEntry],
    data: Callable[[TensorEntry], Bytes] | None = None,
    n_parts: int = 1,
) -> list[Path]:
    """Write a model as n_parts files of about as many tensors each, and return their paths.

    data: of a tensor; None: one sparse file is written, in which all weights are a hole.
    They have their names only when all are complete. The first has all keys.
    """
    with TemporaryDirectory(dir=path.parent) as folder:
        most = math.ceil(len(tensors) / n_parts) if n_parts > 1 else 0
        writer = gguf.GGUFWriter(Path(folder) / path.name, arch, split_max_tensors=most)
        for key, value in keys.items():
            add_key(writer, key, value)
        for one in tensors:
            kind_of = GGMLQuantizationType(one.ggml_type)
            writer.add_tensor_info(one.name, one.ne[::-1], np.dtype("f4"), one.n_bytes, kind_of)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for file in [] if data or writer.fout is None else writer.fout:
            sizes = (file.tell(), *(one.n_bytes for one in tensors))
            file.truncate(sum(writer.ggml_pad(n, writer.data_alignment) for n in sizes))
        for one in tensors:
            if data:
                writer.write_tensor_data(np.frombuffer(data(one), np.uint8))
        writer.close()
        made = sorted(Path(folder).iterdir())
        for part in made:
            os.replace(part, path.with_name(part.name))
    return [path.with_name(part.name) for part in made]


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a key; its type in the file is that of the value."""
    writer.add_key_value(key, value, _KINDS[type(value)])
