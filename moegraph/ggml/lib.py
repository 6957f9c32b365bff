"""Load the patched ggml and llama libraries and the extension module that calls them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import debug_level
from ..errors import NativeError
from .patchset import require_one_patchset

if TYPE_CHECKING:
    from ._native import FFI, Lib

_LIB_DIR = Path(__file__).resolve().parent.parent / "lib"
_EXTENSION = Path(__file__).resolve().parent / "_native.abi3.so"
# On so few CPUs, waiting threads sleep. ggml's threads meet after every node of a graph, and
# libgomp has them spin there for milliseconds before they sleep, as in llama.cpp. That is right
# on a machine of one's own; but where any other process takes the CPU of one thread, the rest
# burn their time slices waiting for it. Measured with the shipped model and 2 threads on 2 CPUs
# beside compilers: spinning 12 to 46 tok/s, sleeping at once 120 to 286; GOMP_SPINCOUNT=1000
# 41 to 63, 10000 3 to 10. The best moments, 16 undisturbed tokens, were alike. With more CPUs
# the others find room, and waking many threads after every node takes longer: there, libgomp's
# own way stays.
_FEW_CPUS = 4
_WAIT_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def library_dir() -> Path:
    """Return the folder of the shared libraries.

    Two sets of ggml libraries in one process collapse into whichever was loaded first, so
    llama-cpp-python has to load these and not its own.
    """
    return _LIB_DIR


def _load() -> tuple[FFI, Lib]:
    """Import the extension, check the patch set and install the log and abort hooks."""
    require_one_patchset(_EXTENSION, _LIB_DIR)
    try:
        with _waiting_asleep():
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
            f"the libggml-base.so in this process carries patch set {loaded}, this build of "
            f"moegraph needs {built}; load moegraph before other users of ggml"
        )
    lib.mg_install_callbacks(1 if debug_level() >= 2 else 0)
    return ffi, lib


@contextmanager
def _waiting_asleep() -> Iterator[None]:
    """Have libgomp, if it is loaded meanwhile, let threads sleep while they wait; see _FEW_CPUS.

    What the user set stays as it is, and so does the environment of child processes.
    """
    if len(os.sched_getaffinity(0)) > _FEW_CPUS or any(s in os.environ for s in _WAIT_SETTINGS):
        yield
        return
    os.environ["OMP_WAIT_POLICY"] = "passive"
    try:
        yield
    finally:
        del os.environ["OMP_WAIT_POLICY"]


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


def llama_commit() -> str:
    """Return the commit of llama.cpp that the libraries were built from, before the patches."""
    return ffi.string(C.mg_llama_commit()).decode("ascii")


def versions() -> dict[str, str]:
    """Return what the libraries are: versions of ggml, of llama.cpp and of the patches."""
    return {
        "ggml": ffi.string(C.ggml_version()).decode("ascii"),
        "llama_commit": llama_commit(),
        "patchset": patchset(),
    }


def last_error() -> str:
    """Return ggml's last error line and forget it; empty when there was none."""
    out = ffi.new("char[512]")
    C.mg_last_error(out, 512)
    return ffi.string(out).decode("utf-8", "replace")
