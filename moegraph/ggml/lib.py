"""Load the patched ggml and llama libraries and the extension module that calls them."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import debug_level
from ..errors import NativeError
from . import cuda
from .backends import choose_cpu
from .free_memory import system_text
from .patchset import LIBRARIES, require_one_patchset

if TYPE_CHECKING:
    from . import _native as native
    from ._native import FFI, Lib

_EXTENSION = Path(__file__).resolve().parent / "_native.abi3.so"
# llama.cpp's name of the chosen instructions; '' if there was no choice.
CPU_VARIANT, _CPU_LIBRARY = choose_cpu(cuda.FOLDER)
_registering = threading.Lock()


def library_dir() -> Path:
    """Return the folder of the shared libraries.

    llama-cpp-python must load its libraries from here: of two sets of ggml libraries in one
    process, only the one that was loaded first is used.
    """
    return cuda.FOLDER


def _load() -> tuple[FFI, Lib]:
    """Import the extension, check the patch set and install the log and abort hooks."""
    packages = cuda.packaged()
    remedy = f"install packages of one version: {cuda.remedy(*packages)}"
    if cuda.is_checkout():
        remedy = "run scripts/build again"
    require_one_patchset(_EXTENSION, cuda.FOLDER, [_CPU_LIBRARY, *packages], remedy)
    try:
        if CPU_VARIANT:
            ctypes.CDLL(str(_CPU_LIBRARY), ctypes.RTLD_GLOBAL)
        from . import _native
    except (ImportError, OSError) as error:
        raise NativeError(_foreign() or _load_failure(str(error))) from error
    ffi, lib = _native.ffi, _native.lib
    if foreign := _foreign():
        raise NativeError(foreign)
    lib.mg_install_callbacks(1 if debug_level() >= 2 else 0)
    return ffi, lib


def _foreign() -> str:
    """Return which library of another llama.cpp this process has in place of ours, if any."""
    lines = system_text(Path("/proc/self/maps")).splitlines()
    paths = {Path(line[at:]) for line in lines if (at := line.find("/")) > 0}
    for name in (f"lib{name}.so" for name in LIBRARIES):
        found = [path for path in paths if path.name == name]
        ours = (cuda.FOLDER / name).resolve()
        if found and ours.exists() and ours not in found:
            return (
                f"{found[0]}, of another build, is in this process in place of {ours}; unset "
                "LD_PRELOAD and LD_LIBRARY_PATH, or import moegraph before other users of ggml"
            )
    return ""


def _load_failure(text: str, add: str = "") -> str:
    """Say what a library lacks; text: of the dynamic linker. add: what brings CUDA's libraries."""
    if "libcuda.so" in text:
        return (
            "these libraries were built for CUDA but no NVIDIA driver (libcuda.so.1) is installed; "
            "install the driver or build for the CPU with scripts/build --cpu"
        )
    if missing := re.search(r"lib(?:cublas|cudart)\w*\.so\.(\d+)", text):
        add = add or f"install nvidia-cublas and nvidia-cuda-runtime of CUDA {missing[1]}"
        return f"a CUDA library is missing ({text}); {add}, or add its folder to LD_LIBRARY_PATH"
    if found := re.search(r"`(GLIBC\w*)_([\d.]+)' not found \(required by (.+?)\)", text):
        return (
            f"{found[3]} needs {found[1]} {found[2]}, and this system has "
            f"{os.confstr('CS_GNU_LIBC_VERSION')}; use a newer system, or build moegraph on this "
            "one with scripts/quickstart"
        )
    if "_native" in text and "cannot import name" in text:
        return "the native libraries are not built; run scripts/build --cpu (or --cuda-arch ...)"
    return f"the native libraries cannot be loaded: {text}"


ffi, C = _load()


@cache
def cuda_lack() -> str:
    """Load the CUDA backend of a package, if it is none of this build; return what it lacks.

    Empty if nothing, or if there is no such backend.
    """
    own, lacks = cuda.FOLDER / cuda.LIBRARY, []
    if own.exists():
        return cuda.lacking(cuda.major_of(own))
    for path, major in cuda.by_fit().items():
        lacks.append(cuda.lacking(major, path) or _register(path, major))
        if not lacks[-1]:
            return ""
    return lacks[0] if lacks else ""


@cache
def _register(path: Path, major: int = 0) -> str:
    """Add a backend to which libggml is not linked; return why that fails. major: of CUDA."""
    # ggml only logs why it cannot; global, because native/py/shim.c looks for functions of it
    try:
        ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    except OSError:  # it looks beside its package; NVIDIA's may be on another path of Python
        try:
            for one in (*cuda.runtime(major), path):
                ctypes.CDLL(str(one), ctypes.RTLD_GLOBAL)
        except OSError as error:
            return _load_failure(str(error), cuda.remedy(path) if major else "")
    load = ctypes.CDLL(str(cuda.FOLDER / "libggml.so")).ggml_backend_load
    load.restype = ctypes.c_void_p
    return "" if load(bytes(path)) else f"{path} cannot be used: {last_error()}"


def cpu_converter(name: str) -> Any:
    """Return a function of ggml's CPU backend that converts numbers to F32, `ggml_to_float_t`.

    They have the processor's instructions; those of ggml's base library work on any processor.
    """
    library = ctypes.CDLL(str(_CPU_LIBRARY))
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    return ffi.cast("ggml_to_float_t", address)


def versions() -> dict[str, str]:
    """Return ggml's version, llama.cpp's commit before the patches, and the patch set."""
    found = {
        "ggml": C.ggml_version(), "llama_commit": C.mg_llama_commit(),
        "patchset": C.moegraph_patchset(),
    }  # fmt: skip
    return {name: ffi.string(text).decode("ascii") for name, text in found.items()}


def summary() -> str:
    """Return the versions in one line."""
    return "ggml {ggml}, llama.cpp {llama_commit} with patch set {patchset}".format(**versions())


def devices(with_cuda: bool = True) -> list[native.ggml_backend_device_ptr]:
    """Return ggml's devices, in its order; this opens no context.

    with_cuda: load the backend of a package, if there is one that works.
    """
    with _registering:
        if with_cuda:
            cuda_lack()
        if CPU_VARIANT and (failure := _register(_CPU_LIBRARY)):
            raise NativeError(failure)
    return [C.ggml_backend_dev_get(i) for i in range(C.ggml_backend_dev_count())]


def device_kinds() -> list[str]:
    """Return ggml's names of devices without their numbers; this opens no context."""
    names = (ffi.string(C.ggml_backend_dev_name(one)).decode() for one in devices(False))
    packages = (f"CUDA {major} of a package" for major in cuda.packaged().values())
    return list(dict.fromkeys((*(name.rstrip("0123456789") for name in names), *packages)))


def last_error() -> str:
    """Return and clear ggml's last error line; empty if there was none."""
    out = ffi.new("char[512]")
    C.mg_last_error(out, 512)
    return ffi.string(out).decode("utf-8", "replace")
