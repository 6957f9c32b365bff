"""Watched mappings of model files: truncating a file in use is an error, not a signal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import ModelFileError
from ..units import format_bytes
from .handles import Handle, Owner
from .lib import C, ffi

if TYPE_CHECKING:
    from . import _native


class Watch(Handle["_native.mg_watch_ptr"]):
    """A mapping that reads as zeros where its file can no longer be read; see sigbus.h."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        # as a parent, the array keeps the mapping alive while it is watched
        ptr: _native.mg_watch_ptr = C.mg_watch(ffi.cast("void *", data.ctypes.data), len(data))
        super().__init__(ptr, C.mg_unwatch, data)

    @property
    def fault(self) -> int:
        """Offset in bytes of the first fault, or -1."""
        return C.mg_watch_fault(self.ptr)


class WatchedFiles(Owner):
    """Watches the mappings of a model's parts, given as (path, all bytes)."""

    def __init__(self, parts: Sequence[tuple[Path, npt.NDArray[np.uint8]]]) -> None:
        self._seen = C.mg_watch_faults()
        self._failed = ""
        self._watches: list[tuple[Path, int, Watch]] = []
        self.add(parts)

    def add(self, parts: Sequence[tuple[Path, npt.NDArray[np.uint8]]]) -> None:
        """Watch further mappings; nothing of them may have been read before."""
        for path, data in parts:
            self._watches.append((path, len(data), self.own(Watch(data))))

    def check(self) -> None:
        """Raise a ModelFileError, from then on, if a byte of a file could not be read."""
        n_faults = C.mg_watch_faults()
        if n_faults != self._seen:
            self._seen = n_faults
            for path, size, watch in self._watches:
                if watch.fault >= 0 and not self._failed:
                    self._failed = (
                        f"{path}: byte {watch.fault} could not be read while the model was in use: "
                        f"the file had {format_bytes(size)} and {_now(path)}; load the model again"
                    )
        if self._failed:
            raise ModelFileError(self._failed)

    def close(self) -> None:
        """Stop watching."""
        super().close()
        self._watches.clear()


def _now(path: Path) -> str:
    try:
        return f"has {format_bytes(os.stat(path).st_size)} now"
    except OSError as error:
        return f"now: {error.strerror}"
