"""Read the patch set of each library from its file, and refuse a mixture before loading.

Loading a library with other patches may fail on a missing symbol, or succeed with other struct
layouts. So every library that we build carries the hash of its patches in an ELF note
(native/py/patchset_note.c). This module checks the notes before the dynamic linker loads a library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

from ..errors import NativeError

LIBRARIES = ("ggml-base", "ggml-cpu", "ggml", "ggml-cuda", "ggml-rpc", "llama", "mtmd")

_N_DIGITS = 16
_NOTE_START = struct.pack("<III12s", len("moegraph") + 1, _N_DIGITS, 1, b"moegraph")
# Linkers put notes right after the headers, so a library of hundreds of MiB need not be read.
_MOST = 1 << 16


def patchset_of(path: Path) -> str | None:
    """Return the 16 hex digits in a library's note, or None if it has no note."""
    with open(path, "rb") as file:
        _, found, rest = file.read(_MOST).partition(_NOTE_START)
    return rest[:_N_DIGITS].decode("ascii", "replace") if found else None


def require_one_patchset(
    extension: Path, folder: Path, others: Iterable[Path], remedy: str
) -> None:
    """Refuse libraries in `folder`, and others, that were not built with the extension's patches.

    Files that do not exist are skipped; for them the dynamic linker reports the error.
    """
    if not extension.is_file():
        return
    try:
        needed = patchset_of(extension)
        if needed is None:
            raise NativeError(f"{extension} carries no patch set; {remedy}")
        for path in (*(folder / f"lib{name}.so" for name in LIBRARIES), *others):
            found = patchset_of(path) if path.exists() else needed
            if found != needed:
                raise NativeError(
                    f"{path} carries patch set {found or 'none'}, {extension.name} needs {needed}; "
                    f"a mixture of builds is not loaded; {remedy}"
                )
    except OSError as error:
        raise NativeError(f"{error.filename}: cannot read: {error.strerror}") from error
