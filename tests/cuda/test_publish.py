"""What a graph tells the host while it runs."""

from __future__ import annotations

import numpy as np
from helpers.graph_runs import random

from moegraph.ggml.device import Device, HostBuffer
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.memory import place
from moegraph.ggml.ops import F32, I32, Builder, Tensor, shape
from moegraph.graphs.cache import GraphCache


def tell_the_end(b: Builder, x: Tensor, host: HostBuffer, offset: int) -> None:
    """Copy the last result of a graph into memory of the host."""
    target = b.leaf(F32, shape(x), "end")
    place(host, target, offset)
    b.expand(b.publish(x, target))


def test_the_host_sees_what_a_graph_publishes_while_it_runs(device: Device) -> None:
    """Direct, captured and replayed; what was published keeps its memory until it is out.

    The graph tells its last result, too: what comes earlier is there while that is not.
    """
    n, n_used = 4096, 8
    host = device.host_buffer(4 * (2 * n + n_used), must_pin=True)
    seen_x, seen_ids = host.array[: 4 * n].view(np.float32), host.array[4 * n :].view(np.int32)
    seen_ids, seen_end = seen_ids[:n_used], seen_ids[n_used : n_used + n].view(np.float32)
    memory = device.buffer(4 * (n * n + n + 64 + n_used), "operands", "free memory")
    C.ggml_backend_buffer_clear(memory.ptr, 0)
    graphs = GraphCache(device)

    def build(b: Builder) -> tuple[Tensor, ...]:
        at, leaves = 0, []
        for dtype, ne in ((F32, (n, n)), (F32, (n,)), (I32, (1, 64)), (I32, (n_used,))):
            leaves.append(b.leaf(dtype, ne, "x"))
            place(memory, leaves[-1], at)
            at += C.ggml_nbytes(leaves[-1])
        w, a, table, rows = leaves
        x, ids = b.expand(b.scale(a, 2.0)), b.expand(b.get_rows(table, rows))
        for tensor, offset in ((x, 0), (ids, 4 * n)):
            target = b.leaf(tensor.type, shape(tensor), "host")
            place(host, target, offset)
            b.expand(b.publish(tensor, target))
        for _ in range(200):  # long enough, and in need of memory
            x = b.expand(b.mul_mat(w, x))
        tell_the_end(b, x, host, 4 * (n + n_used))
        return a, table, rows

    built = graphs.get("published", 512, build)
    a, table, rows = built.outputs
    for turn in range(6):
        operands = random(turn, n), np.random.default_rng(turn).permutation(64).astype(np.int32)
        chosen = np.arange(turn, turn + n_used, dtype=np.int32)
        for tensor, data in zip((a, table, rows), (*operands, chosen)):
            C.ggml_backend_tensor_set(tensor, ffi.from_buffer(data), 0, data.nbytes)
        seen_x[:], seen_ids[:], seen_end[:] = np.nan, C.MG_NO_ID, np.nan
        device.synchronize()
        device.check(C.mg_launch(device.compute.ptr, built.graph, ffi.NULL, 0), "graph")
        where = ffi.cast("int32_t *", seen_ids.ctypes.data)
        assert C.mg_wait_ids(device.compute.ptr, where, n_used)
        is_running = np.isnan(seen_end).all()
        got_x, got_ids = seen_x.copy(), seen_ids.copy()
        device.synchronize()
        assert turn < 3 or is_running
        assert not np.isnan(seen_end).any()
        np.testing.assert_array_equal(got_ids, operands[1][chosen])
        np.testing.assert_array_equal(got_x, 2 * operands[0])
    for handle in (graphs, memory, host):
        handle.close()


def test_a_ranking_that_only_the_host_reads_runs_beside_the_graph(device: Device) -> None:
    """Its memory is its own until the graph ends, and the graph does not wait for it."""
    n, n_rows, k = 2048, 256, 8
    host = device.host_buffer(4 * (k + n), must_pin=True)
    seen = host.array[: 4 * k].view(np.int32)
    seen_end = host.array[4 * k : 4 * (k + n)].view(np.float32)
    memory = device.buffer(4 * (n * n + n * n_rows + n), "operands", "free memory")
    C.ggml_backend_buffer_clear(memory.ptr, 0)
    graphs = GraphCache(device)

    def build(b: Builder) -> tuple[Tensor, ...]:
        at, leaves = 0, []
        for ne in ((n, n), (n, n_rows), (n,)):
            leaves.append(b.leaf(F32, ne, "x"))
            place(memory, leaves[-1], at)
            at += C.ggml_nbytes(leaves[-1])
        w, router, a = leaves
        x = b.expand(b.scale(a, 2.0))
        target = b.leaf(I32, (k, 1), "host")
        place(host, target, 0)
        b.expand(b.publish(b.argsort_top_k(b.mul_mat(router, x), k), target))
        for _ in range(200):
            x = b.expand(b.mul_mat(w, x))
        tell_the_end(b, x, host, 4 * k)
        return router, a

    built = graphs.get("ranked", 512, build)
    where = ffi.cast("int32_t *", seen.ctypes.data)
    for turn in range(6):
        operands = random(turn, n_rows, n), random(turn + 9, n)
        for tensor, data in zip(built.outputs, operands):
            C.ggml_backend_tensor_set(tensor, ffi.from_buffer(data), 0, data.nbytes)
        seen[:], seen_end[:] = C.MG_NO_ID, np.nan
        device.synchronize()
        device.check(C.mg_launch(device.compute.ptr, built.graph, ffi.NULL, 0), "graph")
        assert C.mg_wait_ids(device.compute.ptr, where, k)
        is_running = np.isnan(seen_end).all()
        got = seen.copy()
        device.synchronize()
        assert turn < 3 or is_running
        assert not np.isnan(seen_end).any()
        expected = np.argsort(-(operands[0].astype(np.float64) @ operands[1]))[:k]
        np.testing.assert_array_equal(got, expected)
    for handle in (graphs, memory, host):
        handle.close()
