"""Emit the C source of the extension module moegraph.ggml._native.

Usage: python _build.py OUT.c

Runs during the build, when cffi is installed and moegraph is not, so it imports only cffi.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import cffi

NATIVE = Path(__file__).resolve().parents[2] / "native"
DECL = Path(__file__).resolve().parent / "decl"

# The order matters: a file may use types that earlier files declare. decl/ chooses from ggml's
# headers; of our own headers all is declared.
DECLARATIONS = (
    DECL / "mman.h",
    DECL / "ggml.h",
    NATIVE / "ggml" / "include" / "moegraph.h",
    DECL / "ggml-backend.h",
    NATIVE / "ggml" / "include" / "moegraph-rpc.h",
    NATIVE / "py" / "shim.h",
    NATIVE / "py" / "sigbus.h",
    NATIVE / "py" / "cpu_ffn.h",
    NATIVE / "py" / "choose.h",
    NATIVE / "py" / "places.h",
)

_HEADERS = ("shim.h", "moegraph-rpc.h", "sigbus.h", "cpu_ffn.h", "choose.h", "places.h")
SOURCE = "".join(f'#include "{name}"\n' for name in _HEADERS) + "#include <sys/mman.h>\n"


def declarations(files: Sequence[Path] = DECLARATIONS) -> str:
    """Concatenate what cffi declares."""
    return "\n".join(
        path.read_text("utf-8") if path.parent == DECL else _cut(path) for path in files
    )


def _cut(header: Path) -> str:
    """Return what a header of ours has in `extern "C"`, as cffi reads it."""
    text = header.read_text("utf-8")
    found = re.search(r'^extern "C" \{\n#endif\n(.*)^#ifdef __cplusplus\n\}', text, re.M | re.S)
    if found is None:
        raise ValueError(f'{header}: no declarations in extern "C"')
    # the C compiler computes the constants
    constants = re.sub(r"^( *#define \w+) .*$", r"\1 ...", found[1], flags=re.M)
    return re.sub(r"GGML_(BACKEND_)?API ", "", constants)


def emit(out: Path) -> None:
    """Write the C source to `out`."""
    ffi = cffi.FFI()
    ffi.cdef(declarations())
    ffi.set_source("moegraph.ggml._native", SOURCE)
    ffi.emit_c_code(str(out))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: _build.py OUT.c")
    emit(Path(sys.argv[1]))
