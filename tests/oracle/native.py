"""Unpatched llama.cpp through ctypes: loading it, proving it is unpatched, reading its tensors.

Runs in the oracle process only. The struct layouts and functions of llama.h come from the
llama-cpp-python package; what ggml adds is declared here.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Exported by the patched libraries only; its presence means this is not upstream.
PATCH_SYMBOL = "moegraph_patchset"

F32, F16, I32 = 0, 1, 26
NUMPY_TYPES = {F32: np.dtype("<f4"), F16: np.dtype("<f2"), I32: np.dtype("<i4")}

NODE_NAME = re.compile(r"([A-Za-z_][A-Za-z0-9_.]*)-(\d+)")
GLOBAL_NODES = ("result_norm", "result_output", "h_nextn", "model.input_embed")


class Tensor(ctypes.Structure):
    """`struct ggml_tensor` of ggml 0.25."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
        ("padding", ctypes.c_char * 8),
    ]


class BuftOverride(ctypes.Structure):
    """`struct llama_model_tensor_buft_override`."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


def _import_llama(package: Path) -> Any:
    """Import llama_cpp/llama_cpp.py without the package's __init__ and what that imports."""
    if importlib.util.find_spec("typing_extensions") is None:
        # Only TypeAlias is used, and typing has it.
        stub = types.ModuleType("typing_extensions")
        stub.TypeAlias = typing.TypeAlias  # type: ignore[attr-defined]
        sys.modules["typing_extensions"] = stub
    parent = types.ModuleType("llama_cpp")
    parent.__path__ = [str(package)]
    sys.modules["llama_cpp"] = parent
    return importlib.import_module("llama_cpp.llama_cpp")


def find_package(root: Path) -> tuple[Path, Path]:
    """Return (folder of llama_cpp.py, folder of the libraries) for an oracle folder.

    root: a `pip install --target` folder with llama_cpp in it, or a folder of libraries used with
    the Python files of a package found elsewhere.
    """
    if (root / "llama_cpp" / "llama_cpp.py").is_file():
        return root / "llama_cpp", root / "llama_cpp" / "lib"
    local = Path(__file__).resolve().parents[2] / ".oracle" / "llama_cpp"
    if (local / "llama_cpp.py").is_file():
        return local, root
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"{root} has no llama_cpp package and none is installed")
    return Path(next(iter(spec.submodule_search_locations))), root


def _mapped(name: str) -> list[str]:
    """Return the files of the library `name` mapped into this process."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if f"/{name}." in line}
    return sorted(paths)


class Upstream:
    """The loaded libraries: `.llama` is the llama_cpp.llama_cpp module, `.base` libggml-base."""

    def __init__(self, root: Path) -> None:
        package, lib_dir = find_package(root)
        os.environ["LLAMA_CPP_LIB_PATH"] = str(lib_dir)
        self.llama = _import_llama(package)
        self.base = self._base_library(lib_dir)
        self.paths = {n: _mapped(n) for n in ("libggml-base", "libggml-cpu", "libllama")}
        self._log_lines: list[str] = []
        self._silence()
        self._check_layout()
        ggml = ctypes.CDLL(_mapped("libggml")[0])
        if ggml.ggml_backend_reg_count() == 0:  # of a build that is not linked to its backends
            ggml.ggml_backend_load_all_from_path(str(lib_dir).encode())
            self.paths["libggml-cpu"] = _mapped("libggml-cpu")
        self.llama.llama_backend_init()

    @staticmethod
    def _base_library(lib_dir: Path) -> ctypes.CDLL:
        loaded = _mapped("libggml-base")
        if len(loaded) != 1 or Path(loaded[0]).parent.resolve() != lib_dir.resolve():
            raise RuntimeError(f"one libggml-base of {lib_dir} was expected, loaded: {loaded}")
        base = ctypes.CDLL(loaded[0])
        if hasattr(base, PATCH_SYMBOL):
            raise RuntimeError(f"{loaded[0]} exports {PATCH_SYMBOL}: it is patched, not upstream")
        base.ggml_nbytes.restype = ctypes.c_size_t
        base.ggml_nbytes.argtypes = [ctypes.POINTER(Tensor)]
        base.ggml_backend_tensor_get.restype = None
        base.ggml_backend_tensor_get.argtypes = [
            ctypes.POINTER(Tensor), ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t,
        ]  # fmt: skip
        base.ggml_tensor_overhead.restype = ctypes.c_size_t
        base.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
        base.ggml_version.restype = ctypes.c_char_p
        base.ggml_commit.restype = ctypes.c_char_p
        return base

    def _check_layout(self) -> None:
        # An object header of 32 bytes precedes each tensor.
        if self.base.ggml_tensor_overhead() != ctypes.sizeof(Tensor) + 32:
            raise RuntimeError("struct ggml_tensor has another size than this oracle declares")

    def _silence(self) -> None:
        """Keep the library's log off the terminal; warnings and errors are remembered."""
        kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)

        def log(level: int, text: bytes, _: object) -> None:
            if level >= 3:
                self._log_lines.append(text.decode(errors="replace").rstrip())

        self._log = kind(log)
        self.llama.llama_log_set(self._log, None)

    def log_tail(self, n: int = 20) -> str:
        """Return the last warnings and errors of the library."""
        return "\n".join(self._log_lines[-n:])

    def mtmd(self, folder: Path) -> Any:
        """Import the bindings of libmtmd, with the library of a folder."""
        os.environ["MTMD_CPP_LIB"] = str(folder)
        return importlib.import_module("llama_cpp.mtmd_cpp")

    def read(self, tensor: Tensor) -> Array | None:
        """Copy a tensor into a contiguous array of float32 or int32, axes in ggml order reversed.

        None if its type is neither a float nor an int.
        """
        dtype = NUMPY_TYPES.get(tensor.type)
        if dtype is None:
            return None
        n_bytes = self.base.ggml_nbytes(ctypes.byref(tensor))
        raw = np.empty(n_bytes, np.uint8)
        self.base.ggml_backend_tensor_get(
            ctypes.byref(tensor), raw.ctypes.data_as(ctypes.c_void_p), 0, n_bytes
        )
        view: Array = np.ndarray(tuple(tensor.ne)[::-1], dtype, raw, 0, tuple(tensor.nb)[::-1])
        return np.ascontiguousarray(view, np.int32 if tensor.type == I32 else np.float32)


def node_key(name: str) -> tuple[str, int] | None:
    """Return (name, layer) of a named node, layer -1 outside the layers; None for all others."""
    if name in GLOBAL_NODES:
        return name, -1
    match = NODE_NAME.fullmatch(name)
    return (match[1], int(match[2])) if match else None
