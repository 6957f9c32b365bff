"""The router of one row in one kernel: the bits of upstream's kernels, and really one."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.graph_runs import Array, Graph, random

from moegraph.arch.blocks.experts import build_expert_rows, build_shared_expert
from moegraph.arch.blocks.router import Rules, build_router
from moegraph.ggml.device import Device
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import Builder, Tensor
from moegraph.graphs.cache import GraphCache
from moegraph.graphs.layer import build_expert_sum

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


class Layers:
    """Layers from the end of their mixers on: residual, norm, router, experts, and a shared expert.

    n: values of a row; shared: type of the shared expert's weights, None without one. The mixers of
    even layers end with a product, which adds the residual.
    """

    def __init__(self, graph: Graph, n: int, n_expert: int, shared: str | None) -> None:
        self.graph, self.n_expert = graph, n_expert
        rng, n_ff = np.random.default_rng(n), 256
        matrix, weight = graph.matrix, graph.weight
        self.parts = {
            "gate": matrix("Q4_K", rng, n, n_ff, n_expert),
            "up": matrix("Q4_K", rng, n, n_ff, n_expert),
            "down": matrix("Q5_K", rng, n_ff, n, n_expert),
        }
        self.w: Any = {"norm": weight(random(1, n))}
        self.w["out"] = matrix("Q8_0", rng, n, n)
        self.w["ffn_gate_inp.weight"] = weight(random(2, n_expert, n) * 2 * n**-0.5)
        self.has_shared = shared is not None
        if shared is not None:
            self.w["ffn_gate_inp_shexp.weight"] = weight(random(3, 1, n) * n**-0.5)
            self.w["ffn_gate_shexp.weight"] = matrix(shared, rng, n, n_ff)
            self.w["ffn_up_shexp.weight"] = matrix(shared, rng, n, n_ff)
            self.w["ffn_down_shexp.weight"] = matrix(shared, rng, n_ff, n)

    def append(self, x: Tensor, il: int) -> tuple[list[Tensor], list[Tensor]]:
        """Append a layer for x F32 [n, 1]; return nodes that kernels skip, and results.

        The last result is the layer's.
        """
        b = self.graph.b
        hp: Any = SimpleNamespace(n_expert=self.n_expert, n_expert_used=8)
        mixed = b.expand(b.scale(x, 0.1 * il - 0.25))
        if il % 2 == 0:
            mixed = b.mul_mat(self.w["out"], mixed)
        residual = b.name(b.add(b.reshape(mixed, x.ne[0], 1), x), "residual", il)
        normed = b.norm(residual, self.w["norm"], 1e-6)
        routing = build_router(b, hp, self.w, normed, il)
        rows = build_expert_rows(b, self.parts, normed, routing.topk, routing.weights, il)
        out = build_expert_sum(b, rows, il)
        results = [residual, normed, routing.topk, routing.weights_data]
        if self.has_shared:
            out = b.add(out, build_shared_expert(b, self.w, normed, il))
            results.append(b.named[("ffn_swiglu", il)])
        out = b.expand(b.scale(b.add(out, residual), 0.5))
        between = [b.named[("ffn_moe_logits", il)], *([mixed] if il % 2 == 0 else [])]
        return between, [*results, out]


SHARED = [(2048, 128, "Q8_0"), (2048, 256, "Q8_0"), (4096, 256, "Q8_0"), (2048, 64, "Q6_K"),
          (1536, 64, None)]  # fmt: skip


@pytest.mark.parametrize(("n", "n_expert", "shared"), SHARED)
def test_a_router_behind_its_norm_and_beside_a_shared_expert(
    device: Device, capability: int, n: int, n_expert: int, shared: str | None
) -> None:
    """Eight layers, so that a race would show, and inputs that take turns."""
    inputs = [random(seed, 1, n) for seed in (4, 5)]

    def run(fuses: bool) -> list[list[Array]]:
        graph, outputs, between, found = Graph(), list[Tensor](), list[Tensor](), []
        layers, leaf = Layers(graph, n, n_expert, shared), graph.leaf(inputs[0])
        x = leaf
        for il in range(8):
            parts, results = layers.append(x, il)
            between += parts
            outputs += results
            x = results[-1]
            for part in parts:
                if not fuses:
                    C.ggml_set_output(part)
        with graph.launches(device, [*between, *outputs]) as launch:
            for turn in range(6):
                graph.replace(leaf, inputs[turn % 2])
                found.append(launch()[0])
        return found

    one, apart = run(True), run(False)
    n_between = 12  # logits, and the products of even layers
    for got, right in zip(one, apart):
        for at, (a, b) in enumerate(zip(got, right)):
            if at < n_between:
                assert np.isnan(a).all() == (capability >= 80), "not one kernel"
            else:
                np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32), str(at))
    assert not np.array_equal(one[0][-1], one[1][-1])


def test_what_the_blocks_of_a_router_read_keeps_its_memory(device: Device) -> None:
    """One block writes sum and norm while others still read both terms, or choose before it has."""
    with ExitStack() as stack:

        def build(b: Builder) -> list[list[Tensor]]:
            graph = Graph()
            vars(graph).update(b=b, leaf=graph.weight)  # what is placed are results only
            layers, x = Layers(graph, 2048, 256, "Q8_0"), graph.weight(random(1, 1, 2048))
            found = []
            for il in range(1, 4):
                *results, x = layers.append(x, il)[1]
                found.append(results)
            stack.enter_context(graph.place_weights(device))
            return found

        graphs = GraphCache(device)
        stack.callback(graphs.close)
        found: list[list[Tensor]] = []
        graphs.get("layers", 512, lambda b: found.extend(build(b)))

        def span(t: Tensor) -> tuple[int, int]:
            start = int(ffi.cast("intptr_t", t.data))
            return start, start + C.ggml_nbytes(t)

        for residual, normed, topk, weights, _ in found:
            terms = [span(residual.src[0]), span(residual.src[1])]
            written = [span(residual), span(normed), span(topk), span(weights)]
            assert not any(a < d and c < b for a, b in terms for c, d in written)


@pytest.mark.parametrize(("n", "n_expert", "shared"), [(2048, 128, "Q8_0"), (4096, 256, "Q8_0")])
def test_the_end_of_a_layer_with_a_shared_expert_is_one_kernel(
    device: Device, capability: int, n: int, n_expert: int, shared: str
) -> None:
    """From the down products to the layer's sum; the judge's shared experts are kernels apart."""
    inputs = [random(seed, 1, n) for seed in (4, 5)]

    def run(fuses: bool) -> list[list[Array]]:
        graph, outputs, found = Graph(), list[Tensor](), []
        layers, leaf = Layers(graph, n, n_expert, shared), graph.leaf(inputs[0])
        x = leaf
        for il in range(8):
            x = layers.append(x, il)[1][-1]
            between = [graph.b.named[(name, il)] for name in ("ffn_moe_out", "ffn_shexp")]
            if not fuses:
                C.ggml_set_output(between[1])
            outputs += [*between, x]
        with graph.launches(device, outputs) as launch:
            for turn in range(6):
                graph.replace(leaf, inputs[turn % 2])
                found.append(launch()[0])
        return found

    for got, right in zip(run(True), run(False)):
        for at, (a, b) in enumerate(zip(got, right)):
            if at % 3 < 2:
                assert np.isnan(a).all() == (capability >= 80), "not one kernel"
                assert not np.isnan(b).any()
            else:
                np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32), str(at))


def test_what_the_end_of_a_layer_reads_keeps_its_memory(device: Device) -> None:
    """Blocks write the layer's sum while others still read what the experts do."""
    with ExitStack() as stack:

        def build(b: Builder) -> list[tuple[Tensor, list[Tensor]]]:
            graph = Graph()
            vars(graph).update(b=b, leaf=graph.weight)  # what is placed are results only
            layers, x = Layers(graph, 2048, 256, "Q8_0"), graph.weight(random(1, 1, 2048))
            found = []
            for il in range(1, 4):
                _, _, topk, weights, glu, x = layers.append(x, il)[1]
                act = b.named[("ffn_moe_swiglu", il)]
                found.append((x.src[0], [topk, weights, glu, act]))
            stack.enter_context(graph.place_weights(device))
            return found

        graphs = GraphCache(device)
        stack.callback(graphs.close)
        found: list[tuple[Tensor, list[Tensor]]] = []
        graphs.get("layers", 512, lambda b: found.extend(build(b)))

        def span(t: Tensor) -> tuple[int, int]:
            start = int(ffi.cast("intptr_t", t.data))
            return start, start + C.ggml_nbytes(t)

        for total, read in found:
            c, d = span(total)
            assert not any(a < d and c < b for a, b in map(span, read))
