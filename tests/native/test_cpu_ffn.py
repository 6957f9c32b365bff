"""Expert FFNs of our own kernel: bit-equal to ggml's graph, right to float64, on any threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, quants
from helpers.patience import until

from moegraph.arch.blocks.experts import build_expert_rows
from moegraph.ggml.cpu_ffn import CpuFfn
from moegraph.ggml.device import Device
from moegraph.ggml.handles import Buffer, Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import F32, I32, Tensor
from moegraph.graphs.cache import GraphCache
from moegraph.graphs.layer import build_expert_sum

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from modelgen.blocks import TYPES

N_EMBD, N_FF, N_EXPERT, N_USED, MAX_ROWS = 512, 256, 20, 6, 32
# Relative squared errors of rows: inputs are rounded to bf16, to f16, or to 8 bits, twice.
LIMITS = {"F32": 1e-11, "F16": 1e-6, "BF16": 1e-4}
LIMIT_QUANTIZED = 1e-3


class Layer:
    """Random stacks of one layer, with what ggml's graph and float64 make of them."""

    def __init__(self, kinds: tuple[str, str, str], merged: bool, shape: tuple[int, int]) -> None:
        self.n_embd, self.n_ff = shape
        self.kinds = kinds
        self._context = Context(8)
        self._cpu = Device("cpu", 1)
        self._graphs = GraphCache(self._cpu)
        self.values: dict[str, npt.NDArray] = {}
        raw: dict[str, npt.NDArray] = {}
        for at, (part, kind) in enumerate(zip(("gate", "up", "down"), kinds)):
            n_in, n_out = (self.n_ff, self.n_embd) if part == "down" else (self.n_embd, self.n_ff)
            block = TYPES[kind]
            n_blocks = N_EXPERT * n_out * n_in // block.n_elem
            rows = block.fill(np.random.default_rng([at, block.ggml_id]), n_blocks, n_in**-0.5)
            rows = rows.reshape(N_EXPERT, n_out, block.row_bytes(n_in))
            values = quants.dequantize(rows, GGMLQuantizationType[kind]).astype(np.float64)
            raw[part], self.values[part] = rows, values
        types = dict(zip(("gate", "up", "down"), kinds))
        if merged:
            raw = {"gate_up": np.concatenate([raw["gate"], raw["up"]], axis=1), "down": raw["down"]}
            types["gate_up"] = kinds[0]
        parts = {part: self._tensor(types[part], rows, part) for part, rows in raw.items()}
        self.x = C.ggml_new_tensor_2d(self._context.ptr, F32, self.n_embd, MAX_ROWS)
        self.weights = C.ggml_new_tensor_3d(self._context.ptr, F32, 1, N_USED, MAX_ROWS)
        self.ids = C.ggml_new_tensor_2d(self._context.ptr, I32, N_USED, MAX_ROWS)
        self.parts = parts
        self._buffer = Buffer(
            C.ggml_backend_alloc_ctx_tensors_from_buft(self._context.ptr, self._cpu.buft)
        )
        for part, rows in raw.items():
            data = np.ascontiguousarray(rows).tobytes()
            C.ggml_backend_tensor_set(parts[part], data, 0, len(data))

    def _tensor(self, kind: str, rows: npt.NDArray, part: str) -> Tensor:
        n_in = self.n_ff if part == "down" else self.n_embd
        return C.ggml_new_tensor_3d(
            self._context.ptr, TYPES[kind].ggml_id, n_in, rows.shape[1], N_EXPERT
        )

    def put(self, rng: np.random.Generator, ids: npt.NDArray[np.int32]) -> None:
        """Fill x and weights at random, and the first rows of ids."""
        view(self.x)[:] = rng.standard_normal(self.n_embd * MAX_ROWS)
        view(self.weights)[:] = rng.uniform(0.02, 0.5, N_USED * MAX_ROWS)
        view(self.ids, np.int32)[: ids.size] = ids.ravel()

    def graph(self, n_rows: int) -> npt.NDArray[np.float32]:
        """Return what ggml's graph computes: [n_rows, n_embd]."""

        def build(b):
            x = b.view(self.x, (self.n_embd, n_rows), (self.x.nb[1],))
            weights = b.view(self.weights, (1, N_USED, n_rows), tuple(self.weights.nb)[1:3])
            ids = b.view(self.ids, (N_USED, n_rows), (self.ids.nb[1],))
            return build_expert_sum(b, build_expert_rows(b, self.parts, x, ids, weights, 0), 0)

        built = self._graphs.get(n_rows, 128, build)
        self._cpu.check(C.mg_launch(self._cpu.compute.ptr, built.graph, ffi.NULL, 0), "graph")
        return view(built.outputs).reshape(n_rows, self.n_embd).copy()

    def exact(self, n_rows: int) -> npt.NDArray[np.float64]:
        """Return the same in float64 from the dequantized weights."""
        x = view(self.x).reshape(MAX_ROWS, -1).astype(np.float64)
        weights, ids = view(self.weights).reshape(MAX_ROWS, -1), view(self.ids, np.int32)
        y = np.zeros((n_rows, self.n_embd))
        for row, k in np.ndindex(n_rows, N_USED):
            e = ids.reshape(MAX_ROWS, -1)[row, k]
            if 0 <= e < N_EXPERT:
                g, u = self.values["gate"][e] @ x[row], self.values["up"][e] @ x[row]
                y[row] += weights[row, k] * (self.values["down"][e] @ (g / (1 + np.exp(-g)) * u))
        return y

    def own(self, ffn: CpuFfn, n_rows: int) -> npt.NDArray[np.float32]:
        """Return what our kernel computes."""
        y = self.begun(ffn, n_rows)
        ffn.end()
        return y

    def begun(self, ffn: CpuFfn, n_rows: int) -> npt.NDArray[np.float32]:
        """Have our kernel begin; return what it will write to."""
        y = np.full((n_rows, self.n_embd), np.nan, np.float32)
        self.described = ffn.layer(self.parts)  # lives as long as the job
        x, ids, weights = self.x.data, self.ids.data, self.weights.data
        ffn.begin(self.described, x, ids, weights, n_rows, ffi.cast("float *", y.ctypes.data))
        return y

    def close(self) -> None:
        """Free it all."""
        self._graphs.close()
        for handle in (self._buffer, self._context, self._cpu):
            handle.close()


def view(t: Tensor, dtype: type = np.float32) -> npt.NDArray:
    """Return the elements of a tensor in host memory."""
    return np.frombuffer(ffi.buffer(t.data, C.ggml_nbytes(t)), dtype)


def choose(rng: np.random.Generator, n_rows: int, absent: float = 0.3) -> npt.NDArray[np.int32]:
    """Return ids [n_rows, N_USED], unlike ones in a row, some of them of no expert."""
    ids = np.stack([rng.permutation(N_EXPERT)[:N_USED] for _ in range(n_rows)])
    nobody = rng.choice([-1, -7, N_EXPERT, 2**31 - 1], ids.shape)
    return np.where(rng.random(ids.shape) < absent, nobody, ids).astype(np.int32)


@pytest.fixture
def make_layer(no_leak: None) -> Iterator:
    """Return a function that makes a layer and frees it after the test."""
    made: list[Layer] = []

    def make(*kinds: str, merged: bool = False, shape: tuple[int, int] = (N_EMBD, N_FF)) -> Layer:
        made.append(Layer(kinds, merged, shape))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for layer in made:
        layer.close()


def check(layer: Layer, ffn: CpuFfn, n_rows: int) -> None:
    """Assert that our kernel agrees with the graph in every bit, and with float64."""
    got = layer.own(ffn, n_rows)
    np.testing.assert_array_equal(got, layer.graph(n_rows))
    check_exact(layer, got, n_rows)


def check_exact(layer: Layer, got: npt.NDArray[np.float32], n_rows: int) -> None:
    """Assert that rows agree with float64."""
    exact = layer.exact(n_rows)
    limit = max(LIMITS.get(kind, LIMIT_QUANTIZED) for kind in layer.kinds)
    for row in range(n_rows):
        error = np.sum((got[row] - exact[row]) ** 2)
        assert error <= limit * np.sum(exact[row] ** 2), f"row {row} of {n_rows}"


@pytest.mark.parametrize("merged", [False, True], ids=["gate, up", "gate_up"])
@pytest.mark.parametrize("kind", sorted(TYPES))
def test_every_type_equals_the_graph(make_layer, kind: str, merged: bool) -> None:
    layer, rng = make_layer(kind, kind, kind, merged=merged), np.random.default_rng(3)
    with CpuFfn(3, N_EMBD, N_FF, N_USED, MAX_ROWS) as ffn:
        for n_rows in (1, 2, 8):
            layer.put(rng, choose(rng, n_rows))
            check(layer, ffn, n_rows)


@pytest.mark.parametrize("n_threads", [1, 3, 8])
def test_no_number_of_threads_or_rows_changes_a_bit(make_layer, n_threads: int) -> None:
    layer, rng = make_layer("Q4_K", "Q8_0", "Q5_K"), np.random.default_rng(n_threads)
    with CpuFfn(n_threads, N_EMBD, N_FF, N_USED, MAX_ROWS) as ffn:
        for n_rows in range(1, 9):
            for absent in (0.0, 0.3, 0.9):
                layer.put(rng, choose(rng, n_rows, absent))
                check(layer, ffn, n_rows)


@pytest.mark.parametrize("n_rows", [9, 17, MAX_ROWS])
def test_a_row_has_the_bits_that_it_has_alone(make_layer, n_rows: int) -> None:
    """ggml's graph has not, where many rows chose an expert: it then multiplies tiles."""
    layer, rng = make_layer("Q4_K", "Q8_0", "Q5_K"), np.random.default_rng(n_rows)
    with CpuFfn(3, N_EMBD, N_FF, N_USED, MAX_ROWS) as ffn:
        ids = choose(rng, n_rows, 0.1)
        layer.put(rng, ids)
        got = layer.own(ffn, n_rows)
        check_exact(layer, got, n_rows)
        for row in range(n_rows):
            view(layer.ids, np.int32)[: ids.size] = np.where(
                np.arange(n_rows)[:, None] == row, ids, -1
            ).ravel()
            np.testing.assert_array_equal(layer.own(ffn, n_rows)[row], got[row])


@pytest.mark.parametrize("shape", [(96, 32), (64, 480), (2048, 64), (32, 32)])
def test_sizes_that_are_no_multiple_of_a_unit_of_work(make_layer, shape: tuple[int, int]) -> None:
    for kinds in (("Q4_0", "Q4_0", "Q8_0"), ("F32", "F32", "F32"), ("BF16", "F16", "IQ4_NL")):
        layer, rng = make_layer(*kinds, shape=shape), np.random.default_rng(0)
        with CpuFfn(4, *shape, N_USED, MAX_ROWS) as ffn:
            for n_rows in (1, 3):
                layer.put(rng, choose(rng, n_rows))
                check(layer, ffn, n_rows)


def test_an_expert_that_all_rows_chose_and_one_chosen_twice(make_layer) -> None:
    layer, rng = make_layer("Q8_0", "Q8_0", "Q8_0"), np.random.default_rng(5)
    with CpuFfn(3, N_EMBD, N_FF, N_USED, MAX_ROWS) as ffn:
        layer.put(rng, np.tile(np.array([4, 4, -1, 0, 19, 4], np.int32), (MAX_ROWS, 1)))
        exact = layer.exact(MAX_ROWS)
        error = np.sum((layer.own(ffn, MAX_ROWS) - exact) ** 2)
        assert error < LIMIT_QUANTIZED * np.sum(exact**2)
        check(layer, ffn, 2)


def test_thousands_of_calls_from_many_threads_in_turn_stay_equal(make_layer) -> None:
    layer, rng = make_layer("Q4_K", "Q4_K", "Q5_K"), np.random.default_rng(1)
    layer.put(rng, choose(rng, 2, 0.2))
    expected, wrong = layer.graph(2), []
    with CpuFfn(4, N_EMBD, N_FF, N_USED, MAX_ROWS) as ffn:

        def calls() -> None:
            wrong.extend(i for i in range(600) if not np.array_equal(layer.own(ffn, 2), expected))

        for _ in range(4):
            thread = threading.Thread(target=calls)
            thread.start()
            thread.join()
    assert wrong == []


def test_the_threads_compute_from_the_beginning_of_a_job_on(make_layer) -> None:
    """The caller may come late, and all is done by then, or at once."""
    layer, rng = make_layer("Q4_K", "Q4_K", "Q5_K"), np.random.default_rng(2)
    with CpuFfn(3, N_EMBD, N_FF, N_USED, MAX_ROWS) as ffn:
        ffn.end()  # there is no job
        for turn in range(40):
            layer.put(rng, choose(rng, 4))
            y = layer.begun(ffn, 4)
            if turn % 4 == 0:
                until(lambda y=y: np.isfinite(y).all())  # the threads do not wait for the caller
            ffn.end()
            np.testing.assert_array_equal(y, layer.graph(4))
            ffn.end()


def test_a_job_that_nobody_ends_is_ended_by_the_next_or_by_closing(make_layer) -> None:
    layer, rng = make_layer("Q4_K", "Q4_K", "Q5_K"), np.random.default_rng(3)
    for n_threads in (1, 4):
        with CpuFfn(n_threads, N_EMBD, N_FF, N_USED, MAX_ROWS) as ffn:
            for _ in range(30):
                layer.put(rng, choose(rng, 3))
                lost, expected = layer.begun(ffn, 3), layer.graph(3)
                np.testing.assert_array_equal(layer.own(ffn, 3), expected)
                np.testing.assert_array_equal(lost, expected)
            lost = layer.begun(ffn, 3)


def test_open_and_close_many_times_leaves_no_thread(make_layer) -> None:
    layer, rng = make_layer("Q4_K", "Q4_K", "Q5_K"), np.random.default_rng(1)
    layer.put(rng, choose(rng, 1, 0.0))
    expected = layer.graph(1)
    before = len(list(Path("/proc/self/task").iterdir()))
    for i in range(60):
        with CpuFfn(1 + i % 8, N_EMBD, N_FF, N_USED, MAX_ROWS) as ffn:
            if i % 3:
                np.testing.assert_array_equal(layer.own(ffn, 1), expected)
    # a thread that was joined may be listed for a moment longer
    until(lambda: len(list(Path("/proc/self/task").iterdir())) <= before)
