"""Files that a command writes: opened before the model is loaded, truncated by the first write."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self


class OutputFile:
    """A file that is opened at once but truncated only by the first write.

    If the command fails before its first write, an old file keeps its content and a new file is
    removed. A new file is also removed if a write fails, because it is not complete.
    Devices and pipes such as /dev/null also work.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written = self._failed = False
        self._created = not os.path.lexists(path)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"{path}: cannot write: {error.strerror}") from error
        self.is_regular = stat.S_ISREG(os.fstat(fd).st_mode)
        self._file: BinaryIO = os.fdopen(fd, "wb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        try:
            if not self._written and self.is_regular:
                self._file.truncate(0)
            self._written = True
            view = memoryview(data).cast("B")
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._failed = True
            raise ConfigError(f"{self.path}: cannot write: {error.strerror}") from error

    def close(self) -> None:
        """Close the file, and remove it if it is new and nothing, or not all, was written."""
        if self._file.closed:
            return
        self._file.close()
        if self._created and self.is_regular and (self._failed or not self._written):
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class NpyWriter(OutputFile):
    """Writes rows of F32 to a .npy file as they come; `close` completes the header."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._n_columns = self._n_rows = 0
        if not self.is_regular:
            self.close()
            raise ConfigError(f"{path}: cannot write an array to a device or a pipe")

    def write_rows(self, rows: npt.NDArray[np.float32]) -> None:
        """Append rows; numpy shape [n_rows, n_columns]."""
        if self._n_columns == 0:
            self._n_columns = rows.shape[1]
            self.write(_npy_header(0, self._n_columns))
        self._n_rows += len(rows)
        self.write(np.ascontiguousarray(rows, dtype="<f4").data)

    def close(self) -> None:
        """Write the number of rows into the header and close the file."""
        if self._n_columns and not self._file.closed:
            os.pwrite(self._file.fileno(), _npy_header(self._n_rows, self._n_columns), 0)
        super().close()


def _npy_header(n_rows: int, n_columns: int) -> bytes:
    """Return a version 1.0 header; it has 128 bytes for any number of rows."""
    fields = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({n_rows}, {n_columns}), }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + f"{fields:<117}\n".encode()
