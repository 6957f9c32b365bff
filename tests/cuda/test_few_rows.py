"""What the kernels for a few rows promise; few_rows.cpp judges their numbers."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moegraph.ggml.device import Device
from moegraph.ggml.handles import Buffer, Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import F32, Builder

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from modelgen.blocks import TYPES

N_IN, N_OUT = 2048, 96
Leaves = list[tuple[Any, bytes]]


def run(device: Device, build: Callable[[Builder], tuple[Any, Leaves]], repeat: int = 1) -> tuple:
    """Build and compute a graph; return the result as bytes and the median seconds of a run."""
    with Context(1024, 1024) as context:
        builder = Builder(context, 1024)
        out, leaves = build(builder)
        builder.expand(out)
        with Buffer(C.ggml_backend_alloc_ctx_tensors_from_buft(context.ptr, device.buft)):
            for tensor, data in leaves:
                C.ggml_backend_tensor_set(tensor, data, 0, len(data))
            seconds = []
            for _ in range(repeat):
                begin = time.perf_counter()
                device.check(C.mg_launch(device.compute.ptr, builder.graph, ffi.NULL, 0), "graph")
                device.synchronize()
                seconds.append(time.perf_counter() - begin)
            result = bytearray(C.ggml_nbytes(out))
            C.ggml_backend_tensor_get(out, ffi.from_buffer(result), 0, len(result))
    return bytes(result), statistics.median(seconds)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_a_product_does_not_depend_on_the_number_of_rows(kind: str, device: Device) -> None:
    """On devices with asynchronous copies; others use these kernels from 9 rows only."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((32, N_IN)).astype(np.float32)
    weights = TYPES[kind].fill(rng, N_OUT * N_IN // TYPES[kind].n_elem, 0.5).tobytes()

    def product(n_rows: int) -> bytes:
        def build(b: Builder) -> tuple[Any, Leaves]:
            w = b.leaf(TYPES[kind].ggml_id, (N_IN, N_OUT), "w")
            rows = b.leaf(F32, (N_IN, n_rows), "x")
            return b.mul_mat(w, rows), [(w, weights), (rows, x[:n_rows].tobytes())]

        return run(device, build)[0]

    widest = product(32)
    for n_rows in (1, 2, 5, 8, 9, 16, 17, 24, 25):
        assert product(n_rows) == widest[: 4 * N_OUT * n_rows], f"{n_rows} rows"


def test_residual_and_norm_take_the_time_of_a_norm(device: Device) -> None:
    """Links of sum, norm and weights against links of norm and weights: one kernel each."""
    rng = np.random.default_rng(6)
    data = [rng.standard_normal(N_IN).astype(np.float32).tobytes() for _ in range(3)]

    def seconds(with_sum: bool) -> float:
        def build(b: Builder) -> tuple[Any, Leaves]:
            x, y = (b.leaf(F32, (N_IN, 1), name) for name in "xy")
            w = b.leaf(F32, (N_IN,), "w")
            out = x
            for _ in range(100):
                out = b.expand(b.norm(b.add(out, y) if with_sum else out, w, 1e-6))
            return out, list(zip((x, y, w), data))

        return run(device, build, 30)[1]

    plain, both = seconds(False), seconds(True)
    assert both < 1.2 * plain, f"{both * 1e6:.0f} us against {plain * 1e6:.0f} us"


def test_the_first_of_equal_logits_is_the_argmax(device: Device) -> None:
    n = 248_320
    logits = np.zeros((2, n), np.float32)
    logits[0, [77, 1024, 200_000]] = 1.0  # a block of 1024 threads sees 1024 in an earlier thread
    logits[1, [5, 6, n - 1]] = 2.0

    def build(b: Builder) -> tuple[Any, Leaves]:
        x = b.leaf(F32, (n, 2), "logits")
        return b.argmax(x), [(x, logits.tobytes())]

    found = np.frombuffer(run(device, build)[0], np.int32)
    assert found.tolist() == [77, 5]
