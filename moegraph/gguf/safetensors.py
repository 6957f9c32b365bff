"""Safetensors files: a bounded, checked reader of their header, and of their tensors.

Layout (little-endian): u64 length of a JSON object, the object, tensor data. The object has for
each tensor its type, its shape, slowest axis first, and its first and last byte in the data. The
reader accepts what the format's own library accepts: tensors that follow each other without gaps.
"""

from __future__ import annotations

import json
import os
from typing import Any, NoReturn

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ..errors import ModelFileError
from .scan import MAX_COUNT, MAX_DIMS
from .tensorfile import Opened, TensorFile, TensorInfo

# The format's own library refuses longer headers.
_MAX_HEADER = 100_000_000
_MAX_ELEMENTS = 1 << 40
_Q = GGMLQuantizationType
_TYPES = {"F32": _Q.F32, "F16": _Q.F16, "BF16": _Q.BF16, "I64": _Q.I64, "I32": _Q.I32}


class SafetensorsFile(TensorFile):
    """An open, checked safetensors file.

    tensors: shapes in ggml order. Tensors of other types than F32, F16, BF16, I32 and I64 are left
    out: `other` has their types by name.
    """

    other: dict[str, str]

    def _scan(self) -> dict[str, TensorInfo]:
        file = self._open(self.path)
        n = int.from_bytes(self._read_all(file, 8, 0), "little")
        if not 2 <= n <= min(file.size - 8, _MAX_HEADER):
            self._fail(f"a file of {file.size} bytes cannot have a header of {n}")
        try:
            header = json.loads(self._read_all(file, n, 8).decode("utf-8"))
        except (ValueError, RecursionError) as error:
            self._fail(f"its header is not JSON: {type(error).__name__}")
        if not isinstance(header, dict) or len(header) > MAX_COUNT:
            self._fail("its header is not an object of tensors")
        header.pop("__metadata__", None)
        found, spans = {}, []
        self.other = {}
        for name, entry in header.items():
            kind, info, span = self._entry(name, entry, 8 + n)
            spans.append((*span, name))
            if info is None:
                self.other[name] = kind
            else:
                found[name] = info
        self._check_spans(sorted(spans), file.size - 8 - n)
        return found

    def _read_all(self, file: Opened, n: int, at: int) -> bytes:
        """Read n bytes of the header; fewer if the file is shorter."""
        parts: list[bytes] = []
        try:
            while n and (part := os.pread(file.fd, n, at)):
                parts.append(part)
                n, at = n - len(part), at + len(part)
        except OSError as error:
            self._fail(f"cannot read: {error.strerror}")
        return b"".join(parts)

    def _entry(
        self, name: str, entry: Any, start: int
    ) -> tuple[str, TensorInfo | None, tuple[int, int]]:
        """Return type, tensor (None for a foreign type) and first and last byte of an entry."""
        what = f"tensor {name[:80]!r}"
        if not isinstance(entry, dict):
            self._fail(f"{what} is not described by an object")
        kind = entry.get("dtype")
        dims, span = _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
        if not isinstance(kind, str) or dims is None or span is None or len(span) != 2:
            self._fail(f"{what} lacks a type, a shape or its place")
        n = 1
        for dim in dims:
            n *= dim
        if n > _MAX_ELEMENTS or span[0] > span[1]:
            self._fail(f"{what} has shape {dims} and bytes {span}")
        if kind not in _TYPES:
            return kind, None, (span[0], span[1])
        quant, n_bytes = _TYPES[kind], span[1] - span[0]
        if n_bytes != n * GGML_QUANT_SIZES[quant][1]:
            self._fail(f"{what} has shape {dims} of {kind}, but {n_bytes} bytes")
        if len(dims) > MAX_DIMS or not n:
            self._fail(f"{what} has shape {dims}; allowed are up to {MAX_DIMS} axes, none of 0")
        ne0, ne1, ne2, ne3 = (*reversed(dims), 1, 1, 1, 1)[:MAX_DIMS]
        shape = ne0, ne1, ne2, ne3
        at = start + span[0]
        info = TensorInfo(name, quant, shape, max(1, len(dims)), n_bytes, 0, at)
        return kind, info, (span[0], span[1])

    def _check_spans(self, spans: list[tuple[int, int, str]], n_data: int) -> None:
        """Check that tensors follow each other and fill the data."""
        at = 0
        for first, end, name in spans:
            if first != at:
                self._fail(f"tensor {name[:80]!r} begins at byte {first} of the data, not {at}")
            at = end
        if at != n_data:
            word = "is truncated" if at > n_data else "has bytes after the last tensor"
            self._fail(f"the file {word}: its tensors have {at} bytes of {n_data}")

    def _fail(self, what: str) -> NoReturn:
        raise ModelFileError(f"{self.path}: not a good safetensors file: {what}")


def _sizes(value: Any) -> list[int] | None:
    """Return a value if it is a list of sizes."""
    is_one = isinstance(value, list) and all(
        type(v) is int and 0 <= v <= _MAX_ELEMENTS for v in value
    )
    return value if is_one else None
