"""A native library in which the k-th call of one function fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moegraph.errors import MoegraphError, NativeError, OutOfDeviceMemory
from moegraph.ggml.lib import C, ffi

FAILED = C.GGML_STATUS_FAILED

# What a failing call returns, by native function.
FAULTS: dict[str, tuple[Any, type[MoegraphError]]] = {
    "ggml_backend_buft_alloc_buffer": (ffi.NULL, NativeError),
    "ggml_gallocr_new": (ffi.NULL, NativeError),
    "ggml_init": (ffi.NULL, NativeError),
    "mg_pages_new": (ffi.NULL, NativeError),
    "mg_watch": (ffi.NULL, NativeError),
    "mg_graph_alloc": (False, OutOfDeviceMemory),
    "mg_launch": (FAILED, NativeError),
    "mg_wait_ids": (False, NativeError),
    "mg_upload_launch": (FAILED, NativeError),
    "ggml_backend_tensor_alloc": (FAILED, NativeError),
}


class Faulty:
    """The native library, except that the k-th call of one function fails."""

    def __init__(self, name: str, at: int, result: Any) -> None:
        self._name = name
        self._at = at
        self._result = result
        self.n_calls = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(C, name)
        if name != self._name:
            return real

        def call(*args: Any) -> Any:
            self.n_calls += 1
            return self._result if self.n_calls == self._at else real(*args)

        return call


@contextmanager
def faulty(name: str, at: int, result: Any) -> Iterator[Faulty]:
    """Put a faulty library into every module of the package."""
    library = Faulty(name, at, result)
    modules = [m for n, m in sys.modules.items() if n.startswith("moegraph.") and hasattr(m, "C")]
    for module in modules:
        module.C = library
    try:
        yield library
    finally:
        for module in modules:
            module.C = C
