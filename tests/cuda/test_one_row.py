"""Products of one row by default: right to float64, and the same bits on every call."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType, quants
from helpers.graph_runs import Graph, nmse, random
from modelgen.blocks import TYPES

from moegraph.arch.blocks.experts import build_expert_rows
from moegraph.ggml.device import Device
from moegraph.ggml.lib import C
from moegraph.ggml.ops import I32, Tensor
from moegraph.graphs.layer import build_expert_sum

KINDS = ("Q8_0", "Q4_K", "Q5_K", "Q6_K")
ENDING = ("Q8_0", "MXFP4")  # rows may end within 256 values
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


@pytest.mark.parametrize(("kind", "n_in", "n_out"), [
    *((kind, *shape) for kind in KINDS for shape in (
        (2048, (8191,)), (2048, (512, 33, 2048, 7)), (512, (2050,)), (4096, (300, 2048)),
        (1280, (70,)), (4864, (130,)),
    )),
    *((kind, *shape) for kind in ENDING for shape in (
        (2880, (5121,)), (2880, (512, 33)), (704, (2050, 70)), (4672, (130,)),
    )),
])  # fmt: skip
def test_products_of_one_row(
    device: Device, capability: int, kind: str, n_in: int, n_out: tuple[int, ...]
) -> None:
    """Several of one input, with ragged numbers of rows; a sum behind one is not lost.

    With biases behind all of them, sums are those of nodes of their own.
    """

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

    found = compute(False)
    if found == compute(True):
        assert capability < 80, "the kernels of several rows have computed one"
        return
    p = Products(n_in)
    x = p.graph.b.scale(p.graph.leaf(random(1, 1, n_in)), 1.0)
    weights = [p.weight(kind, n_in, n)[0] for n in n_out]
    biases = [random(3, n) for n in n_out]
    products = [p.graph.b.expand(p.graph.b.mul_mat(w, x)) for w in weights]
    pairs = zip(products, biases, strict=True)
    outputs = [p.graph.b.expand(p.graph.b.add(y, p.graph.weight(bias))) for y, bias in pairs]
    results = p.graph.run(device, [*outputs, *products])[0]
    assert all(np.isnan(one).all() for one in results[len(n_out) :]), "not one launch"
    for got, bits, bias in zip(results[: len(n_out)], found, biases, strict=True):
        np.testing.assert_array_equal(got, np.frombuffer(bits, np.float32) + bias)


@pytest.mark.parametrize("how", ["all", "absent", "none"])
@pytest.mark.parametrize(("kind", "n_in", "n_out"), [
    *((kind, *shape) for kind in KINDS for shape in (
        (2048, 512), (2048, 70), (512, 33), (4608, 20),
    )),
    *((kind, *shape) for kind in ENDING for shape in ((2880, 70), (704, 33), (4672, 20))),
])  # fmt: skip
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


@pytest.mark.parametrize(("kind", "n_in", "n_ff"), [
    ("MXFP4", 2880, 704), ("MXFP4", 320, 2880), ("MXFP4", 704, 1472), ("Q8_0", 704, 320),
    ("Q8_0", 2880, 704), ("Q4_K", 768, 512), ("Q5_K", 512, 768), ("Q6_K", 256, 1536),
    ("Q4_K", 256, 1536),
])  # fmt: skip
def test_experts_of_one_row_with_biases(
    device: Device, capability: int, kind: str, n_in: int, n_ff: int
) -> None:
    """Gate, up and GLU are one kernel, and all behind it another, with the bits of nodes apart."""
    if capability < 80:
        pytest.skip("these kernels need asynchronous copies")

    def compute(apart: str) -> list[npt.NDArray[np.float32]]:
        """apart: "" for none, "down", or "all": nodes that are no part of a larger kernel."""
        p = Products(n_ff)
        b, parts = p.graph.b, {}
        values: dict[str, Values] = {}
        for part, ne in (("up", (n_in, n_ff)), ("gate", (n_in, n_ff)), ("down", (n_ff, n_in))):
            parts[part], values[part] = p.weight(kind, *ne, N_EXPERT)
            bias = random(len(part), N_EXPERT, 1, ne[1] + 7)  # slots lie further apart
            whole = p.graph.weight(bias)
            shape = (ne[1], 1, N_EXPERT)
            parts[f"{part}_bias"] = b.view(whole, shape, (whole.nb[1], whole.nb[2]))
            values[f"{part}_bias"] = bias[:, 0, : ne[1]].astype(np.float64)
        ids = p.rng.permutation(N_EXPERT)[None, :N_USED].astype(np.int32)
        ids[0, 1] = -1
        row, routing = random(1, 1, n_in), random(2, 1, N_USED, 1 + (kind == "Q8_0"))
        x, slots = b.scale(p.graph.leaf(row), 1.0), p.graph.leaf(ids, I32)
        rows = build_expert_rows(b, parts, x, slots, p.graph.leaf(routing), 0, "swiglu_oai")
        biased = rows.src[0].src[0] if kind == "Q8_0" else rows.src[0]  # Q8_0: scales, too
        down, act = biased.src[0], biased.src[0].src[1]
        gate, up = act.src[0], act.src[1]
        for node in {"": [], "down": [biased, down], "all": [biased, down, gate, up]}[apart]:
            C.ggml_set_output(node)
        out = build_expert_sum(b, rows, 0)
        there, chosen = ids[0] >= 0, np.maximum(ids[0], 0)
        found = p.graph.run(device, [out, act, down, up.src[0]], 3)[0]
        y = rounded(row)[0].astype(np.float64)
        left, right = (values[q][chosen] @ y + values[f"{q}_bias"][chosen] for q in ("gate", "up"))
        left, right = np.minimum(left, 7), np.clip(right, -7, 7)
        glu = left / (1 + np.exp(-1.702 * left)) * (1 + right) * there[:, None]
        assert nmse(found[1], glu.ravel()) < LIMIT
        z = rounded(found[1].reshape(N_USED, n_ff))
        ends = np.einsum("sij,sj->si", values["down"][chosen], z) + values["down_bias"][chosen]
        ends *= routing[0].prod(axis=1, keepdims=True)
        assert nmse(found[0], ends[there].sum(axis=0)) < LIMIT
        return found

    whole, down, apart = (compute(how) for how in ("", "down", "all"))
    assert np.isnan(whole[2]).all(), "down, biases, weights and sum are not one kernel"
    assert np.isnan(whole[3]).all(), "gate, up, biases and GLU are not one kernel"
    assert whole[0].tobytes() == down[0].tobytes()
    assert nmse(whole[0], apart[0]) < LIMIT
    assert nmse(whole[1], apart[1]) < 1e-11
