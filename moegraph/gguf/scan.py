"""Scan the header of one GGUF file: key-value pairs and tensor records, all bounds checked.

Layout (little-endian): magic, u32 version, u64 n_tensors, u64 n_kv, key-value pairs, tensor
records, padding to the alignment, tensor data. Versions 2 and 3 have the same layout. The scanner
checks every count and length against the rest of the file before it allocates, and refuses nested
arrays, so it ends in bounded time on any input.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from ..errors import ModelFileError
from .metadata import Metadata
from .reader import Reader
from .sniff import MAGIC, describe_foreign
from .tensorfile import TensorInfo

MAX_COUNT = 65_536
# ggml's GGML_MAX_NAME is 64 with the terminating NUL.
MAX_TENSOR_NAME = 63
MAX_KEY = 65_535
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
_MAX_BYTES = 2**63 - 1
_MIN_KV_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8

_T = GGUFValueType
_SCALARS = {
    _T.UINT8: "B",
    _T.INT8: "b",
    _T.UINT16: "H",
    _T.INT16: "h",
    _T.UINT32: "I",
    _T.INT32: "i",
    _T.UINT64: "Q",
    _T.INT64: "q",
    _T.FLOAT32: "f",
    _T.FLOAT64: "d",
    _T.BOOL: "B",
}


@dataclass(frozen=True)
class Part:
    """What the header of one GGUF file says."""

    path: os.PathLike[str]
    version: int
    metadata: Metadata
    tensors: dict[str, TensorInfo]
    trailing_bytes: int


def scan_part(fd: int, path: os.PathLike[str], size: int, part: int = 0) -> Part:
    """Scan the header of an open regular file of size bytes; part: its index among the splits."""
    reader = Reader(fd, path, size)
    version, n_tensors, n_kv = _read_preamble(reader)
    metadata = _read_metadata(reader, n_kv)
    alignment = _alignment(metadata)
    records = [_read_tensor(reader, part) for _ in range(n_tensors)]
    tensors, end = _place(reader, records, alignment)
    return Part(path, version, metadata, tensors, max(0, size - end))


def _read_preamble(reader: Reader) -> tuple[int, int, int]:
    """Read magic, version and the two counts."""
    head = reader.peek(64)
    if not head:
        reader.fail("the file is empty")
    if not head.startswith(MAGIC):
        reader.fail(f"not a GGUF file: {describe_foreign(head)}")
    reader.raw(4, "magic")
    version = reader.u32("version")
    if version and not version & 0xFFFF:
        reader.fail("a big-endian GGUF file; convert it again for a little-endian machine", 4)
    if version not in (2, 3):
        reader.fail(f"GGUF version {version} is not supported; versions 2 and 3 are", 4)
    n_tensors = _read_count(reader, "tensors", _MIN_TENSOR_BYTES)
    n_kv = _read_count(reader, "key-value pairs", _MIN_KV_BYTES)
    return version, n_tensors, n_kv


def _read_count(reader: Reader, what: str, min_bytes: int) -> int:
    at = reader.pos
    n = reader.u64(f"number of {what}")
    if n > MAX_COUNT:
        reader.fail(f"the header claims {n} {what}; allowed are {MAX_COUNT}", at)
    reader.check_room(n * min_bytes, f"a header with {n} {what}", at)
    return n


def _read_metadata(reader: Reader, n_kv: int) -> Metadata:
    values: dict[str, Any] = {}
    offsets: dict[str, int] = {}
    for i in range(n_kv):
        at = reader.pos
        key = reader.text(f"key {i}", MAX_KEY)
        if key in values:
            reader.fail(f"key {key} appears twice", at)
        offsets[key] = at
        values[key] = _read_value(reader, key)
    return Metadata(reader.path, values, offsets)


def _read_type(reader: Reader, what: str) -> GGUFValueType:
    at = reader.pos
    number = reader.u32(f"type of {what}")
    if number not in _T._value2member_map_:
        reader.fail(f"{what} has the unknown value type {number}", at)
    return _T(number)


def _read_value(reader: Reader, key: str) -> Any:
    """Read one typed value: int, float, bool, str, numpy array or StringArray."""
    kind = _read_type(reader, f"key {key}")
    if kind == _T.STRING:
        return reader.bytes_value(f"value of key {key}").decode("utf-8", "replace")
    if kind == _T.ARRAY:
        return _read_array(reader, key)
    at = reader.pos
    code = struct.Struct("<" + _SCALARS[kind])
    value = code.unpack(reader.raw(code.size, f"value of key {key}"))[0]
    if kind == _T.BOOL:
        if value > 1:
            reader.fail(f"key {key} is a boolean with the value {value}; allowed are 0 and 1", at)
        return value == 1
    return value


def _read_array(reader: Reader, key: str) -> Any:
    at = reader.pos
    kind = _read_type(reader, f"elements of key {key}")
    if kind == _T.ARRAY:
        reader.fail(f"key {key} is an array of arrays, which moegraph does not read", at)
    n = reader.u64(f"array length of key {key}")
    item = 8 if kind == _T.STRING else struct.calcsize("<" + _SCALARS[kind])
    reader.check_room(n * item, f"key {key}, an array of {n} elements,", at)
    if kind == _T.STRING:
        return reader.string_array(n, f"key {key}")
    dtype = np.dtype("<u1" if kind == _T.BOOL else f"<{np.dtype(_SCALARS[kind]).str[1:]}")
    values = np.frombuffer(reader.raw(n * item, f"key {key}"), dtype=dtype)
    if kind != _T.BOOL:
        return values
    if n and int(values.max()) > 1:
        reader.fail(f"key {key} is an array of booleans with a value above 1", at)
    return values.astype(bool)


def _alignment(metadata: Metadata) -> int:
    alignment = metadata.integer("general.alignment", 8, 4096, DEFAULT_ALIGNMENT)
    if alignment & (alignment - 1):
        raise metadata.error("general.alignment", f"is {alignment}, which is not a power of two")
    return alignment


def _read_tensor(reader: Reader, part: int) -> tuple[TensorInfo, int]:
    """Read a record: a tensor whose offset counts from the start of the data, and its place."""
    at = reader.pos
    name = reader.text("a tensor name", MAX_TENSOR_NAME)
    what = f"tensor {name}"
    n_dims = reader.u32(f"dimensions of {what}")
    if not 1 <= n_dims <= MAX_DIMS:
        reader.fail(f"{what} has {n_dims} dimensions; allowed are 1 to {MAX_DIMS}", at)
    dims = struct.unpack(f"<{n_dims}Q", reader.raw(8 * n_dims, f"shape of {what}"))
    number = reader.u32(f"type of {what}")
    if number not in GGMLQuantizationType._value2member_map_:
        reader.fail(f"{what} has the unknown type {number}", at)
    kind = GGMLQuantizationType(number)
    offset = reader.u64(f"offset of {what}")
    ne0, ne1, ne2, ne3 = dims + (1,) * (MAX_DIMS - n_dims)
    nbytes = _nbytes(reader, what, at, kind, dims)
    return TensorInfo(name, kind, (ne0, ne1, ne2, ne3), n_dims, nbytes, part, offset), at


def _nbytes(
    reader: Reader, what: str, at: int, kind: GGMLQuantizationType, dims: tuple[int, ...]
) -> int:
    """Return the size of a tensor in bytes, after checking its shape."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    n = 1
    for dim in dims:
        if dim < 1:
            reader.fail(f"{what} has a zero dimension, shape {list(dims)}", at)
        n *= dim
    if dims[0] % block:
        reader.fail(
            f"{what} of type {kind.name} has rows of {dims[0]} elements, "
            f"not a multiple of the block size {block}",
            at,
        )
    nbytes = n // block * block_bytes
    if max(n, nbytes) > _MAX_BYTES:
        reader.fail(f"{what} with shape {list(dims)} is larger than any memory", at)
    return nbytes


def _place(
    reader: Reader, records: list[tuple[TensorInfo, int]], alignment: int
) -> tuple[dict[str, TensorInfo], int]:
    """Check that tensors follow each other inside the file; return them and where data ends.

    Each tensor must start where the previous one ends, plus padding. llama.cpp accepts no other
    layout, and in this one tensors cannot overlap.
    """
    tensors: dict[str, TensorInfo] = {}
    data_start = -(-reader.pos // alignment) * alignment
    expected = 0
    end = reader.pos
    before = "the start of the data"
    for info, at in records:
        what, offset = f"tensor {info.name}", info.offset
        if info.name in tensors:
            reader.fail(f"{what} appears twice", at)
        if offset % alignment:
            reader.fail(
                f"{what} has the offset {offset}, not a multiple of the alignment {alignment}", at
            )
        if offset != expected:
            word = "overlaps" if offset < expected else "leaves a gap after"
            reader.fail(f"{what} at data offset {offset} {word} {before}; expected {expected}", at)
        end = data_start + offset + info.nbytes
        if end > reader.size:
            raise ModelFileError(
                f"{reader.path}: {what} ends at byte {end} but the file has "
                f"{reader.size} bytes; it is truncated, download or copy it again"
            )
        tensors[info.name] = replace(info, offset=data_start + offset)
        expected = -(-(offset + info.nbytes) // alignment) * alignment
        before = what
    # The padding of the last tensor is part of the layout.
    return tensors, max(end, data_start + expected if records else end)
