"""What a worker's backend is told and asked, as if it were a backend of this process.

The worker is a thread here, so that the test can look at its backend.
"""

from __future__ import annotations

import ctypes
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest

from moegraph.ggml.device import Device
from moegraph.ggml.handles import Buffer, Context
from moegraph.ggml.lib import C, ffi, library_dir
from moegraph.ggml.memory import place
from moegraph.ggml.ops import F32, Builder, Tensor
from moegraph.ggml.remote import serve
from moegraph.graphs.cache import BuiltGraph, GraphCache
from moegraph.link import hello

_base = ctypes.CDLL(str(library_dir() / "libggml-base.so"))
_base.ggml_backend_buffer_get_usage.argtypes = [ctypes.c_void_p]

# The function pointers of a ggml_backend, after its guid.
_GRAPH_OPTIMIZE = 1 + 15
Deps = list[tuple[int, int]]  # numbers of nodes: the first keeps its memory until the second


def usage_of(tensor: Any) -> int:
    """Return the usage of the buffer that a tensor is in."""
    pointer = int(ffi.cast("uintptr_t", tensor.buffer))
    return int(_base.ggml_backend_buffer_get_usage(pointer))


class Backend:
    """A CPU backend that asks for dependencies, as CUDA does for its fused kernels.

    seen: for each graph that it was to optimize, the usage of its first source's buffer.
    """

    def __init__(self, deps: Deps) -> None:
        self.device = Device("cpu", 1)
        self.seen: list[int] = []
        self._deps = deps
        untyped: Any = ffi
        self._optimize = untyped.callback("void(void *, struct ggml_cgraph *, void **)", self._ask)
        iface = ffi.cast("void **", self.device.compute.ptr)
        iface[_GRAPH_OPTIMIZE] = ffi.cast("void *", self._optimize)

    def _ask(self, _: Any, graph: Any, params: Any) -> None:
        add = ffi.cast("void(*)(void *, struct ggml_tensor *, struct ggml_tensor *)", params[0])
        self.seen.append(usage_of(C.ggml_graph_node(graph, 0).src[0]))
        for first, until in self._deps:
            add(params[1], C.ggml_graph_node(graph, first), C.ggml_graph_node(graph, until))


@pytest.fixture
def lend(stack: ExitStack) -> Callable[[Backend], Device]:
    """Return a function that lends a backend, and returns it as a device of a worker."""

    def lend(backend: Backend) -> Device:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        thread = threading.Thread(target=work, args=(listening, backend.device))
        thread.start()
        stack.callback(thread.join)
        url = f"rpc://127.0.0.1:{listening.getsockname()[1]}"
        return stack.enter_context(closing(Device(url, 1)))

    def work(listening: socket.socket, device: Device) -> None:
        sock, _ = listening.accept()
        hello.read_line(sock, hello.MAX_QUESTION, hello.HELLO_S)
        sock.sendall(hello.answer_of([hello.RemoteDevice("cpu", "cpu", "a thread")]))
        sock.settimeout(None)
        serve(sock, None, [device.compute.ptr])

    return lend


def chain(device: Device, stack: ExitStack, n_nodes: int) -> tuple[BuiltGraph, Buffer, Tensor]:
    """Return a graph that doubles four numbers n_nodes times, their buffer and their tensor."""
    buffer = stack.enter_context(closing(device.buffer(16, "numbers", "")))
    context = stack.enter_context(closing(Context(1)))
    source = C.ggml_new_tensor_1d(context.ptr, F32, 4)
    place(buffer, source, 0)
    C.ggml_backend_buffer_set_usage(buffer.ptr, C.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
    graphs = stack.enter_context(closing(GraphCache(device)))

    def build(b: Builder) -> list[Tensor]:
        nodes = [source]
        for _ in range(n_nodes):
            nodes.append(C.ggml_scale(b.context.ptr, nodes[-1], 2.0))
            b.expand(nodes[-1])
        return nodes[1:]

    return graphs.get(n_nodes, n_nodes, build), buffer, source


def test_tensors_keep_their_memory_as_long_as_the_workers_backend_asks(
    lend: Callable[[Backend], Device], stack: ExitStack
) -> None:
    """Without the request each node would be computed where its source is."""
    backend = Backend([(1, 4), (2, 3)])
    device = lend(backend)
    graph, _, source = chain(device, stack, 6)
    values = np.arange(4, dtype=np.float32)
    C.ggml_backend_tensor_set(source, ffi.from_buffer(values), 0, 16)
    device.check(C.mg_launch(device.compute.ptr, graph.graph, ffi.NULL, 0), "chain")
    found = np.empty(4, np.float32)
    C.ggml_backend_tensor_get(graph.outputs[-1], ffi.from_buffer(found), 0, 16)
    np.testing.assert_array_equal(found, 64 * values)
    at = [int(ffi.cast("uintptr_t", node.data)) for node in graph.outputs]
    assert len(backend.seen) == 1
    assert at[1] not in at[2:5] and at[2] not in at[3:4]
    assert at[4] == at[5]


def test_the_workers_backend_knows_which_buffers_have_weights(
    lend: Callable[[Backend], Device], stack: ExitStack
) -> None:
    """Kernels start early if what they read is constant."""
    backend = Backend([])
    _, buffer, _ = chain(lend(backend), stack, 1)
    assert backend.seen == [C.GGML_BACKEND_BUFFER_USAGE_WEIGHTS]
    assert not buffer.is_closed
