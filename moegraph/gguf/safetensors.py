"""Safetensors files: a bounded, checked reader of their header, and of their tensors.

Layout (little-endian): u64 length of a JSON object, the object, tensor data. The object has for
each tensor its type, its shape, slowest axis first, and its first and last byte in the data. The
reader accepts what the format's own library accepts: tensors that follow each other without gaps.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
import weakref
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ..errors import InternalError, ModelFileError
from .scan import MAX_COUNT, MAX_DIMS, TensorInfo

# The format's own library refuses longer headers.
_MAX_HEADER = 100_000_000
_MAX_ELEMENTS = 1 << 40
_Q = GGMLQuantizationType
_TYPES = {"F32": _Q.F32, "F16": _Q.F16, "BF16": _Q.BF16, "I64": _Q.I64, "I32": _Q.I32}


class SafetensorsFile:
    """An open, checked safetensors file; close it.

    tensors: by their names in the file, in its order, shapes in ggml order. Tensors of other types
    than F32, F16, BF16, I32 and I64 are left out: `other` has their types by name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open a file and check its header."""
        self.path = Path(path)
        try:
            # O_NONBLOCK: opening a FIFO would otherwise wait for a writer
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{self.path}: cannot open: {_words(error)}") from error
        self._close = weakref.finalize(self, os.close, self._fd)
        self._mapped: mmap.mmap | None = None
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                self._fail("it is not a regular file")
            self._stamp = status.st_size, status.st_mtime_ns
            self.tensors, self.other = self._scan(status.st_size)
        except OSError as error:
            self.close()
            raise ModelFileError(f"{self.path}: cannot read: {_words(error)}") from error
        except BaseException:
            self.close()
            raise

    @property
    def stamps(self) -> tuple[tuple[int, int], ...]:
        """Return the size and the modification time (ns) of the file when it was opened."""
        return (self._stamp,)

    def _scan(self, size: int) -> tuple[dict[str, TensorInfo], dict[str, str]]:
        head = os.pread(self._fd, 8, 0)
        n = int.from_bytes(head, "little")
        if len(head) < 8 or not 2 <= n <= min(size - 8, _MAX_HEADER):
            self._fail(f"a file of {size} bytes cannot have a header of {n}")
        try:
            header = json.loads(_read_all(self._fd, n, 8).decode("utf-8"))
        except (ValueError, RecursionError) as error:
            self._fail(f"its header is not JSON: {type(error).__name__}")
        if not isinstance(header, dict) or len(header) > MAX_COUNT:
            self._fail("its header is not an object of tensors")
        header.pop("__metadata__", None)
        found, other, spans = {}, {}, []
        for name, entry in header.items():
            kind, info, span = self._entry(name, entry, 8 + n)
            spans.append((*span, name))
            if info is None:
                other[name] = kind
            else:
                found[name] = info
        self._check_spans(sorted(spans), size - 8 - n)
        return found, other

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

    def read(self, info: TensorInfo, out: np.ndarray, start: int = 0) -> None:
        """Copy a tensor's bytes, from byte `start` of it on, into out, U8 numpy [n]."""
        if start < 0 or start + out.size > info.nbytes or out.dtype != np.uint8:
            raise InternalError(f"read of {out.size} bytes of {info.name} from {start} on")
        view, at = out.data, info.offset + start
        try:
            while view:
                n = os.preadv(self._fd, [view], at)
                if not n:
                    raise ModelFileError(f"{self.path}: the file shrank while it was in use")
                view, at = view[n:], at + n
        except OSError as error:
            text = f"{self.path}: cannot read {info.name}: {_words(error)}"
            raise ModelFileError(text) from error

    def map(self, info: TensorInfo) -> np.ndarray:
        """Return a read-only view of a tensor's bytes in the mapped file, U8 [nbytes]."""
        self.check_unchanged()
        return np.frombuffer(self._mapping(), np.uint8, info.nbytes, info.offset)

    def mappings(self) -> list[tuple[Path, np.ndarray]]:
        """Return (path, all bytes) of the file; `map` returns slices of these bytes."""
        self.check_unchanged()
        return [(self.path, np.frombuffer(self._mapping(), np.uint8))]

    def _mapping(self) -> mmap.mmap:
        try:
            if self._mapped is None:
                self._mapped = mmap.mmap(self._fd, self._stamp[0], access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{self.path}: cannot map the file: {_words(error)}") from error
        return self._mapped

    def check_unchanged(self) -> None:
        """Refuse a file that was written to after it was opened, by size and modification time."""
        status = os.fstat(self._fd)
        if (status.st_size, status.st_mtime_ns) != self._stamp:
            raise ModelFileError(f"{self.path}: the file was written to while it was in use")

    def close(self) -> None:
        """Close the file; views of it stay valid. A second call does nothing."""
        self._mapped = None
        self._close()


def _read_all(fd: int, n: int, at: int) -> bytes:
    """Read n bytes; fewer if the file is shorter."""
    parts: list[bytes] = []
    while n:
        parts.append(os.pread(fd, n, at))
        if not parts[-1]:
            break
        n, at = n - len(parts[-1]), at + len(parts[-1])
    return b"".join(parts)


def _sizes(value: Any) -> list[int] | None:
    """Return a value if it is a list of sizes."""
    is_one = isinstance(value, list) and all(
        type(v) is int and 0 <= v <= _MAX_ELEMENTS for v in value
    )
    return value if is_one else None


def _words(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
