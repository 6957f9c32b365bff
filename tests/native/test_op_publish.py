"""Copies that a graph publishes to the host: what marks them, and what may be one."""

from __future__ import annotations

import numpy as np

from moegraph.ggml.device import Device
from moegraph.ggml.handles import Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.memory import place
from moegraph.ggml.ops import I32, Builder
from moegraph.graphs.cache import GraphCache


def test_only_what_is_published_is_marked() -> None:
    """A plain copy into host memory keeps its place in the graph: a later node may read it."""
    with Context(16, 8) as context:
        b = Builder(context, 8)
        a, host = b.leaf(I32, (8, 2), "a"), b.leaf(I32, (16,), "host")
        assert C.moegraph_is_publish(b.publish(a, host))
        assert not C.moegraph_is_publish(b.cpy(a, host))
        assert not C.moegraph_is_publish(a)


def test_the_cpu_copies_what_is_published() -> None:
    device, values = Device("cpu", n_threads=2), np.arange(24, dtype=np.int32).reshape(3, 8)
    source = device.buffer(values.nbytes, "the source", "free memory")
    target = device.host_buffer(60)
    graphs = GraphCache(device)

    def build(b: Builder) -> object:
        a, host = b.leaf(I32, (8, 3), "a"), b.leaf(I32, (5, 3), "host")
        place(source, a, 0)
        place(target, host, 0)
        b.expand(b.publish(b.view(a, (5, 3), (a.nb[1],)), host))
        return a

    built = graphs.get("publish", 8, build)
    C.ggml_backend_tensor_set(built.outputs, ffi.from_buffer(values), 0, values.nbytes)
    device.check(C.mg_launch(device.compute.ptr, built.graph, ffi.NULL, 0), "publish")
    np.testing.assert_array_equal(target.array[:60].view(np.int32).reshape(3, 5), values[:, :5])
    for handle in (graphs, source, target, device):
        handle.close()
