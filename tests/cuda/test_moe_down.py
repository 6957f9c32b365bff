"""The end of a few tokens' routed experts as one kernel: right, and really one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, quants
from helpers.graph_runs import Array, Graph, nmse, random

from moegraph.arch.blocks.experts import build_expert_rows
from moegraph.ggml.device import Device
from moegraph.ggml.lib import C
from moegraph.ggml.ops import I32, Tensor
from moegraph.graphs.layer import build_expert_sum

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from modelgen.blocks import TYPES

EPS = 1e-6


class Experts:
    """Routed experts of a few tokens over a bank whose slots lie further apart than their rows."""

    KINDS = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
    N_EMBD, N_FF, N_SLOTS, PAD = 512, 512, 12, 16

    def __init__(self, kind: str, ids: list[list[int]]) -> None:
        self.kind, self.ids = kind, np.array(ids, np.int32)
        self.n_rows, self.k = self.ids.shape
        rng = np.random.default_rng(3)
        self.stacks = {
            part: self._fill(
                rng,
                kind,
                *((self.N_FF, self.N_EMBD) if part == "down" else (self.N_EMBD, self.N_FF)),
            )
            for part in ("gate", "up", "down")
        }
        self.x = random(1, self.n_rows, self.N_EMBD)
        self.routing = random(2, self.n_rows, self.k, 1)

    def _fill(self, rng: np.random.Generator, kind: str, n_in: int, n_out: int) -> npt.NDArray:
        """Return [n_slots, rows with the padding, bytes of a row]."""
        count = self.N_SLOTS * (n_out + self.PAD) * n_in // TYPES[kind].n_elem
        raw = TYPES[kind].fill(rng, count, n_in**-0.5)
        return raw.reshape(self.N_SLOTS, n_out + self.PAD, TYPES[kind].row_bytes(n_in))

    def build(self, graph: Graph, apart: bool) -> tuple[Tensor, Tensor]:
        """Append them; apart: not as one kernel. Return the sum, and the products in front."""
        b, parts = graph.b, {}
        for part, data in self.stacks.items():
            n_in, n_out = (self.N_FF, self.N_EMBD) if part == "down" else (self.N_EMBD, self.N_FF)
            whole = graph.blocks(self.kind, data, n_in, n_out + self.PAD, self.N_SLOTS)
            parts[part] = b.view(whole, (n_in, n_out, self.N_SLOTS), (whole.nb[1], whole.nb[2]))
        slots, routing = graph.leaf(self.ids, I32), graph.leaf(self.routing)
        x = b.scale(graph.leaf(self.x), 1.0)
        rows = build_expert_rows(b, parts, x, slots, routing, 0)
        down = rows.src[0]
        if apart:
            C.ggml_set_output(down)
        return build_expert_sum(b, rows, 0), down

    def expected(self, act: Array) -> npt.NDArray:
        """Compute the end of it in float64 from the activations."""
        kind = GGMLQuantizationType[self.kind]
        raw = self.stacks["down"][:, : self.N_EMBD]
        w = quants.dequantize(raw.reshape(-1, raw.shape[-1]), kind).astype(np.float64)
        w = w.reshape(self.N_SLOTS, self.N_EMBD, self.N_FF)
        y = act.reshape(self.n_rows, self.k, self.N_FF)
        out = np.zeros((self.n_rows, self.N_EMBD))
        for row in range(self.n_rows):
            for i, slot in enumerate(self.ids[row]):
                if 0 <= slot < self.N_SLOTS:
                    out[row] += self.routing[row, i, 0] * (w[slot] @ y[row, i])
        return out

    def run(self, device: Device, apart: bool, repeat: int) -> list[Array]:
        """Return the sum, the products (not a number where they were not written), activations."""
        graph = Graph()
        out, down = self.build(graph, apart)
        return graph.run(device, [out, down, down.src[1]], repeat)[0]


@pytest.mark.parametrize("kind", Experts.KINDS)
@pytest.mark.parametrize(
    "ids",
    [
        [[5, 0, 7, 2, 11, 1, 9, 3]],
        [[5, 0, 5, 5, 11, 0, 9, 3]],
        [[5, -1, 7, -1, 11, 1, -2, 3]],
        [[5, 12, 7, 2, 100_000, 1, 9, 2**31 - 1]],
        [[4, 4]],
        [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, -1], [0] * 12, [-1] * 11 + [3], list(range(12))],
    ],
)
def test_the_end_of_the_experts_of_a_few_tokens(
    device: Device, capability: int, kind: str, ids: list[list[int]]
) -> None:
    """One token's have the bits of nodes apart: both have the kernel for one row."""
    experts = Experts(kind, ids)
    got, rows, act = experts.run(device, False, 1)
    single, parts, _ = experts.run(device, True, 1)
    assert np.isnan(rows).all(), "not one kernel"
    assert not np.isnan(parts).any()
    expected = experts.expected(act)
    # Q4_0 reads sums of activations, rounded to half precision: that may fall either way
    factor, bound = (2, 1e-6) if kind == "Q4_0" else (1.05, 1e-8)
    assert nmse(got, expected) <= factor * nmse(single, expected) < 1e-3
    assert nmse(got, single) < bound
    if kind != "Q4_0" and len(ids) == 1 and capability >= 80:
        assert got.tobytes() == single.tobytes()
    assert experts.run(device, False, 4)[0].tobytes() == got.tobytes(), "captured"


@pytest.mark.parametrize("kind", Experts.KINDS)
def test_experts_that_are_not_there_add_nothing(device: Device, kind: str) -> None:
    got, rows, _ = Experts(kind, [[-1] * 8]).run(device, False, 1)
    assert np.isnan(rows).all()
    assert not got.any()


def test_the_norm_behind_the_experts_is_still_one_kernel_with_the_sum(device: Device) -> None:
    experts, graph = Experts("Q5_K", [[5, 0, 7, 2, 11, 1, 9, 3]]), Graph()
    out, down = experts.build(graph, False)
    total = graph.b.add(out, graph.leaf(random(4, 1, Experts.N_EMBD)))
    result = graph.b.norm(total, graph.leaf(random(5, Experts.N_EMBD)), EPS)
    norm = result.src[0]
    _, rows, normed, between = graph.run(device, [result, down, total, norm])[0]
    assert np.isnan(rows).all()
    assert np.isnan(between).all()
    assert not np.isnan(normed).any()
