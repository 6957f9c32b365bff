"""Kernels that replace several small ones: right against float64, and quicker than the several."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("moegraph.ggml.lib", reason="the native libraries are not built")

from moegraph.ggml.device import Device, list_devices
from moegraph.ggml.handles import Buffer, Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import F32, I32, Builder, Tensor, shape
from moegraph.graphs.cache import GraphCache
from moegraph.weights import place

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from modelgen.blocks import TYPES

pytestmark = pytest.mark.skipif(
    not any(device["kind"] == "cuda" for device in list_devices()), reason="no CUDA device"
)

EPS = 1e-6
Array = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    """Yield the first CUDA device."""
    opened = Device("cuda")
    yield opened
    opened.close()


class Graph:
    """A graph under construction, with the data of its leaves."""

    def __init__(self) -> None:
        self.context = Context(8192, 8192)
        self.b = Builder(self.context, 8192)
        self._leaves: list[tuple[Tensor, bytes]] = []

    def leaf(self, data: npt.NDArray, dtype: int = F32) -> Tensor:
        """Make a leaf that holds an array of numpy shape (ggml's reversed)."""
        tensor = self.b.leaf(dtype, data.shape[::-1], "x")
        self._leaves.append((tensor, np.ascontiguousarray(data).tobytes()))
        return tensor

    def set(self, tensor: Tensor, data: bytes) -> None:
        """Fill a leaf that was made elsewhere before each run."""
        self._leaves.append((tensor, data))

    def run(
        self, device: Device, outputs: list[Tensor], repeat: int = 1
    ) -> tuple[list[Array], float]:
        """Compute; return the outputs as flat arrays and the median seconds of a run."""
        for tensor in outputs:
            self.b.expand(tensor)
        # the device may reorder and fuse; every tensor has its own memory here
        with self.context, Buffer(
            C.ggml_backend_alloc_ctx_tensors_from_buft(self.context.ptr, device.buft)
        ):
            seconds = []
            for _ in range(repeat):
                for tensor, data in self._leaves:
                    C.ggml_backend_tensor_set(tensor, data, 0, len(data))
                device.synchronize()
                begin = time.perf_counter()
                device.check(C.mg_launch(device.compute.ptr, self.b.graph, ffi.NULL, 0), "graph")
                device.synchronize()
                seconds.append(time.perf_counter() - begin)
            found = []
            for tensor in outputs:
                out = np.empty(C.ggml_nbytes(tensor) // 4, np.float32)
                C.ggml_backend_tensor_get(tensor, ffi.from_buffer(out), 0, out.nbytes)
                found.append(out)
        return found, statistics.median(seconds)


def nmse(got: Array, expected: npt.NDArray) -> float:
    """Return the squared error relative to the expected values."""
    expected = expected.reshape(-1).astype(np.float64)
    return float(((got - expected) ** 2).sum() / (expected**2).sum())


def random(seed: int, *shape: int) -> Array:
    """Return normally distributed numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Step:
    """The input side of a DeltaNet layer: n_k heads of q and of k, n_v of v, of size d."""

    def __init__(self, d: int, n_k: int, n_v: int, n_tokens: int, n_seqs: int) -> None:
        self.d, self.n_k, self.n_v, self.t, self.s = d, n_k, n_v, n_tokens, n_seqs
        self.n_channels = d * (2 * n_k + n_v)
        self.qkv = random(1, n_seqs, n_tokens, self.n_channels)
        self.past = random(2, n_seqs, self.n_channels, 3)
        self.w = random(3, self.n_channels, 4)
        self.alpha, self.beta = (random(i, n_seqs, n_tokens, n_v) for i in (4, 5))
        self.dt, self.a = random(6, n_v), -np.abs(random(7, n_v))

    def build(self, graph: Graph, in_order: bool = True) -> list[Tensor]:
        """Append it; out of order it is the same nodes, but not one kernel."""
        b, d, t, s = graph.b, self.d, self.t, self.s
        state = graph.leaf(self.past.reshape(s, -1))
        row = 4 * 3 * self.n_channels
        beta = graph.leaf(self.beta.reshape(s, t, self.n_v, 1))
        alpha = b.add(graph.leaf(self.alpha), graph.leaf(self.dt))
        gates = [
            b.sigmoid(beta), b.mul(b.softplus(alpha), graph.leaf(self.a))
        ]
        for gate in gates if in_order else reversed(gates):
            b.expand(gate)
        past = b.view(state, (3, self.n_channels, s), (12, row), 0)
        both = b.concat(past, b.transpose(graph.leaf(self.qkv)), 0)
        last = b.view(both, (3, self.n_channels, s), (both.nb[1], both.nb[2]), 4 * t)
        kept = b.expand(b.cpy(last, b.view(state, (3 * self.n_channels, s), (row,), 0)))
        conv = b.silu(b.ssm_conv(both, graph.leaf(self.w)))
        normed = []
        for part in range(2):
            at = 4 * d * self.n_k * part
            strides = (4 * d, 4 * self.n_channels, 4 * self.n_channels * t)
            x = b.view(conv, (d, self.n_k, t, s), strides, at)
            normed.append(b.expand(b.scale(b.rms_norm(x, EPS / d), d**-0.5)))
        return [*gates, kept, conv, *normed]

    def expected(self) -> list[npt.NDArray]:
        """Compute the same in float64."""
        alpha, beta = self.alpha.astype(np.float64), self.beta.astype(np.float64)
        gate = np.log1p(np.exp(alpha + self.dt)) * self.a
        columns = np.concatenate([self.past.transpose(0, 2, 1), self.qkv], 1).astype(np.float64)
        conv = sum(columns[:, j : j + self.t] * self.w[:, j] for j in range(4))
        conv = conv / (1 + np.exp(-conv))
        heads = conv[..., : 2 * self.d * self.n_k].reshape(self.s, self.t, 2, self.n_k, self.d)
        heads = heads / np.sqrt((heads**2).sum(-1, keepdims=True) + EPS)
        kept = columns[:, self.t :].transpose(0, 2, 1)
        return [1 / (1 + np.exp(-beta)), gate, kept, conv, heads[:, :, 0], heads[:, :, 1]]


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("n_tokens", "n_seqs"), [(1, 1), (1, 3), (2, 2), (7, 1), (32, 2), (33, 1)])
def test_gates_convolution_and_norms(
    device: Device, d: int, n_tokens: int, n_seqs: int
) -> None:
    step = Step(d, 4, 8, n_tokens, n_seqs)
    graph = Graph()
    found, _ = graph.run(device, step.build(graph))
    for got, expected in zip(found, step.expected()):
        assert nmse(got, expected) < 1e-11


def test_the_small_ops_of_a_deltanet_layer_take_a_third_of_the_time(device: Device) -> None:
    step = Step(128, 16, 32, 1, 1)

    def seconds(in_order: bool) -> float:
        graph = Graph()
        outputs = [tensor for _ in range(30) for tensor in step.build(graph, in_order)]
        return graph.run(device, outputs, 30)[1]

    apart, together = seconds(False), seconds(True)
    assert together < apart / 3, f"{together * 1e6:.0f} us against {apart * 1e6:.0f} us"


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("n_rows", [1, 5, 96])
def test_gated_norm(device: Device, d: int, n_rows: int) -> None:
    x, z, w = random(1, n_rows, d), random(2, n_rows, d), random(3, d)
    graph = Graph()
    b = graph.b
    out = b.mul(b.norm(graph.leaf(x), graph.leaf(w), EPS), b.silu(graph.leaf(z)))
    wide = z.astype(np.float64)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + EPS) * w
    (found,), _ = graph.run(device, [out])
    assert nmse(found, expected * wide / (1 + np.exp(-wide))) < 1e-11


def layer_end(graph: Graph, n: int, n_rows: int, chain: bool) -> tuple[list[Tensor], list]:
    """Append a shared expert's gate, the sums and the norm; return them and what is expected."""
    b = graph.b
    x, shexp, moe, residual = (random(i, n_rows, n) for i in range(4))
    w_gate, w = random(5, 1, n) / n**0.5, random(6, n)
    gate = b.mul_mat(graph.leaf(w_gate), graph.leaf(x))
    out = b.mul(graph.leaf(shexp), b.sigmoid(gate))
    wide = x.astype(np.float64) @ w_gate.T.astype(np.float64)
    total = shexp / (1 + np.exp(-wide))
    if chain:
        out, total = b.add(graph.leaf(moe), out), total + moe
    out, total = b.add(out, graph.leaf(residual)), total + residual
    normed = b.norm(out, graph.leaf(w), EPS)
    mean = (total**2).mean(-1, keepdims=True)
    return [out, normed], [total, total / np.sqrt(mean + EPS) * w]


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize(("n", "n_rows"), [(2048, 1), (512, 3), (2048, 23), (1536, 100)])
def test_the_end_of_a_layer(device: Device, n: int, n_rows: int, chain: bool) -> None:
    graph = Graph()
    outputs, expected = layer_end(graph, n, n_rows, chain)
    found, _ = graph.run(device, outputs)
    # above 32 rows the product may be left to a kernel that rounds to 10 bits
    bound = 1e-11 if n_rows <= 32 else 1e-6
    for got, wanted in zip(found, expected):
        assert nmse(got, wanted) < bound


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_experts_of_one_token_read_what_the_norm_quantized(device: Device, kind: str) -> None:
    """The same product behind a norm and behind a leaf, and of two tokens, which quantize alone."""
    n_in, n_out, n_expert = 2048, 64, 8
    block = TYPES[kind]
    count = n_expert * n_out * n_in // block.n_elem
    data = block.fill(np.random.default_rng(4), count, 0.5)
    x, y, w = random(1, 1, n_in), random(2, 1, n_in), random(3, n_in)
    total = (x + y).astype(np.float64)
    normed = (total / np.sqrt((total**2).mean() + EPS) * w).astype(np.float32)

    def product(behind_norm: bool, n_tokens: int) -> Array:
        graph = Graph()
        b = graph.b
        experts = b.leaf(block.ggml_id, (n_in, n_out, n_expert), "w")
        graph.set(experts, data.tobytes())
        ids = graph.leaf(np.tile(np.array([[5, 0, 7, 2]], np.int32), (n_tokens, 1)), I32)
        if behind_norm:
            cur = b.norm(b.add(graph.leaf(x), graph.leaf(y)), graph.leaf(w), EPS)
        else:
            cur = graph.leaf(np.tile(normed, (n_tokens, 1)))
        cur = b.reshape(cur, n_in, 1, n_tokens)
        (found,), _ = graph.run(device, [b.mul_mat_id(experts, cur, ids)])
        return found[: 4 * n_out]

    alone = product(False, 1)
    assert nmse(product(True, 1), alone) < 1e-6
    assert nmse(product(False, 2), alone) < 1e-10



def moe(graph: Graph, kind: str, x: Tensor, routed: bool, shared: bool, seed: int) -> Tensor:
    """Append routed experts and a shared expert of one input, and their sum."""
    b, block = graph.b, TYPES[kind]
    n, n_ff, n_expert = x.ne[0], 512, 8
    rng = np.random.default_rng(seed)

    def weights(n_in: int, n_out: int, n_stack: int) -> Tensor:
        tensor = b.leaf(block.ggml_id, (n_in, n_out, n_stack), "w")
        count = n_in * n_out * n_stack // block.n_elem
        graph.set(tensor, block.fill(rng, count, 0.5).tobytes())
        return tensor

    parts = []
    stacks = [weights(n, n_ff, n_expert), weights(n, n_ff, n_expert), weights(n_ff, n, n_expert)]
    matrices = [weights(n, n_ff, 1), weights(n, n_ff, 1), weights(n_ff, n, 1)]
    if routed:
        ids = np.tile(np.array([[5, 0, 7, 2]], np.int32), (x.ne[1], 1))
        slots, cur = graph.leaf(ids, I32), b.reshape(x, n, 1, x.ne[1])
        up, gate = (b.mul_mat_id(w, cur, slots) for w in stacks[:2])
        rows = b.mul_mat_id(stacks[2], b.swiglu(gate, up), slots)
        parts.append(b.expand(b.cont(b.view(rows, (n, x.ne[1]), (rows.nb[2],), 3 * rows.nb[1]))))
    if shared:
        up, gate = (b.mul_mat(w, x) for w in matrices[:2])
        parts.append(b.expand(b.mul_mat(matrices[2], b.swiglu(gate, up))))
    return b.expand(b.add(*parts) if len(parts) == 2 else b.scale(parts[0], 1.0))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("n_rows", [1, 3, 17, 32])
def test_a_shared_expert_beside_routed_ones(device: Device, kind: str, n_rows: int) -> None:
    """Twenty layers, so that a race would show; each side alone is the judge."""
    data = random(1, n_rows, 1024)

    def chain(routed: bool, shared: bool) -> list[Array]:
        graph, outputs = Graph(), []
        x = graph.leaf(data)
        for layer in range(20):
            cur = graph.b.norm(x, graph.leaf(random(layer, 1024)), EPS)
            outputs.append(moe(graph, kind, graph.b.expand(cur), routed, shared, layer))
        return graph.run(device, outputs, 3)[0]

    both, routed, shared = chain(True, True), chain(True, False), chain(False, True)
    for got, first, second in zip(both, routed, shared):
        # one rounding of an int8 activation that falls the other way is 1e-8
        assert nmse(got, first + second) < 1e-7


def test_a_shared_expert_costs_less_than_it_takes(device: Device) -> None:
    def seconds(routed: bool, shared: bool) -> float:
        graph = Graph()
        x = graph.leaf(random(1, 1, 2048))
        for layer in range(20):
            cur = graph.b.norm(x, graph.leaf(random(layer, 2048)), EPS)
            x = moe(graph, "Q8_0", graph.b.expand(cur), routed, shared, layer)
        return graph.run(device, [x], 30)[1]

    both, routed, shared = seconds(True, True), seconds(True, False), seconds(False, True)
    assert both < routed + 0.6 * shared, f"{both * 1e6:.0f} {routed * 1e6:.0f} {shared * 1e6:.0f}"


def test_the_host_sees_what_a_graph_publishes_while_it_runs(device: Device) -> None:
    """Direct, captured and replayed; what was published keeps its memory until it is out."""
    n, n_used = 4096, 8
    host = device.host_buffer(4 * (n + n_used), must_pin=True)
    seen_x, seen_ids = host.array[: 4 * n].view(np.float32), host.array[4 * n :].view(np.int32)
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
            b.expand(b.cpy(tensor, target))
        for _ in range(200):  # long enough, and in need of memory
            x = b.expand(b.mul_mat(w, x))
        return a, table, rows

    built = graphs.get("published", 512, build)
    a, table, rows = built.outputs
    for turn in range(6):
        operands = random(turn, n), np.random.default_rng(turn).permutation(64).astype(np.int32)
        chosen = np.arange(turn, turn + n_used, dtype=np.int32)
        for tensor, data in zip((a, table, rows), (*operands, chosen)):
            C.ggml_backend_tensor_set(tensor, ffi.from_buffer(data), 0, data.nbytes)
        seen_x[:], seen_ids[:] = np.nan, C.MG_NO_ID
        device.synchronize()
        start = time.perf_counter()
        device.check(C.mg_launch(device.compute.ptr, built.graph, ffi.NULL, 0), "graph")
        where = ffi.cast("int32_t *", seen_ids.ctypes.data)
        assert C.mg_wait_ids(device.compute.ptr, where, n_used)
        seen = time.perf_counter() - start
        got_x, got_ids = seen_x.copy(), seen_ids.copy()
        device.synchronize()
        assert turn < 3 or seen < 0.5 * (time.perf_counter() - start)
        np.testing.assert_array_equal(got_ids, operands[1][chosen])
        np.testing.assert_array_equal(got_x, 2 * operands[0])
    for handle in (graphs, memory, host):
        handle.close()
