"""Owners of native objects: each frees its object once and keeps its parents alive."""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..closing import Closable
from ..errors import InternalError, NativeError
from .lib import C, ffi, last_error

if TYPE_CHECKING:
    from . import _native

Ptr = TypeVar("Ptr")
Part = TypeVar("Part")

_live: Counter[str] = Counter()
# made: weak references to handles made in this thread's innermost `closed_on_failure`
_scope = threading.local()


def live_handles() -> dict[str, int]:
    """Return how many native objects of each kind are open."""
    return {kind: n for kind, n in _live.items() if n}


def _release(kind: str, free: Callable[[Any], object], ptr: Any, process: int) -> None:
    _live[kind] -= 1
    if os.getpid() == process:
        free(ptr)


@contextmanager
def closed_on_failure() -> Iterator[None]:
    """If the block fails, close every handle made in it, the last one first.

    For constructors that make many handles: otherwise the exception's traceback would keep the
    unfinished owner and its native memory alive. A block inside another one hands its handles over
    when it succeeds.
    """
    made: list[weakref.ref[Handle[Any]]] = []
    outer, _scope.made = getattr(_scope, "made", None), made
    try:
        yield
    except BaseException:
        for reference in reversed(made):
            handle = reference()
            if handle:
                handle.close()
        raise
    else:
        if outer is not None:
            outer.extend(made)
    finally:
        _scope.made = outer


class Handle(Closable, Generic[Ptr]):
    """A native pointer with one owner.

    `close()` frees the object once; a finalizer frees it if `close()` was not called. Until then
    the handle keeps its parents alive. A forked child never frees inherited objects: it has neither
    their threads nor their device context, so freeing would hang or end the process.
    """

    def __init__(self, ptr: Ptr, free: Callable[[Ptr], object], *parents: object) -> None:
        if ptr == ffi.NULL:
            reason = last_error() or "no memory"
            raise NativeError(f"ggml could not create a {type(self).__name__.lower()}: {reason}")
        self._ptr: Ptr | None = ptr
        self._parents = parents
        _live[type(self).__name__] += 1
        kind, self._process = type(self).__name__, os.getpid()
        self._finalizer = weakref.finalize(self, _release, kind, free, ptr, self._process)
        made = getattr(_scope, "made", None)
        if made is not None:
            made.append(weakref.ref(self))

    @property
    def ptr(self) -> Ptr:
        """The native pointer."""
        if self._ptr is None:
            raise InternalError(f"use of a closed {type(self).__name__}")
        return self._ptr

    @property
    def is_closed(self) -> bool:
        """Whether the object cannot be used: closed, freed at exit, or inherited by a fork."""
        return not self._finalizer.alive or os.getpid() != self._process

    def close(self) -> None:
        """Free the native object; a second call does nothing."""
        self._ptr = None
        self._finalizer()
        self._parents = ()


class Owner:
    """What owns handles and other owners, and closes them with itself."""

    _owned: tuple[Any, ...] = ()

    def own(self, part: Part) -> Part:
        """Have `close` close a part; return it. None is no part."""
        if part is not None:
            self._owned += (part,)
        return part

    def close(self) -> None:
        """Close all parts, the last one first; a second call does nothing."""
        while self._owned:
            self._owned[-1].close()
            self._owned = self._owned[:-1]


class Context(Handle["_native.ggml_context_ptr"]):
    """Memory for tensor and graph records (not for tensor data)."""

    def __init__(self, n_tensors: int, n_nodes: int = 0) -> None:
        """Make room for n_tensors tensors and, if n_nodes is not 0, two graphs of n_nodes nodes."""
        size = n_tensors * C.ggml_tensor_overhead() + 1024
        if n_nodes:
            size += 2 * C.ggml_graph_overhead_custom(n_nodes, False)
        params = {"mem_size": size, "mem_buffer": ffi.NULL, "no_alloc": True}
        super().__init__(C.ggml_init(ffi.new("struct ggml_init_params *", params)[0]), C.ggml_free)


class Buffer(Handle["_native.ggml_backend_buffer_ptr"]):
    """Tensor memory on one device."""

    def __init__(self, ptr: _native.ggml_backend_buffer_ptr, *parents: object) -> None:
        super().__init__(ptr, C.ggml_backend_buffer_free, *parents)

    @property
    def base(self) -> int:
        """Address of the first byte."""
        return int(ffi.cast("uintptr_t", C.ggml_backend_buffer_get_base(self.ptr)))

    @property
    def size(self) -> int:
        """Size in bytes."""
        return C.ggml_backend_buffer_get_size(self.ptr)


class Event(Handle["_native.ggml_backend_event_ptr"]):
    """A point on a stream that another stream or the host can wait for."""

    def __init__(self, ptr: _native.ggml_backend_event_ptr, *parents: object) -> None:
        super().__init__(ptr, C.ggml_backend_event_free, *parents)

    def wait(self) -> None:
        """Block the host until the event has happened."""
        C.ggml_backend_event_synchronize(self.ptr)


class GraphAllocator(Handle["_native.ggml_gallocr_ptr"]):
    """One memory block for the intermediates of graphs that run one after another."""

    def __init__(self, buft: _native.ggml_backend_buffer_type_ptr, *parents: object) -> None:
        super().__init__(C.ggml_gallocr_new(buft), C.ggml_gallocr_free, *parents)

    @property
    def size(self) -> int:
        """Size of the block in bytes."""
        return C.ggml_gallocr_get_buffer_size(self.ptr, 0)
