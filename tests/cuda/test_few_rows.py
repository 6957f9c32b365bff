"""What the kernels for a few rows promise: right to float64, and the same bits at any width."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from helpers.graph_runs import Graph, random

from moegraph.ggml.device import Device
from moegraph.ggml.handles import Buffer, Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import F32, I32, Builder
from moegraph.graphs.head import _sum_of_logits

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from modelgen.blocks import TYPES

N_IN, N_OUT = 2048, 96
# What the kernels read: weights, and values of a row.
KINDS = [(kind, N_IN) for kind in ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")]
KINDS += [("Q8_0", 2880), ("MXFP4", 2880)]
Leaves = list[tuple[Any, bytes]]


def run(
    device: Device, build: Callable[[Builder], tuple[Any, Leaves]], apart: bool = False
) -> bytes:
    """Build and compute a graph, as with --deterministic if apart; return the result as bytes."""
    with Context(1024, 1024) as context:
        builder = Builder(context, 1024)
        out, leaves = build(builder)
        builder.expand(out)
        if apart:
            C.moegraph_keep_rows_apart(builder.graph)
        with Buffer(C.ggml_backend_alloc_ctx_tensors_from_buft(context.ptr, device.buft)):
            for tensor, data in leaves:
                C.ggml_backend_tensor_set(tensor, data, 0, len(data))
            device.check(C.mg_launch(device.compute.ptr, builder.graph, ffi.NULL, 0), "graph")
            device.synchronize()
            result = bytearray(C.ggml_nbytes(out))
            C.ggml_backend_tensor_get(out, ffi.from_buffer(result), 0, len(result))
    return bytes(result)


@pytest.mark.parametrize("n_rows", [1, 2, 5, 8, 9, 16, 17, 24, 25])
@pytest.mark.parametrize(("kind", "n_in"), KINDS)
def test_a_product_does_not_depend_on_the_number_of_rows(
    kind: str, n_in: int, n_rows: int, device: Device, capability: int
) -> None:
    """By default one row is for a kernel of its own, see test_one_row.py."""
    if n_rows <= 8 and capability < 80:
        pytest.skip(
            f"compute capability {capability}: without asynchronous copies (8.0 and newer)"
            " other kernels compute 1 to 8 rows"
        )
    rng, alone = np.random.default_rng(5), n_rows == 1
    x = rng.standard_normal((32, n_in)).astype(np.float32)
    weights = TYPES[kind].fill(rng, N_OUT * n_in // TYPES[kind].n_elem, 0.5).tobytes()

    def product(n_rows: int) -> bytes:
        def build(b: Builder) -> tuple[Any, Leaves]:
            w = b.leaf(TYPES[kind].ggml_id, (n_in, N_OUT), "w")
            rows = b.leaf(F32, (n_in, n_rows), "x")
            return b.mul_mat(w, rows), [(w, weights), (rows, x[:n_rows].tobytes())]

        return run(device, build, alone)

    found = product(n_rows)
    assert found == product(32)[: 4 * N_OUT * n_rows]
    values = quants.dequantize(
        np.frombuffer(weights, np.uint8).reshape(N_OUT, -1), GGMLQuantizationType[kind]
    )
    expected = x[:n_rows].astype(np.float64) @ values.T.astype(np.float64)
    error = np.frombuffer(found, np.float32).reshape(n_rows, N_OUT) - expected
    # activations are rounded to 8 bits; a wrong row is off by 1 or more
    assert ((error**2).sum(axis=1) < 2e-3 * (expected**2).sum(axis=1)).all()


@pytest.mark.parametrize(("kind", "n_in"), KINDS)
def test_the_product_of_an_expert_does_not_depend_on_the_number_of_rows(
    kind: str, n_in: int, device: Device
) -> None:
    """Up to 64 tokens, and from 65 on: then groups have up to 32 rows of an expert.

    By default upstream computes so many rows with MXFP4.
    """
    rng = np.random.default_rng(6)
    n_expert, n_used, n_out = 128, 8, 48
    x = rng.standard_normal((500, n_in)).astype(np.float32)
    ids = np.stack([rng.permutation(n_expert)[:n_used] for _ in range(500)]).astype(np.int32)
    ids[::7, 3], ids[:, 0] = -1, 5  # some are absent, and one is popular
    n_elements = n_expert * n_out * n_in
    weights = TYPES[kind].fill(rng, n_elements // TYPES[kind].n_elem, 0.5).tobytes()

    def product(first: int, n: int) -> bytes:
        def build(b: Builder) -> tuple[Any, Leaves]:
            w = b.leaf(TYPES[kind].ggml_id, (n_in, n_out, n_expert), "w")
            rows = b.leaf(F32, (n_in, 1, n), "x")
            slots = b.leaf(I32, (n_used, n), "ids")
            some = slice(first, first + n)
            leaves = [(w, weights), (rows, x[some].tobytes()), (slots, ids[some].tobytes())]
            return b.mul_mat_id(w, rows, slots), leaves

        return run(device, build)

    row = 4 * n_out * n_used
    few, many = product(100, 64), product(0, 500)
    for first, n in ((100, 9), (155, 9), (120, 30)):
        assert product(first, n) == few[(first - 100) * row : (first - 100 + n) * row], (first, n)
    if kind == "MXFP4":
        return
    for first, n in ((3, 100), (100, 65), (0, 499)):
        assert product(first, n) == many[first * row : (first + n) * row], (first, n)
    near = [np.frombuffer(x, np.float32) for x in (few, many[100 * row : 164 * row])]
    np.testing.assert_allclose(*near, rtol=1e-3, atol=1e-4)


def test_the_first_of_equal_logits_is_the_argmax(device: Device) -> None:
    n = 248_320
    logits = np.zeros((2, n), np.float32)
    logits[0, [77, 1024, 200_000]] = 1.0  # a block of 1024 threads sees 1024 in an earlier thread
    logits[1, [5, 6, n - 1]] = 2.0

    def build(b: Builder) -> tuple[Any, Leaves]:
        x = b.leaf(F32, (n, 2), "logits")
        return b.argmax(x), [(x, logits.tobytes())]

    found = np.frombuffer(run(device, build), np.int32)
    assert found.tolist() == [77, 5]


@pytest.mark.parametrize("n_rows", [1, 3])
def test_an_argmax_and_the_sums_that_check_it_are_one_kernel(device: Device, n_rows: int) -> None:
    """As the head has them; a logit or a value of a row that is not a number shows in the sum."""
    n = 248_320
    logits, hidden = random(1, n_rows, n), random(2, n_rows, 2048)
    for wrong in (None, logits, hidden):
        if wrong is not None:
            wrong[-1, -1] = np.nan
        graph = Graph()
        b, x = graph.b, graph.leaf(logits)
        best, of_row = b.expand(b.argmax(x)), b.sum_rows(graph.leaf(hidden))
        of_logits = _sum_of_logits(b, x)
        check = b.add(of_row, of_logits)
        found = graph.run(device, [check, best, of_row, of_logits], 4)[0]
        assert all(np.isnan(part).all() for part in found[2:]), "not one kernel"
        np.testing.assert_array_equal(found[1].view(np.int32), np.nanargmax(logits, 1))
        expected = logits.sum(1, dtype=np.float64) + hidden.sum(1, dtype=np.float64)
        np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-2)
        assert np.isnan(found[0][-1]) == (wrong is not None)
