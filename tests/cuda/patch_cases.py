"""What tests/cuda/test_patches.py runs in a child process, because a failure may be a crash.

Usage: python patch_cases.py NAME; exits 0 when the case holds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from moegraph.ggml.device import Device
from moegraph.ggml.handles import Buffer, Context, GraphAllocator
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import F32, I32, Builder

N_EXPERT, N_USED, N_TOKENS = 64, 8, 2
Q4_0, Q8_0, Q4_K = 2, 8, 12


@contextmanager
def allocated(device: Device, context: Any) -> Iterator[None]:
    """Give every tensor of a context memory of its own on the device."""
    with Buffer(C.ggml_backend_alloc_ctx_tensors_from_buft(context, device.buft)):
        yield


def launch(device: Device, graph: Any) -> None:
    device.check(C.mg_launch(device.compute.ptr, graph, ffi.NULL, 0), "graph")
    device.synchronize()


def routing_weights(ctx: Any, logits: Any) -> Any:
    """Softmax, top-k and normalised weights [1, N_USED, N_TOKENS], in the order that is fused."""
    probs = C.ggml_soft_max(ctx, logits)
    selected = C.ggml_argsort_top_k(ctx, probs, N_USED)
    column = C.ggml_reshape_3d(ctx, probs, 1, N_EXPERT, N_TOKENS)
    weights = C.ggml_reshape_2d(ctx, C.ggml_get_rows(ctx, column, selected), N_USED, N_TOKENS)
    total = C.ggml_clamp(ctx, C.ggml_sum_rows(ctx, weights), 6.103515625e-5, float("inf"))
    return C.ggml_reshape_3d(ctx, C.ggml_div(ctx, weights, total), 1, N_USED, N_TOKENS)


def graph_that_ends_with_the_weights() -> None:
    device = Device("cuda")
    size = 64 * C.ggml_tensor_overhead() + C.ggml_graph_overhead_custom(64, False)
    # whatever lies behind the last node of the graph is then no valid pointer
    memory = ffi.new("char[]", b"\xaa" * size)
    ctx = C.ggml_init({"mem_size": size, "mem_buffer": memory, "no_alloc": True})
    logits = C.ggml_new_tensor_2d(ctx, F32, N_EXPERT, N_TOKENS)
    weights = routing_weights(ctx, logits)
    graph = C.ggml_new_graph_custom(ctx, 64, False)
    C.ggml_build_forward_expand(graph, weights)
    values = np.random.default_rng(3).standard_normal((N_TOKENS, N_EXPERT)).astype(np.float32)
    result = np.empty((N_TOKENS, N_USED), np.float32)
    with allocated(device, ctx):
        C.ggml_backend_tensor_set(logits, values.tobytes(), 0, values.nbytes)
        launch(device, graph)
        C.ggml_backend_tensor_get(weights, ffi.from_buffer(result), 0, result.nbytes)
    top = np.sort(np.exp(values - values.max(1, keepdims=True)), axis=1)[:, ::-1][:, :N_USED]
    np.testing.assert_allclose(result, top / top.sum(1, keepdims=True), rtol=1e-5)
    C.ggml_free(ctx)
    device.close()


def graphs_after_a_pause() -> None:
    """Prints ggml's log; the parent counts the captures."""
    C.mg_install_callbacks(1)
    device = Device("cuda")
    with Context(8, 16) as context:
        build = Builder(context, 16)
        x = build.leaf(F32, (256, 4), "x")
        y = C.ggml_rms_norm(context.ptr, C.ggml_add(context.ptr, x, x), 1e-6)
        build.expand(C.ggml_mul(context.ptr, y, x))
        with allocated(device, context.ptr):
            for pause in (0, 11):
                time.sleep(pause)
                for _ in range(4):
                    launch(device, build.graph)
    device.close()


def graphs_that_are_forgotten() -> None:
    """Each is forgotten while it runs. Captured and kept, they would take hundreds of megabytes."""
    device, n_nodes, n_graphs = Device("cuda"), 1000, 100
    ones, found, free = np.ones(256, np.float32), np.empty(256, np.float32), list[int]()
    with ExitStack() as stack:
        for _ in range(n_graphs):  # all at addresses of their own
            context = stack.enter_context(Context(n_nodes + 8, n_nodes + 8))
            build = Builder(context, n_nodes + 8)
            x = y = build.leaf(F32, (256,), "x")
            for _ in range(n_nodes):
                y = build.scale(y, 1.0)
            build.expand(y)
            with allocated(device, context.ptr):
                C.ggml_backend_tensor_set(x, ffi.from_buffer(ones), 0, ones.nbytes)
                for _ in range(4):
                    device.check(C.mg_launch(device.compute.ptr, build.graph, ffi.NULL, 0), "graph")
                C.mg_graph_forget(device.compute.ptr, build.graph)
                launch(device, build.graph)  # as if it were new
                C.mg_graph_forget(device.compute.ptr, build.graph)
                C.ggml_backend_tensor_get(y, ffi.from_buffer(found), 0, found.nbytes)
            np.testing.assert_array_equal(found, ones)
            free.append(device.memory()[0])
    assert free[9] - free[-1] < 64 << 20, f"{free[9] - free[-1]} bytes were not freed"
    device.close()


def graphs_that_are_known() -> None:
    """A node becomes a product without factors, at which nobody may look."""
    device = Device("cuda")
    with Context(8, 16) as context, GraphAllocator(device.buft, device.compute) as allocator:
        build = Builder(context, 16)
        x, ids = build.leaf(F32, (256, 1, 1), "x"), build.leaf(I32, (1, 1), "ids")
        product = build.mul_mat_id(build.leaf(F32, (256, 8, 2), "experts"), x, ids)
        build.expand(build.scale(build.scale(x, 1.0), 2.0))
        compute = device.compute.ptr
        assert C.mg_graph_alloc(allocator.ptr, compute, context.ptr, build.graph)
        for _ in range(4):
            launch(device, build.graph)
        C.ggml_graph_node(build.graph, 1).op = product.op
        launch(device, build.graph)
    device.close()


def products_of_an_odd_number_of_rows() -> None:
    """A checker of memory watches: weights end where their allocation does."""
    device = Device("cuda")
    for kind in (Q4_0, Q8_0, Q4_K):
        for n_tokens in (1, 2, 4):
            with Context(8, 16) as context, Context(2) as weights:
                build = Builder(context, 16)
                experts = C.ggml_new_tensor_3d(weights.ptr, kind, 512, 33, 2)
                x = build.leaf(F32, (512, 1, n_tokens), "x")
                ids = build.leaf(I32, (2, n_tokens), "ids")
                build.expand(build.mul_mat_id(experts, x, ids))
                with allocated(device, weights.ptr), allocated(device, context.ptr):
                    chosen = np.tile(np.array([1, 0], np.int32), n_tokens)
                    for tensor, value in ((experts, 0), (x, 0)):
                        C.ggml_backend_tensor_memset(tensor, value, 0, C.ggml_nbytes(tensor))
                    C.ggml_backend_tensor_set(ids, ffi.from_buffer(chosen), 0, chosen.nbytes)
                    launch(device, build.graph)
    device.close()


CASES = {f.__name__: f for f in (
    graph_that_ends_with_the_weights, graphs_after_a_pause,
    graphs_that_are_forgotten, graphs_that_are_known, products_of_an_odd_number_of_rows,
)}  # fmt: skip

if __name__ == "__main__":
    CASES[sys.argv[1]]()
