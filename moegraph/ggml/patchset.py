"""Read the patch set of each library from its file, and refuse a mixture before loading.

Loading a library with other patches may fail on a missing symbol, or succeed with other struct
layouts. So every library that we build carries the hash of its patches in an ELF note
(native/py/patchset_note.c). This module checks the notes before the dynamic linker loads a library.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from ..errors import NativeError

LIBRARIES = ("ggml-base", "ggml-cpu", "ggml", "ggml-cuda", "ggml-rpc", "llama")

_HEADER_SIZE = 64
_ELF_64_LITTLE = b"\x7fELF\x02\x01"
# type, flags, offset in the file, two addresses, size in the file
_SEGMENT = struct.Struct("<IIQQQQ")
_PT_NOTE = 4
_MAX_NOTES = 1 << 16
_N_DIGITS = 16
_NOTE_START = struct.pack("<III12s", len("moegraph") + 1, _N_DIGITS, 1, b"moegraph")


def patchset_of(path: Path) -> str | None:
    """Return the 16 hex digits in a library's note, or None if it has no note."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < _HEADER_SIZE:
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _find_note(data)


def _find_note(data: mmap.mmap) -> str | None:
    """Return the text of our note in an ELF file, or None; slices never go past its end."""
    if data[:6] != _ELF_64_LITTLE:
        return None
    (start,) = struct.unpack_from("<Q", data, 32)
    size, n = struct.unpack_from("<HH", data, 54)
    for at in range(start, start + size * n, max(size, 1)):
        segment = data[at : at + _SEGMENT.size]
        if len(segment) < _SEGMENT.size:
            return None
        kind, _, offset, _, _, n_bytes = _SEGMENT.unpack(segment)
        if kind == _PT_NOTE:
            notes = data[offset : offset + min(n_bytes, _MAX_NOTES)]
            _, found, rest = notes.partition(_NOTE_START)
            if found:
                return rest[:_N_DIGITS].decode("ascii", "replace")
    return None


def require_one_patchset(extension: Path, folder: Path) -> None:
    """Refuse libraries in `folder` that were not built with the extension's patches.

    Files that do not exist are skipped; for them the dynamic linker reports the error.
    """
    if not extension.is_file():
        return
    try:
        needed = patchset_of(extension)
        if needed is None:
            raise NativeError(f"{extension} carries no patch set; run scripts/build again")
        for path in (folder / f"lib{name}.so" for name in LIBRARIES):
            found = patchset_of(path) if path.exists() else needed
            if found != needed:
                raise NativeError(
                    f"{path} carries patch set {found or 'none'}, {extension.name} needs {needed}; "
                    "a mixture of builds is not loaded, run scripts/build again"
                )
    except OSError as error:
        raise NativeError(f"{error.filename}: cannot read: {error.strerror}") from error
