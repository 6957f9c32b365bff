"""Files of tensors on disk, open and mapped: one file, or several parts.

A caller gets at a tensor's bytes in two ways. `map` returns a view of the mapped file, which costs
nothing until it is read. If the file is truncated later, reading the view raises SIGBUS, which ends
the process unless ggml/mapped.py watches the `mappings`. `read` copies with pread into the caller's
memory and reports a truncated file as an error.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType

from ..closing import Closable
from ..errors import InternalError, ModelFileError

# Linux reads into at most this many pieces of memory in one call.
_MAX_ROWS = 1024


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a model file.

    Shapes: ne in ggml order, padded with 1 to four entries.
    Units: nbytes and offset in bytes; offset counts from the start of the part's file.
    """

    name: str
    type: GGMLQuantizationType
    ne: tuple[int, int, int, int]
    n_dims: int
    nbytes: int
    part: int
    offset: int

    @property
    def n_params(self) -> int:
        """Return the number of elements."""
        return self.ne[0] * self.ne[1] * self.ne[2] * self.ne[3]


@dataclass(frozen=True)
class Opened:
    """An open file; stamp: its size and modification time (ns), which change with its bytes."""

    path: Path
    fd: int
    stamp: tuple[int, int]

    @property
    def size(self) -> int:
        """Return its bytes when it was opened."""
        return self.stamp[0]

    def shrank(self, size: int) -> ModelFileError:
        """Return the error for a file that has fewer bytes now."""
        return ModelFileError(
            f"{self.path}: the file shrank from {self.size} to {size} bytes while it was in use"
        )


class TensorFile(Closable):
    """Open, checked files of tensors; a context manager.

    path: of the first part. tensors: those of all parts by name, in file order. warnings: one line
    for each harmless oddity.
    """

    warnings: tuple[str, ...] = ()

    def __init__(self, path: Path) -> None:
        """Open the first part and the parts that it announces, and check all of them."""
        self.path = path
        self._parts: list[Opened] = []
        self._maps: dict[int, mmap.mmap] = {}
        # Closes the files if the caller does not, at exit at the latest.
        self._finalizer = weakref.finalize(self, _close_all, self._parts)
        try:
            self.tensors = self._scan()
        except BaseException:
            self.close()
            raise

    def _scan(self) -> dict[str, TensorInfo]:
        """Open all parts with `_open`, and check them; return their tensors."""
        raise NotImplementedError

    def _open(self, path: Path) -> Opened:
        """Open the next part, and refuse what is not a regular file."""
        try:
            # O_NONBLOCK: opening a FIFO would otherwise wait for a writer.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise ModelFileError(_cannot_open(path, len(self._parts), error)) from error
        except ValueError as error:
            raise ModelFileError(f"{path}: not a file name: {error}") from error
        status = os.fstat(fd)
        self._parts.append(Opened(path, fd, _stamp(status)))
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path}: {_node_kind(status.st_mode)}, not a model file")
        return self._parts[-1]

    @property
    def paths(self) -> tuple[Path, ...]:
        """Return the path of every part, in order."""
        return tuple(part.path for part in self._parts)

    @property
    def n_bytes(self) -> int:
        """Return the size of all parts in bytes."""
        return sum(part.size for part in self._parts)

    @property
    def stamps(self) -> tuple[tuple[int, int], ...]:
        """Return the size and the modification time (ns) of every part when it was opened."""
        return tuple(part.stamp for part in self._parts)

    def map(self, info: TensorInfo) -> np.ndarray:
        """Return a read-only view of a tensor's bytes in the mapped file.

        Shapes: [nbytes] uint8. The view stays valid after close().
        """
        part = self._part(info.part)
        try:
            size = os.fstat(part.fd).st_size
        except OSError as error:
            raise ModelFileError(f"{part.path}: cannot map the file: {error}") from error
        if size < info.offset + info.nbytes:
            raise part.shrank(size)
        return np.frombuffer(self._mapping(info.part), np.uint8, info.nbytes, info.offset)

    def mappings(self) -> list[tuple[Path, np.ndarray]]:
        """Return (path, all bytes) of every part, in order; `map` returns slices of these bytes.

        Shapes: [size of the part] uint8.
        """
        return [
            (path, np.frombuffer(self._mapping(no), np.uint8)) for no, path in enumerate(self.paths)
        ]

    def _mapping(self, no: int) -> mmap.mmap:
        part = self._part(no)
        try:
            if no not in self._maps:
                self._maps[no] = mmap.mmap(part.fd, part.size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{part.path}: cannot map {part.size} bytes: {error}") from error
        return self._maps[no]

    def read(self, info: TensorInfo, out: np.ndarray, start: int = 0) -> None:
        """Copy a tensor's bytes, from byte `start` of the tensor on, into `out`.

        Shapes: out [n] uint8, or [n_rows, n] uint8 with any distance between rows; each row is
        contiguous and writable, and start + n * n_rows <= info.nbytes. Thread-safe.
        """
        part = self._part(info.part)
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
            _read(part, info, views, start + at * rows.shape[1])

    def check_unchanged(self) -> None:
        """Refuse a file that was written to after it was opened, by size and modification time.

        Removing the path, or renaming another file over it, leaves the opened file unchanged.
        """
        for no in range(len(self.paths)):
            part = self._part(no)
            try:
                now = _stamp(os.fstat(part.fd))
            except OSError as error:
                raise ModelFileError(f"{part.path}: cannot stat: {error.strerror}") from error
            if now != part.stamp:
                had = f"it had {part.size} bytes and has {now[0]}"
                if now[0] == part.size:
                    had = "its size is the same, its modification time is not"
                raise ModelFileError(
                    f"{part.path}: the file was written to while the model was in use: {had}; "
                    "load the model again"
                )

    def opened_paths(self) -> list[str]:
        """Return a path to the checked file of each part; valid until close().

        The part's own path may lead to another file by now.
        """
        return [f"/proc/self/fd/{self._part(no).fd}" for no in range(len(self.paths))]

    def _part(self, no: int) -> Opened:
        """Return a part, as long as it is open."""
        if not self._finalizer.alive:
            raise InternalError(f"{self.path}: the model file is closed")
        return self._parts[no]

    def close(self) -> None:
        """Close the files; views that map() returned stay valid. A second call does nothing."""
        self._maps.clear()
        self._finalizer()


def _close_all(parts: list[Opened]) -> None:
    for part in parts:
        os.close(part.fd)


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _read(part: Opened, info: TensorInfo, views: list[memoryview], start: int) -> None:
    """Fill views, one after the other, with a tensor's bytes from byte `start` on."""
    at = info.offset + start
    while views:
        try:
            n = os.preadv(part.fd, views, at)
        except OSError as error:
            raise ModelFileError(
                f"{part.path}: cannot read tensor {info.name}: {error.strerror}"
            ) from error
        if n == 0 and any(len(view) for view in views):
            raise part.shrank(os.fstat(part.fd).st_size)
        at += n
        while views and n >= len(views[0]):
            n -= len(views.pop(0))
        if views:
            views[0] = views[0][n:]


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
