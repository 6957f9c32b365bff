"""Products of one row by default: right to float64, and the same bits on every call."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, quants
from helpers.graph_runs import Graph, nmse, random
from modelgen.blocks import TYPES

from moegraph.ggml.device import Device
from moegraph.ggml.lib import C
from moegraph.ggml.ops import I32, Tensor

KINDS = ("Q8_0", "Q4_K", "Q5_K", "Q6_K")
N_EXPERT, N_USED = 12, 8
LIMIT = 1e-6  # of the squared error; an activation that is rounded to the other side makes 2e-7
Values = npt.NDArray[np.float64]


def rounded(x: npt.NDArray[np.float32]) -> Values:
    """Round activations to 8 bits, in blocks of 32, as the kernels do."""
    blocks = x.reshape(-1, 32)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    whole = np.rint(blocks * (np.float32(127) / largest))
    return (whole * (largest / np.float32(127)).astype(np.float64)).reshape(x.shape)


class Products:
    """A graph of products with random weights."""

    def __init__(self, seed: int) -> None:
        self.graph, self.rng = Graph(), np.random.default_rng(seed)

    def weight(self, kind: str, *ne: int) -> tuple[Tensor, Values]:
        """Append weights; return them, and their values [..., ne1, ne0]."""
        block = TYPES[kind]
        raw = block.fill(self.rng, int(np.prod(ne)) // block.n_elem, ne[0] ** -0.5)
        rows = np.frombuffer(raw.tobytes(), np.uint8).reshape(-1, block.row_bytes(ne[0]))
        values = quants.dequantize(rows, GGMLQuantizationType[kind]).astype(np.float64)
        return self.graph.blocks(kind, raw, *ne), values.reshape(*ne[::-1])

    def check(self, device: Device, outputs: list[Tensor], expected: list[Any]) -> list[bytes]:
        """Hold results to float64, and captured graphs to the first run; return the bits."""
        with self.graph.launches(device, outputs) as launch:
            found, *_, last = (launch()[0] for _ in range(4))
        errors = [nmse(got, right) for got, right in zip(found, expected, strict=True)]
        assert max(errors) < LIMIT, errors
        bits = [[one.tobytes() for one in results] for results in (found, last)]
        assert bits[0] == bits[1], "captured"
        return bits[0]


@pytest.mark.parametrize(("n_in", "n_out"), [
    (2048, (8191,)), (2048, (512, 33, 2048, 7)), (512, (2050,)), (4096, (300, 2048)),
    (1280, (70,)), (4864, (130,)),
])  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_one_row(
    device: Device, capability: int, kind: str, n_in: int, n_out: tuple[int, ...]
) -> None:
    """Several of one input, with ragged numbers of rows; a sum behind one is not lost."""

    def compute(apart: bool) -> list[bytes]:
        p = Products(n_in)
        row = random(1, 1, n_in)
        x = p.graph.b.scale(p.graph.leaf(row), 1.0)
        weights = [p.weight(kind, n_in, n) for n in n_out]
        outputs = [p.graph.b.expand(p.graph.b.mul_mat(w, x)) for w, _ in weights]
        expected = [rounded(row)[0] @ values.T for _, values in weights]
        if apart:
            C.moegraph_keep_rows_apart(p.graph.b.graph)
        else:
            more = random(2, 1, n_out[-1])
            weight, values = p.weight(kind, n_in, n_out[-1])
            product = p.graph.b.mul_mat(weight, x)
            outputs.append(p.graph.b.add(product, p.graph.leaf(more)))
            expected.append(rounded(row)[0] @ values.T + more[0])
        return p.check(device, outputs, expected)[: len(n_out)]

    if compute(False) == compute(True):
        assert capability < 80, "the kernels of several rows have computed one"


@pytest.mark.parametrize("how", ["all", "absent", "none"])
@pytest.mark.parametrize(("n_in", "n_out"), [(2048, 512), (2048, 70), (512, 33), (4608, 20)])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_one_row(device: Device, kind: str, n_in: int, n_out: int, how: str) -> None:
    """A product of all experts with the row, and gate, up and activation in one launch."""
    p = Products(n_out)
    b = p.graph.b
    ids = p.rng.permutation(N_EXPERT)[None, :N_USED].astype(np.int32)
    if how != "all":
        ids[0, : 3 if how == "absent" else N_USED] = -1
        ids[0, 1] = N_EXPERT
    there = ((ids >= 0) & (ids < N_EXPERT))[0]
    chosen = np.where(there, ids[0], 0)
    row = random(1, 1, 1, n_in)
    x = b.scale(p.graph.leaf(row), 1.0)
    slots = p.graph.leaf(ids, I32)
    (gate, gates), (up, ups) = (p.weight(kind, n_in, n_out, N_EXPERT) for _ in range(2))
    left, right = b.mul_mat_id(gate, x, slots), b.mul_mat_id(up, x, slots)
    outputs = [b.expand(b.swiglu(left, right)), b.expand(b.mul_mat_id(up, x, slots))]
    act = [w[chosen] @ rounded(row)[0, 0] * there[:, None] for w in (gates, ups)]
    glu = act[0] / (1 + np.exp(-act[0])) * act[1]
    if how == "none":
        found = p.graph.run(device, outputs)[0]
        assert not any(one.any() for one in found)
        return
    found = p.check(device, outputs, [glu, act[1]])
    for bits in found:
        assert not np.frombuffer(bits, np.float32).reshape(N_USED, -1)[~there].any()
