#!/usr/bin/env python3
"""Compare our fused CUDA kernels with the small kernels that they replace.

Each graph is a long chain of the same nodes, once in a form that one kernel computes and once in a
form that needs several. Prints the microseconds of one link, as the median of --repeat runs.
tests/cuda checks that the fused form is one kernel; how much time that saves depends on the card,
and on a shared card on its other users.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / one) for one in ("", "scripts", "tests", "tests/cuda")]

import _bench as bench
from helpers.graph_runs import Graph, random
from modelgen.blocks import TYPES
from test_small_kernels import EPS, Step, moe

from moegraph.ggml.device import Device
from moegraph.ggml.lib import C
from moegraph.ggml.ops import I32, Tensor
from moegraph.graphs.experts import build_expert_sum


class Clock:
    """Runs graphs on a device."""

    def __init__(self, device: Device, repeat: int) -> None:
        self.device, self.repeat = device, repeat

    def __call__(self, graph: Graph, outputs: list[Tensor], n_links: int) -> float:
        """Return the microseconds of one link."""
        return float(graph.run(self.device, outputs, self.repeat)[1] / n_links * 1e6)


def norms(clock: Clock, with_sum: bool) -> float:
    """Time a norm of 2048 numbers and its weights; with_sum: with a sum before the norm."""
    graph = Graph()
    x, y = (graph.leaf(random(i, 1, 2048)) for i in range(2))
    w = graph.weight(random(2, 2048))
    for _ in range(100):
        x = graph.b.expand(graph.b.norm(graph.b.add(x, y) if with_sum else x, w, EPS))
    return clock(graph, [x], 100)


def deltanet_inputs(clock: Clock, in_order: bool) -> float:
    """Time the small nodes of a DeltaNet layer; only in order are they one kernel."""
    graph, step = Graph(), Step(128, 16, 32, 1, 1)
    outputs = [tensor for _ in range(30) for tensor in step.build(graph, in_order)]
    return clock(graph, outputs, 30)


def experts(clock: Clock, *parts: str) -> float:
    """Time one token's routed experts, its shared expert, or both at the same time."""
    graph = Graph()
    x = graph.leaf(random(1, 1, 2048))
    for layer in range(20):
        cur = graph.b.expand(graph.b.norm(x, graph.weight(random(layer, 2048)), EPS))
        x = moe(graph, "Q8_0", cur, parts, layer)
    return clock(graph, [x], 20)


def expert_ends(clock: Clock, apart: bool) -> float:
    """Time the down products and weighted sum of one token's experts; apart: several kernels."""
    n_embd, n_ff, k, n_expert = 2048, 512, 8, 16
    data = TYPES["Q5_K"].fill(np.random.default_rng(4), n_expert * n_embd * n_ff // 256, 0.05)
    graph, outputs = Graph(), []
    stack = graph.blocks("Q5_K", data, n_ff, n_embd, n_expert)
    slots = graph.leaf(np.array([[5, 0, 7, 2, 11, 1, 9, 3]], np.int32), I32)
    act, routing = graph.leaf(random(1, 1, k, n_ff)), graph.leaf(random(2, 1, k, 1))
    for _ in range(60):
        rows = graph.b.mul_mat_id(stack, act, slots)
        if apart:
            C.ggml_set_output(rows)
        outputs.append(build_expert_sum(graph.b, graph.b.expand(graph.b.mul(rows, routing)), 0))
    return clock(graph, outputs, 60)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--repeat", type=int, default=30, metavar="N", help="runs; default: 30")
    args = parser.parse_args()
    device = Device(args.device)
    clock = Clock(device, args.repeat)
    print(f"{device.description}, median of {args.repeat} runs, us")
    rows = {
        "norm and weights; with a sum before": (norms(clock, False), norms(clock, True)),
        "inputs of a DeltaNet layer: apart; one": (
            deltanet_inputs(clock, False), deltanet_inputs(clock, True),
        ),
        "end of the experts: apart; one": (expert_ends(clock, True), expert_ends(clock, False)),
        "routed experts; shared expert; both": (
            experts(clock, "routed"), experts(clock, "shared"), experts(clock, "routed", "shared"),
        ),
    }  # fmt: skip
    for name, times in rows.items():
        print(f"{name:42}" + "".join(f"{time:9.1f}" for time in times))
    device.close()
    return 0


if __name__ == "__main__":
    sys.exit(bench.guarded("bench_kernels.py", main))
