"""Emit the C source of the extension module moegraph.ggml._native.

Usage: python _build.py OUT.c

Runs during the build, when cffi is installed and moegraph is not, so it imports only cffi.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cffi

HERE = Path(__file__).resolve().parent

# The order matters: a file may use types that earlier files declare.
DECLARATIONS = (
    "ggml.h",
    "moegraph.h",
    "ggml-backend.h",
    "shim.h",
    "sigbus.h",
    "cpu_ffn.h",
)

SOURCE = '#include "shim.h"\n#include "sigbus.h"\n#include "cpu_ffn.h"\n'


def declarations(folder: Path = HERE / "decl") -> str:
    """Concatenate the declaration files.

    Raises:
        ValueError: the files of the folder are not those of DECLARATIONS.
    """
    present = {path.name for path in folder.glob("*.h")}
    if present != set(DECLARATIONS):
        odd = ", ".join(sorted(present ^ set(DECLARATIONS)))
        raise ValueError(
            f"{folder}: DECLARATIONS in {Path(__file__).name} and the files differ: {odd}"
        )
    return "\n".join((folder / name).read_text("utf-8") for name in DECLARATIONS)


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
