"""Each patch of the CPU side, seen from outside: patches/README.md names these tests."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from helpers.graph_runs import Graph, random

from moegraph.ggml.device import Device
from moegraph.ggml.handles import Buffer, Context
from moegraph.ggml.lib import C, ffi, versions
from moegraph.ggml.ops import F32, I32, Builder

N_IN, N_OUT = 512, 96


@pytest.fixture
def reference_device() -> Iterator[Device]:
    """Yield the CPU device in reference mode."""
    device = Device("cpu", n_threads=2, reference=True)
    yield device
    device.close()


def test_the_libraries_carry_the_hash_of_the_patches_in_this_checkout(fetch: ModuleType):
    assert versions()["patchset"] == fetch.patchset()


def test_the_libraries_know_the_commit_that_is_pinned(fetch: ModuleType):
    assert versions()["llama_commit"] == fetch.PIN["llama_cpp_commit"]


def product(
    device: Device, kind: GGMLQuantizationType, weights: bytes, x: np.ndarray
) -> np.ndarray:
    """Return weights [N_IN, N_OUT] times x [N_IN, n]: float32 [N_OUT, n], rows of numpy."""
    with Context(8, 8) as context:
        build = Builder(context, 8)
        a = build.leaf(int(kind), (N_IN, N_OUT), "a")
        b = build.leaf(F32, (N_IN, x.shape[0]), "b")
        out = C.ggml_mul_mat(context.ptr, a, b)
        build.expand(out)
        with Buffer(C.ggml_backend_alloc_ctx_tensors_from_buft(context.ptr, device.buft)):
            C.ggml_backend_tensor_set(a, weights, 0, len(weights))
            C.ggml_backend_tensor_set(b, x.tobytes(), 0, x.nbytes)
            device.check(C.mg_launch(device.compute.ptr, build.graph, ffi.NULL, 0), "mul_mat")
            result = np.empty((x.shape[0], N_OUT), np.float32)
            C.ggml_backend_tensor_get(out, ffi.from_buffer(result), 0, result.nbytes)
    return result


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_0"])
def test_a_reference_product_does_not_depend_on_the_number_of_rows(
    kind: str, reference_device: Device
):
    dtype = GGMLQuantizationType[kind]
    rng = np.random.default_rng(5)
    weights = quants.quantize(rng.standard_normal((N_OUT, N_IN), np.float32), dtype).tobytes()
    x = rng.standard_normal((13, N_IN), np.float32)
    alone = [product(reference_device, dtype, weights, row[None]) for row in x]
    for width in (2, 3, 8, 13):
        together = product(reference_device, dtype, weights, x[:width])
        np.testing.assert_array_equal(together, np.concatenate(alone[:width]))


def test_add_id_leaves_rows_with_absent_ids_alone() -> None:
    device, graph = Device("cpu", n_threads=2), Graph()
    a, rows, ids = random(1, 5, 32), random(2, 3, 32), np.array([2, -1, 0, -1, 1], np.int32)
    out = graph.b.add_rows(graph.leaf(a), graph.leaf(rows), graph.leaf(ids, I32))
    found = graph.run(device, [out])[0][0]
    expected = a.copy()
    expected[ids >= 0] += rows[ids[ids >= 0]]
    np.testing.assert_array_equal(found.reshape(5, 32), expected)
    device.close()
