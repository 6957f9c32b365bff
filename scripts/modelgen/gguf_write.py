"""A streaming GGUF v3 writer: keys, tensor table, then tensor bytes as they are made."""

from __future__ import annotations

import enum
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

ALIGNMENT = 32
Bytes = bytes | memoryview


class KVType(enum.Enum):
    """The value types this writer emits: (gguf type, struct code, array element type)."""

    U16 = (2, "<H", None)
    U32 = (4, "<I", None)
    I32 = (5, "<i", None)
    F32 = (6, "<f", None)
    BOOL = (7, "<?", None)
    STRING = (8, "", None)
    I32_ARRAY = (9, "i", 5)
    BOOL_ARRAY = (9, "?", 7)
    STRING_ARRAY = (9, "", 8)


@dataclass(frozen=True)
class KV:
    """One metadata key."""

    key: str
    kind: KVType
    value: Any

    def encode(self) -> bytes:
        """Return the key, its type and its value as bytes of the file."""
        gguf_type, code, element = self.kind.value
        head = _string(self.key) + struct.pack("<I", gguf_type)
        if element is None:
            return head + (struct.pack(code, self.value) if code else _string(self.value))
        head += struct.pack("<IQ", element, len(self.value))
        if code:
            return head + struct.pack(f"<{len(self.value)}{code}", *self.value)
        return head + b"".join(map(_string, self.value))


@dataclass(frozen=True)
class TensorEntry:
    """A row of the tensor table; ne in ggml order."""

    name: str
    ne: tuple[int, ...]
    ggml_type: int
    n_bytes: int


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _padding(size: int) -> int:
    return -size % ALIGNMENT


def header(kvs: Sequence[KV], tensors: Sequence[TensorEntry]) -> bytes:
    """Return everything before the tensor data, padded to the alignment."""
    out = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(kvs))]
    out += [kv.encode() for kv in kvs]
    offset = 0
    for t in tensors:
        out.append(_string(t.name) + struct.pack("<I", len(t.ne)))
        out.append(struct.pack(f"<{len(t.ne)}Q", *t.ne) + struct.pack("<IQ", t.ggml_type, offset))
        offset += t.n_bytes + _padding(t.n_bytes)
    blob = b"".join(out)
    return blob + bytes(_padding(len(blob)))


def _write_tensor(file: BinaryIO, entry: TensorEntry, pieces: Iterable[Bytes]) -> None:
    written = sum(file.write(piece) for piece in pieces)
    if written != entry.n_bytes:
        raise ValueError(f"{entry.name}: {written} bytes made, {entry.n_bytes} declared")
    file.write(bytes(_padding(written)))


def write_gguf(
    path: Path,
    kvs: Sequence[KV],
    tensors: Sequence[TensorEntry],
    data: Callable[[TensorEntry], Iterator[Bytes]],
    done: Callable[[TensorEntry], None],
) -> None:
    """Write one file; it appears under its name only when it is complete."""
    temporary = path.with_name(path.name + ".part")
    try:
        with open(temporary, "wb", buffering=0) as file:
            file.write(header(kvs, tensors))
            for entry in tensors:
                _write_tensor(file, entry, data(entry))
                done(entry)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def split_tensors(tensors: Sequence[TensorEntry], n_parts: int) -> list[list[TensorEntry]]:
    """Cut the table into `n_parts` runs of about equal size, none of them empty."""
    if not 1 <= n_parts <= len(tensors):
        raise ValueError(f"cannot split {len(tensors)} tensors into {n_parts} files")
    total = sum(t.n_bytes for t in tensors)
    parts: list[list[TensorEntry]] = [[] for _ in range(n_parts)]
    part, size = 0, 0
    for i, t in enumerate(tensors):
        left = len(tensors) - i
        full = size >= total * (part + 1) / n_parts
        if parts[part] and part + 1 < n_parts and (full or left < n_parts - part):
            part += 1
        parts[part].append(t)
        size += t.n_bytes
    return parts


def split_paths(path: Path, n_parts: int) -> list[Path]:
    """Return the names of the parts as llama.cpp expects them."""
    if n_parts == 1:
        return [path]
    return [
        path.with_name(f"{path.stem}-{i + 1:05d}-of-{n_parts:05d}.gguf") for i in range(n_parts)
    ]


def write_split(
    path: Path,
    kvs: Sequence[KV],
    tensors: Sequence[TensorEntry],
    n_parts: int,
    data: Callable[[TensorEntry], Iterator[Bytes]],
    done: Callable[[TensorEntry], None],
) -> list[Path]:
    """Write the model as `n_parts` files and return their paths; the first carries all keys."""
    paths = split_paths(path, n_parts)
    if n_parts == 1:
        write_gguf(path, kvs, tensors, data, done)
        return paths
    parts = split_tensors(tensors, n_parts)
    for no, (part_path, part) in enumerate(zip(paths, parts, strict=True)):
        marks = [
            KV("split.no", KVType.U16, no),
            KV("split.count", KVType.U16, n_parts),
            KV("split.tensors.count", KVType.I32, len(tensors)),
        ]
        write_gguf(part_path, [*(kvs if no == 0 else []), *marks], part, data, done)
    return paths
