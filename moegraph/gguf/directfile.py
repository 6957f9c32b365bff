"""Reads tensors past the page cache, which would else hold again what the reader keeps."""

from __future__ import annotations

import errno
import mmap
import os
import threading

import numpy as np
import numpy.typing as npt

from ..units import MiB, round_up
from .tensorfile import TensorFile, TensorInfo

# A disk is asked for so much at a time: enough for its full speed, and several threads share the
# matrices of one expert.
PIECE_BYTES = 1 * MiB
# What addresses, offsets and lengths must be multiples of; no disk needs more.
_ALIGNMENT = 4096


class DirectFile:
    """The parts of a file of tensors, opened with O_DIRECT. Thread-safe.

    is_direct: False where the file system refuses that; reads then go through the page cache. The
    file of tensors must live as long.
    """

    def __init__(self, file: TensorFile) -> None:
        self._file, self._local = file, threading.local()
        self._fds: list[int] = []
        self.is_direct = True
        try:
            for path in file.opened_paths():
                self._fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
        except OSError:
            self.is_direct = False

    def read(self, info: TensorInfo, out: npt.NDArray[np.uint8], start: int) -> None:
        """Do as `TensorFile.read` for up to PIECE_BYTES in one row; out: U8 [n].

        Raises:
            ModelFileError: the bytes cannot be read, or the file has changed since it was opened.
        """
        if not self.is_direct or not self._read(info, out, start):
            self._file.read(info, out, start)
        self._file.check_unchanged()  # what a pass reads now is compared with nothing else

    def _read(self, info: TensorInfo, out: npt.NDArray[np.uint8], start: int) -> bool:
        """Return whether that worked; what fails is tried again through the page cache."""
        at = info.offset + start
        first = at - at % _ALIGNMENT
        needed, n = at - first + len(out), 0
        memory = self._memory()
        view = memoryview(memory)[: round_up(needed, _ALIGNMENT)]
        while n < needed:  # a call may read less than was asked for
            done = n - n % _ALIGNMENT
            try:
                n_read = os.preadv(self._fds[info.part], [view[done:]], first + done)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    self.is_direct = False
                return False
            if done + n_read <= n:
                return False
            n = done + n_read
        out[:] = np.frombuffer(memory, np.uint8, len(out), at - first)
        return True

    def _memory(self) -> mmap.mmap:
        """Return aligned memory of this thread."""
        memory: mmap.mmap | None = getattr(self._local, "memory", None)
        if memory is None:
            memory = self._local.memory = mmap.mmap(-1, PIECE_BYTES + 2 * _ALIGNMENT)
        return memory

    def close(self) -> None:
        """Close the files; no read may be under way."""
        while self._fds:
            os.close(self._fds.pop())
