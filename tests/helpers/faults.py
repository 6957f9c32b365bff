"""A native library in which the k-th call of one function fails, and a state that is spoilt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from moegraph.engine import Engine
from moegraph.errors import MoegraphError, NativeError, OutOfDeviceMemory
from moegraph.ggml.device import Capabilities
from moegraph.ggml.lib import C, ffi

FAILED = C.GGML_STATUS_FAILED

# What a failing call returns, by native function.
FAULTS: dict[str, tuple[Any, type[MoegraphError]]] = {
    "ggml_backend_buft_alloc_buffer": (ffi.NULL, NativeError),
    "ggml_gallocr_new": (ffi.NULL, NativeError),
    "ggml_init": (ffi.NULL, NativeError),
    "mmap": (ffi.cast("void *", -1), NativeError),
    "mg_watch": (ffi.NULL, NativeError),
    "mg_graph_alloc": (False, OutOfDeviceMemory),
    "mg_launch": (FAILED, NativeError),
    "mg_wait_ids": (False, NativeError),
    "mg_upload_launch": (FAILED, NativeError),
    "ggml_backend_tensor_alloc": (FAILED, NativeError),
}


class Faulty:
    """A native library, except that the k-th call of some functions fails.

    name: what their names begin with. result: what the call returns; an exception is raised.
    """

    def __init__(self, name: str, at: int, result: Any, library: Any = C) -> None:
        self._name = name
        self._at = at
        self._result = result
        self._library = library
        self.n_calls = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._library, name)
        if not name.startswith(self._name):
            return real

        def call(*args: Any) -> Any:
            self.n_calls += 1
            if self.n_calls != self._at:
                return real(*args)
            if isinstance(self._result, BaseException):
                raise self._result
            return self._result

        return call


@contextmanager
def faulty(name: str, at: int, result: Any) -> Iterator[Faulty]:
    """Put a faulty library into every module of the package."""
    with _in_place(lambda library: Faulty(name, at, result, library)) as library:
        yield library


class _WithEvents:
    """The native library, with events on a device that has none: nothing is asynchronous there."""

    def __getattr__(self, name: str) -> Any:
        if name == "mg_upload_launch":  # arguments 5 and 6 are events
            return lambda *args: C.mg_upload_launch(*args[:5], ffi.NULL, ffi.NULL, *args[7:])
        if not name.startswith("ggml_backend_event_"):
            return getattr(C, name)
        made = ffi.cast("void *", 1) if name.endswith("_new") else None
        return lambda *_: made


@contextmanager
def events_on_cpu() -> Iterator[None]:
    """Have the CPU device claim streams and events, in which all work is done at once."""
    real = Capabilities.of.__func__
    of = classmethod(lambda cls, dev: replace(real(cls, dev), streams=True))
    with _in_place(lambda _: _WithEvents()):
        Capabilities.of = of
        try:
            yield
        finally:
            Capabilities.of = classmethod(real)


@contextmanager
def _in_place(library_of: Callable[[Any], Any]) -> Iterator[Any]:
    """Replace the library in every module of the package."""
    modules = [m for n, m in sys.modules.items() if n.startswith("moegraph.") and hasattr(m, "C")]
    before = {module: module.C for module in modules}
    library = library_of(before[modules[0]])
    for module in modules:
        module.C = library
    try:
        yield library
    finally:
        for module, old in before.items():
            module.C = old


def poison(engine: Engine, slot: int) -> None:
    """Put a NaN into a recurrent state of a sequence."""
    tensor = next(iter(engine.state.states[0].layer_states.values()))[1]
    value = np.array([np.nan], np.float32)
    C.ggml_backend_tensor_set(tensor, ffi.from_buffer(value), slot * tensor.nb[1], 4)
