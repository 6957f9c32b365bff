"""Load the patched ggml and llama libraries and the extension module that calls them."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import debug_level
from ..errors import NativeError
from .backends import choose_cpu, find_cuda
from .patchset import require_one_patchset

if TYPE_CHECKING:
    from . import _native as native
    from ._native import FFI, Lib

_LIB_DIR = Path(__file__).resolve().parent.parent / "lib"
_EXTENSION = Path(__file__).resolve().parent / "_native.abi3.so"
# llama.cpp's name of the chosen instructions; '' if there was no choice.
CPU_VARIANT, _CPU_LIBRARY = choose_cpu(_LIB_DIR)
_CUDA_LIBRARY = find_cuda(_LIB_DIR)
# Libraries of backends to which libggml is not linked, in the order in which it would list them.
_LOADABLE = [*([_CUDA_LIBRARY] if _CUDA_LIBRARY else []), *([_CPU_LIBRARY] if CPU_VARIANT else [])]
_registering = threading.Lock()


def library_dir() -> Path:
    """Return the folder of the shared libraries.

    llama-cpp-python must load its libraries from here: of two sets of ggml libraries in one
    process, only the one that was loaded first is used.
    """
    return _LIB_DIR


def _load() -> tuple[FFI, Lib]:
    """Import the extension, check the patch set and install the log and abort hooks."""
    require_one_patchset(_EXTENSION, _LIB_DIR, _LOADABLE)
    try:
        for path in reversed(_LOADABLE):  # the CPU's first, which brings libggml-base
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        from . import _native
    except (ImportError, OSError) as error:
        raise NativeError(_load_failure(error)) from error
    ffi, lib = _native.ffi, _native.lib
    built, loaded = (
        ffi.string(text).decode("ascii", "replace")
        for text in (lib.mg_patchset_built(), lib.moegraph_patchset())
    )
    if built != loaded:
        raise NativeError(
            f"the libggml-base.so in this process carries patch set {loaded}, this build of "
            f"moegraph needs {built}; load moegraph before other users of ggml"
        )
    lib.mg_install_callbacks(1 if debug_level() >= 2 else 0)
    return ffi, lib


def _load_failure(error: ImportError | OSError) -> str:
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


def cpu_converter(name: str) -> Any:
    """Return a function of ggml's CPU backend that converts numbers to F32, `ggml_to_float_t`.

    They have the processor's instructions; those of ggml's base library work on any processor.
    """
    library = ctypes.CDLL(str(_CPU_LIBRARY))
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    return ffi.cast("ggml_to_float_t", address)


def patchset() -> str:
    """Return the patch set of the loaded libraries: 16 hex digits."""
    return ffi.string(C.moegraph_patchset()).decode("ascii")


def llama_commit() -> str:
    """Return the commit of llama.cpp that the libraries were built from, before the patches."""
    return ffi.string(C.mg_llama_commit()).decode("ascii")


def versions() -> dict[str, str]:
    """Return ggml's version, llama.cpp's commit and the patch set of the libraries."""
    return {
        "ggml": ffi.string(C.ggml_version()).decode("ascii"),
        "llama_commit": llama_commit(),
        "patchset": patchset(),
    }


def summary() -> str:
    """Return the versions in one line."""
    return "ggml {ggml}, llama.cpp {llama_commit} with patch set {patchset}".format(**versions())


def devices() -> list[native.ggml_backend_device_ptr]:
    """Return ggml's devices, in its order; this opens no context."""
    with _registering:
        ggml = ctypes.CDLL(str(_LIB_DIR / "libggml.so"))
        ggml.ggml_backend_load.restype = ctypes.c_void_p
        while _LOADABLE:
            path = _LOADABLE[0]
            if not ggml.ggml_backend_load(str(path).encode()):
                raise NativeError(f"{path} cannot be used: {last_error() or 'not on this machine'}")
            del _LOADABLE[0]
    return [C.ggml_backend_dev_get(i) for i in range(C.ggml_backend_dev_count())]


def device_kinds() -> list[str]:
    """Return ggml's names of devices without their numbers; this opens no context."""
    names = (ffi.string(C.ggml_backend_dev_name(one)).decode() for one in devices())
    return list(dict.fromkeys(name.rstrip("0123456789") for name in names))


def last_error() -> str:
    """Return and clear ggml's last error line; empty if there was none."""
    out = ffi.new("char[512]")
    C.mg_last_error(out, 512)
    return ffi.string(out).decode("utf-8", "replace")
