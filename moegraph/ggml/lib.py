"""Load the patched ggml and llama libraries and the extension module that calls them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..config import debug_level
from ..errors import NativeError

_LIB_DIR = Path(__file__).resolve().parent.parent / "lib"


def library_dir() -> Path:
    """Return the folder of the shared libraries and point llama-cpp-python at it.

    Two sets of ggml libraries in one process collapse into whichever was loaded first, so
    llama-cpp-python has to load these and not its own: call this before importing it.
    """
    os.environ["LLAMA_CPP_LIB_PATH"] = str(_LIB_DIR)
    return _LIB_DIR


def _load() -> tuple[Any, Any]:
    """Import the extension, check the patch set and install the log and abort hooks."""
    try:
        from . import _native
    except ImportError as error:
        raise NativeError(_load_failure(error)) from error
    ffi, lib = _native.ffi, _native.lib
    built, loaded = (
        ffi.string(text).decode("ascii", "replace")
        for text in (lib.mg_patchset_built(), lib.mg_patchset_loaded())
    )
    if built != loaded:
        raise NativeError(
            f"{_LIB_DIR}: libraries carry patch set {loaded}, this build of moegraph needs "
            f"{built}; run scripts/build again"
        )
    lib.mg_install_callbacks(1 if debug_level() >= 2 else 0)
    return ffi, lib


def _load_failure(error: ImportError) -> str:
    text = str(error)
    if "libcuda.so" in text:
        return (
            "these libraries were built for CUDA but no NVIDIA driver (libcuda.so.1) is installed; "
            "install the driver or build for the CPU with scripts/build --cpu"
        )
    if "libcublas" in text or "libcudart" in text:
        return (
            f"a CUDA library is missing ({text}); install nvidia-cublas and nvidia-cuda-runtime "
            "or add the toolkit's folder to LD_LIBRARY_PATH"
        )
    if "_native" in text and "cannot import name" in text:
        return "the native libraries are not built; run scripts/build --cpu (or --cuda-arch ...)"
    return f"the native libraries cannot be loaded: {text}"


ffi, C = _load()


def patchset() -> str:
    """Return the patch set of the loaded libraries: 16 hex digits."""
    return ffi.string(C.mg_patchset_loaded()).decode("ascii")


def last_error() -> str:
    """Return ggml's last error line and forget it; empty when there was none."""
    out = ffi.new("char[512]")
    C.mg_last_error(out, 512)
    return ffi.string(out).decode("utf-8", "replace")
