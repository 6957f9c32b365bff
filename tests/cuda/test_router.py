"""The router of one row in one kernel: the bits of upstream's kernels, and really one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.graph_runs import Array, Graph, random

from moegraph.arch.blocks.router import Rules, build_router
from moegraph.ggml.device import Device
from moegraph.ggml.lib import C
from moegraph.ggml.ops import Tensor

RULES = {
    "softmax": Rules(),
    "raw": Rules(normed=False),
    "scaled": Rules(scale=2.5),
    "sigmoid": Rules(is_sigmoid=True, scale=1.5),
}


def build(
    graph: Graph, n_in: int, n_expert: int, n_used: int, rules: Rules, biased: bool, ties: bool
) -> list[Tensor]:
    """Append a router; return topk, weights and logits."""
    hp: Any = SimpleNamespace(n_expert=n_expert, n_expert_used=n_used)
    matrix = random(1, n_expert, n_in) * 2 * n_in**-0.5
    if ties:
        matrix = np.repeat(matrix[::4], 4, axis=0)
    w: Any = {"ffn_gate_inp.weight": graph.weight(matrix)}
    if biased:
        w["exp_probs_b.bias"] = graph.weight(np.repeat(random(2, n_expert // 4) / 20, 4))
    routing = build_router(graph.b, hp, w, graph.leaf(random(3, 1, n_in)), 0, rules)
    return [routing.topk, routing.weights_data, graph.b.named[("ffn_moe_logits", 0)]]


def compute(device: Device, shape: tuple[int, int, int], fuses: bool, *how: Any) -> list[Array]:
    graph = Graph()
    outputs = build(graph, *shape, *how)
    if not fuses:
        C.ggml_set_output(outputs[2])
    with graph.launches(device, outputs) as launch:
        first, *_, last = (launch()[0] for _ in range(4))  # the last is a captured graph
    for a, b in zip(first, last):
        np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32))
    return first


@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("shape", [
    (2048, 256, 8), (2048, 128, 8), (512, 64, 6), (4096, 512, 10), (2560, 256, 32), (2048, 64, 1),
])  # fmt: skip
def test_a_router_of_one_row(
    device: Device, capability: int, shape: tuple[int, int, int], rules: str, varied: bool
) -> None:
    """With a bias for the choice, too, and with experts of the same score."""
    how = (RULES[rules], varied, varied)
    ids, weights, logits = compute(device, shape, True, *how)
    expected = compute(device, shape, False, *how)
    assert np.isnan(logits).all() == (capability >= 80), "not one kernel"
    np.testing.assert_array_equal(ids.view(np.int32), expected[0].view(np.int32))
    np.testing.assert_array_equal(weights, expected[1])
    assert len(set(ids.view(np.int32))) == shape[2]


@pytest.mark.parametrize("shape", [(2048, 96, 8), (2880, 128, 4), (8192, 256, 8), (2048, 256, 40)])
def test_routers_that_are_not_one_kernel(device: Device, shape: tuple[int, int, int]) -> None:
    how = (Rules(), False, False)
    found = compute(device, shape, True, *how)
    for got, right in zip(found, compute(device, shape, False, *how)):
        np.testing.assert_array_equal(got.view(np.int32), right.view(np.int32))
