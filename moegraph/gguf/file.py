"""A GGUF file on disk, in one file or several parts: opened, scanned and mapped.

A caller gets at a tensor's bytes in two ways. `map` returns a view of the mapped file, which costs
nothing until it is read. If the file is truncated later, reading the view raises SIGBUS, which ends
the process unless ggml/mapped.py watches the `mappings`. `read` copies with pread into the caller's
memory and reports a truncated file as an error.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
import weakref
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from ..errors import InternalError, ModelFileError
from .metadata import Metadata
from .scan import Part, TensorInfo, scan_part

Opened = TypeVar("Opened", bound="GgufFile")

MAX_PARTS = 1024
_SPLIT_NO, _SPLIT_COUNT, _SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
_PART_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL | re.ASCII)
# Linux reads into at most this many pieces of memory in one call.
_MAX_ROWS = 1024


class GgufFile:
    """A well-formed GGUF file of any architecture; a context manager that `open_gguf` returns.

    path, kv: path and key-value pairs of the first part. tensors: those of all parts, in file
    order. warnings: one line for each harmless oddity.
    """

    warnings: tuple[str, ...]

    def __init__(self, path: Path) -> None:
        """Open the first part and the parts that it announces, and check all of them."""
        self._fds: list[int] = []
        self._stamps: list[tuple[int, int]] = []  # size and mtime of each part at opening
        # Closes the files if the caller does not, at exit at the latest.
        self._finalizer = weakref.finalize(self, _close_all, self._fds)
        self._maps: dict[int, mmap.mmap] = {}
        self._closed = False
        self.path = path
        try:
            self._parts = self._open_parts()
            self._meta = self._parts[0].metadata
            self.kv: dict[str, Any] = self._meta.values
            self.tensors = _merge(self._parts)
            self._check()
        except BaseException:
            self.close()
            raise

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} owns open files: it cannot be copied or pickled")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, {len(self.tensors)} tensors)"

    @property
    def paths(self) -> tuple[Path, ...]:
        """Return the path of every part, in order."""
        return tuple(Path(part.path) for part in self._parts)

    @property
    def n_bytes(self) -> int:
        """Return the size of all parts in bytes."""
        return sum(part.size for part in self._parts)

    @property
    def stamps(self) -> tuple[tuple[int, int], ...]:
        """Return the size and the modification time (ns) of every part when it was opened."""
        return tuple(self._stamps)

    @property
    def version(self) -> int:
        """Return the GGUF version of the first part."""
        return self._parts[0].version

    @property
    def metadata(self) -> Metadata:
        """Return typed access to the key-value pairs."""
        return self._meta

    def map(self, info: TensorInfo) -> np.ndarray:
        """Return a read-only view of a tensor's bytes in the mapped file.

        Shapes: [nbytes] uint8. The view stays valid after close().
        """
        self._check_open()
        part = self._parts[info.part]
        try:
            size = os.fstat(self._fds[info.part]).st_size
            if size < info.offset + info.nbytes:
                raise _shrank(part, size)
        except OSError as error:
            raise ModelFileError(f"{part.path}: cannot map the file: {error}") from error
        return np.frombuffer(self._mapping(info.part), np.uint8, info.nbytes, info.offset)

    def mappings(self) -> list[tuple[Path, np.ndarray]]:
        """Return (path, all bytes) of every part, in order; `map` returns slices of these bytes.

        Shapes: [size of the part] uint8.
        """
        self._check_open()
        return [
            (Path(part.path), np.frombuffer(self._mapping(no), np.uint8))
            for no, part in enumerate(self._parts)
        ]

    def _mapping(self, no: int) -> mmap.mmap:
        part = self._parts[no]
        try:
            if no not in self._maps:
                self._maps[no] = mmap.mmap(self._fds[no], part.size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{part.path}: cannot map {part.size} bytes: {error}") from error
        return self._maps[no]

    def read(self, info: TensorInfo, out: np.ndarray, start: int = 0) -> None:
        """Copy a tensor's bytes, from byte `start` of the tensor on, into `out`.

        Shapes: out [n] uint8, or [n_rows, n] uint8 with any distance between rows; each row is
        contiguous and writable, and start + n * n_rows <= info.nbytes. Thread-safe.
        """
        self._check_open()
        rows = out[None] if out.ndim == 1 else out
        usable = rows.ndim == 2 and (rows.strides[1] == 1 or rows.shape[1] < 2)
        if out.dtype != np.uint8 or not usable or not out.flags.writeable:
            raise InternalError(
                f"read of {info.name} into {out.dtype} {out.shape}, not rows of bytes"
            )
        if start < 0 or start > info.nbytes - out.size:
            raise InternalError(
                f"read of bytes {start} to {start + out.size} of {info.name}, "
                f"which has {info.nbytes}"
            )
        for at in range(0, len(rows), _MAX_ROWS):
            views = [row.data for row in rows[at : at + _MAX_ROWS]]
            self._read(info, views, start + at * rows.shape[1])

    def _read(self, info: TensorInfo, views: list[memoryview], start: int) -> None:
        """Fill views, one after the other, with a tensor's bytes from byte `start` on."""
        part, fd = self._parts[info.part], self._fds[info.part]
        at = info.offset + start
        while views:
            try:
                n = os.preadv(fd, views, at)
            except OSError as error:
                raise ModelFileError(
                    f"{part.path}: cannot read tensor {info.name}: {error.strerror}"
                ) from error
            if n == 0 and any(len(view) for view in views):
                raise _shrank(part, os.fstat(fd).st_size)
            at += n
            while views and n >= len(views[0]):
                n -= len(views.pop(0))
            if views:
                views[0] = views[0][n:]

    def check_unchanged(self) -> None:
        """Refuse a model that was written to after it was opened, by size and modification time.

        Removing the path, or renaming another file over it, leaves the opened file unchanged.
        """
        self._check_open()
        for part, fd, stamp in zip(self._parts, self._fds, self._stamps):
            try:
                now = _stamp(os.fstat(fd))
            except OSError as error:
                raise ModelFileError(f"{part.path}: cannot stat: {error.strerror}") from error
            if now != stamp:
                had = f"it had {stamp[0]} bytes and has {now[0]}"
                if now[0] == stamp[0]:
                    had = "its size is the same, its modification time is not"
                raise ModelFileError(
                    f"{part.path}: the file was written to while the model was in use: {had}; "
                    "load the model again"
                )

    def opened_paths(self) -> list[str]:
        """Return a path to the checked file of each part; valid until close().

        The part's own path may lead to another file by now.
        """
        self._check_open()
        return [f"/proc/self/fd/{fd}" for fd in self._fds]

    def close(self) -> None:
        """Close the files; views that map() returned stay valid. A second call does nothing."""
        self._closed = True
        self._maps.clear()
        self._finalizer()

    def _check_open(self) -> None:
        if self._closed:
            raise InternalError(f"{self.path}: the model file is closed")

    def _check_metadata(self, meta: Metadata) -> None:
        """Refuse a file by the metadata of its first part."""

    def _check(self) -> None:
        """Check all parts together and set `warnings`."""
        self.warnings = tuple(self._trailing())

    def _trailing(self) -> list[str]:
        """Describe bytes after the last tensor; llama.cpp ignores them, and so does moegraph."""
        return [
            f"{part.path}: {part.trailing_bytes} bytes follow the last tensor, ignored"
            for part in self._parts
            if part.trailing_bytes
        ]

    def _open_parts(self) -> list[Part]:
        """Open and scan the first part, then the others that it announces."""
        first = self._open_part(self.path, 0)
        meta = first.metadata
        n_parts = meta.integer(_SPLIT_COUNT, 0, 65_535, 1)
        names = _part_names(self.path, meta, n_parts) if n_parts > 1 else [self.path]
        self._check_metadata(meta)
        if len(names) == 1:
            return [first]
        parts = [first]
        for no in range(1, n_parts):
            part = self._open_part(names[no], no)
            _check_part(part, no, n_parts)
            parts.append(part)
        total = meta.integer(_SPLIT_TENSORS, 0, 1 << 31)
        found = sum(len(part.tensors) for part in parts)
        if total != found:
            raise meta.error(_SPLIT_TENSORS, f"is {total} but the {n_parts} parts hold {found}")
        return parts

    def _open_part(self, path: Path, no: int) -> Part:
        """Open one file, refuse what is not a regular file, and scan it."""
        try:
            # O_NONBLOCK: opening a FIFO would otherwise wait for a writer.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise ModelFileError(_cannot_open(path, no, error)) from error
        except ValueError as error:
            raise ModelFileError(f"{path}: not a file name: {error}") from error
        self._fds.append(fd)
        status = os.fstat(fd)
        self._stamps.append(_stamp(status))
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path}: {_node_kind(status.st_mode)}, not a model file")
        return scan_part(fd, path, status.st_size, no)


def _stamp(status: os.stat_result) -> tuple[int, int]:
    """Return size and mtime, which change when a file is written to."""
    return status.st_size, status.st_mtime_ns


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Open a well-formed GGUF file of any architecture, for inspection."""
    return GgufFile(Path(path))


def _merge(parts: list[Part]) -> dict[str, TensorInfo]:
    """Return the tensors of all parts; each name may occur only once."""
    tensors = dict(parts[0].tensors)
    for part in parts[1:]:
        for name, info in part.tensors.items():
            if name in tensors:
                first = parts[tensors[name].part].path
                raise ModelFileError(f"{part.path}: tensor {name} is also in {first}")
            tensors[name] = info
    return tensors


def _part_names(path: Path, meta: Metadata, n_parts: int) -> list[Path]:
    """Return the path of every part; only the first part's name decides, not its metadata."""
    if n_parts > MAX_PARTS:
        raise meta.error(_SPLIT_COUNT, f"is {n_parts}; allowed are 1 to {MAX_PARTS}")
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        raise meta.error(
            _SPLIT_COUNT,
            f"says that this is one of {n_parts} parts, but the file name does not "
            f"end in -00001-of-{n_parts:05}.gguf; give the parts their original names",
        )
    prefix, number, count = match.group(1), int(match.group(2)), int(match.group(3))
    first = path.with_name(f"{prefix}-00001-of-{n_parts:05}.gguf")
    no = meta.integer(_SPLIT_NO, 0, n_parts - 1)
    if no != 0:
        raise ModelFileError(
            f"{path}: this is part {no + 1} of {n_parts}; open the first part, {first.name}"
        )
    if (number, count) != (1, n_parts):
        raise meta.error(
            _SPLIT_COUNT,
            f"says that this is part 1 of {n_parts}, but the file name says part "
            f"{number} of {count}; give the parts their original names",
        )
    return [path.with_name(f"{prefix}-{i + 1:05}-of-{n_parts:05}.gguf") for i in range(n_parts)]


def _check_part(part: Part, no: int, n_parts: int) -> None:
    """Check that a part's metadata agrees with its file name."""
    found = part.metadata.integer(_SPLIT_NO, 0, 65_535)
    if found != no:
        raise part.metadata.error(_SPLIT_NO, f"is {found}, but the file name says {no}")
    count = part.metadata.integer(_SPLIT_COUNT, 0, 65_535, n_parts)
    if count != n_parts:
        raise part.metadata.error(_SPLIT_COUNT, f"is {count}, but the first part says {n_parts}")


def _cannot_open(path: Path, no: int, error: OSError) -> str:
    """Return the message for a file that does not open."""
    if error.errno == errno.ENOENT:
        if no:
            return f"{path}: part {no + 1} of the model is missing; put all parts into one folder"
        return f"{path}: no such file"
    return f"{path}: cannot open: {error.strerror}"


def _node_kind(mode: int) -> str:
    """Name the kind of a path that is not a regular file."""
    kinds = (
        (stat.S_ISDIR, "is a directory"),
        (stat.S_ISFIFO, "is a pipe"),
        (stat.S_ISCHR, "is a device"),
        (stat.S_ISBLK, "is a device"),
    )
    return next((words for test, words in kinds if test(mode)), "is a special file")


def _shrank(part: Part, size: int) -> ModelFileError:
    return ModelFileError(
        f"{part.path}: the file shrank from {part.size} to {size} bytes while it was in use"
    )
