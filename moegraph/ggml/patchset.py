"""The patch set that a library was built with, read from its file before it is loaded.

Loading a library of other patches may already fail on a symbol that is missing, or may not fail at
all where only layouts differ. So every library of ours carries the hash of its patches in an ELF
note (patchset_note.c), and a mixture is refused before the dynamic linker sees it.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from ..errors import NativeError

LIBRARIES = ("ggml-base", "ggml-cpu", "ggml", "ggml-cuda", "llama")

_HEADER_SIZE = 64
_ELF_64_LITTLE = b"\x7fELF\x02\x01"
# type, flags, offset in the file, two addresses, size in the file
_SEGMENT = struct.Struct("<IIQQQQ")
_PT_NOTE = 4
_MAX_NOTES = 1 << 16
_N_DIGITS = 16
_NOTE_START = struct.pack("<III12s", len("moegraph") + 1, _N_DIGITS, 1, b"moegraph")


def patchset_of(path: Path) -> str | None:
    """Return the 16 hex digits that a library carries, or None where there are none.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < _HEADER_SIZE:
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _find_note(data)


def _find_note(data: mmap.mmap) -> str | None:
    """Return the text of our note in an ELF file; slices end where the file does."""
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
    """Refuse libraries that were not built with the patches of the extension.

    What is not there is left to the dynamic linker and its message.

    Raises:
        NativeError: names the library and both patch sets.
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
