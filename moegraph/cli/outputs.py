"""Files that a command writes: opened before the model is loaded, truncated by the first write."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError


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
        self._is_regular = stat.S_ISREG(os.fstat(fd).st_mode)
        self._file: BinaryIO = os.fdopen(fd, "wb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        try:
            if not self._written and self._is_regular:
                self._file.truncate(0)
            self._written = True
            view = memoryview(data).cast("B")
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._failed = True
            raise ConfigError(f"{self.path}: cannot write: {error.strerror}") from error

    def rewrite_start(self, data: bytes) -> None:
        """Overwrite the first bytes of a regular file."""
        os.pwrite(self._file.fileno(), data, 0)

    def require_regular(self) -> None:
        """Refuse a device or a pipe."""
        if not self._is_regular:
            raise ConfigError(f"{self.path}: cannot write an array to a device or a pipe")

    def close(self) -> None:
        """Close the file, and remove it if it is new and nothing, or not all, was written."""
        if self._file.closed:
            return
        self._file.close()
        if self._created and self._is_regular and (self._failed or not self._written):
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TokenStream:
    """Token ids as little-endian 32-bit integers on an open file descriptor; -1 ends them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        try:
            os.write(fd, b"")
        except OSError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: OSError) -> ConfigError:
        return ConfigError(f"--stream-fd {self._fd}: cannot write: {error.strerror}")

    def write(self, token: int) -> None:
        """Write one id."""
        view = memoryview(token.to_bytes(4, "little", signed=True))
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise self._refusal(error) from error

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if not isinstance(error, ConfigError):  # the descriptor may be what failed
            self.write(-1)


class NpyWriter:
    """Writes rows of F32 to a .npy file as they come; `close` completes the header."""

    def __init__(self, path: Path) -> None:
        self._out = OutputFile(path)
        self._n_columns = 0
        self._n_rows = 0
        try:
            self._out.require_regular()
        except ConfigError:
            self._out.close()
            raise

    def write(self, rows: npt.NDArray[np.float32]) -> None:
        """Append rows; numpy shape [n_rows, n_columns]."""
        if self._n_columns == 0:
            self._n_columns = rows.shape[1]
            self._out.write(_npy_header(0, self._n_columns))
        self._n_rows += len(rows)
        self._out.write(np.ascontiguousarray(rows, dtype="<f4").data)

    def close(self) -> None:
        """Write the number of rows into the header and close the file."""
        if self._n_columns:
            self._out.rewrite_start(_npy_header(self._n_rows, self._n_columns))
        self._out.close()

    def __enter__(self) -> NpyWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _npy_header(n_rows: int, n_columns: int) -> bytes:
    """Return a version 1.0 header; it has 128 bytes for any number of rows."""
    fields = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({n_rows}, {n_columns}), }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + f"{fields:<117}\n".encode()
