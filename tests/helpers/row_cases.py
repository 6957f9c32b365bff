"""Operations of a pass or a prompt, over rows that may be alone or among others."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.graph_runs import Graph, random
from moegraph.arch.blocks.experts import build_expert_rows, build_shared_expert
from moegraph.arch.blocks.router import build_router
from moegraph.ggml.device import Device
from moegraph.ggml.lib import C
from moegraph.ggml.ops import F32, I32, Tensor
from moegraph.graphs.layer import build_expert_sum

WIDTHS = (2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 100)
N_ROWS = max(WIDTHS)
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from modelgen.blocks import TYPES

# What the library's kernels for few rows read, and other types.
OURS = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
ENDING = ("Q8_0", "MXFP4")  # also with rows that are no multiple of 256 values
OTHERS = ("Q2_K", "Q3_K", "Q5_0", "IQ4_XS", "F16", "BF16")
N_EMBD, N_FF, N_EXPERT, N_USED = 2048, 512, 16, 8
EPS = 1e-6

Ints = npt.NDArray[np.int32]
Build = Callable[[Graph, Ints], Tensor]


def rows_of(seed: int, rows: Ints, *ne: int) -> npt.NDArray[np.float32]:
    """Return the same random numbers for a row, whatever rows are beside it."""
    return random(seed, N_ROWS, *ne)[rows]


def ids_of(rows: Ints) -> Ints:
    """Return the experts of each row; many share some."""
    rng = np.random.default_rng(5)
    return np.array([rng.permutation(N_EXPERT)[:N_USED] for _ in range(N_ROWS)], np.int32)[rows]


@cache
def _blocks(kind: str, seed: int, n: int) -> npt.NDArray[np.uint8]:
    return TYPES[kind].fill(np.random.default_rng(seed), n // TYPES[kind].n_elem, 0.5)


def matrix(graph: Graph, kind: str, seed: int, *ne: int) -> Tensor:
    """Make a weight of random blocks, extents in ggml order; they are drawn once."""
    return graph.blocks(kind, _blocks(kind, seed, math.prod(ne)), *ne)


def dense(kind: str, n_out: int, n_in: int = N_EMBD) -> Build:
    """One product."""

    def build(graph: Graph, rows: Ints) -> Tensor:
        x = graph.b.scale(graph.leaf(rows_of(1, rows, n_in)), 1.0)
        w = matrix(graph, kind, 2, n_in, n_out)
        return graph.b.mul_mat(w, x)

    return build


def projections(kind: str) -> Build:
    """Four products of one input."""

    def build(graph: Graph, rows: Ints) -> Tensor:
        b = graph.b
        x = b.scale(graph.leaf(rows_of(1, rows, N_EMBD)), 1.0)
        parts = [
            b.expand(b.mul_mat(matrix(graph, kind, n, N_EMBD, n), x)) for n in (4096, 2048, 32, 32)
        ]
        out = parts[0]
        for part in parts[1:]:
            out = b.concat(out, part, 0)
        return out

    return build


def experts(gate_up: str, down: str) -> Build:
    """Routed experts and their weighted sum."""

    def build(graph: Graph, rows: Ints) -> Tensor:
        b = graph.b
        x = b.scale(graph.leaf(rows_of(1, rows, N_EMBD)), 1.0)
        parts = {
            "gate": matrix(graph, gate_up, 3, N_EMBD, N_FF, N_EXPERT),
            "up": matrix(graph, gate_up, 4, N_EMBD, N_FF, N_EXPERT),
            "down": matrix(graph, down, 5, N_FF, N_EMBD, N_EXPERT),
        }
        slots, weights = graph.leaf(ids_of(rows), I32), graph.leaf(rows_of(4, rows, N_USED, 1))
        each = build_expert_rows(b, parts, x, slots, weights, 0)
        return build_expert_sum(b, each, 0)

    return build


def shared(kind: str) -> Build:
    """The shared expert, the sums after it and the norm."""

    def build(graph: Graph, rows: Ints) -> Tensor:
        b = graph.b
        x = b.scale(graph.leaf(rows_of(1, rows, N_EMBD)), 1.0)
        w: Any = {
            "ffn_up_shexp.weight": matrix(graph, kind, 3, N_EMBD, N_FF),
            "ffn_gate_shexp.weight": matrix(graph, kind, 4, N_EMBD, N_FF),
            "ffn_down_shexp.weight": matrix(graph, kind, 5, N_FF, N_EMBD),
            "ffn_gate_inp_shexp.weight": graph.weight(random(6, N_EMBD, 1).reshape(1, N_EMBD)),
        }
        out = build_shared_expert(b, w, x, 0)
        moe, residual = (graph.leaf(rows_of(seed, rows, N_EMBD)) for seed in (7, 8))
        return b.norm(b.add(b.add(moe, out), residual), graph.weight(random(9, N_EMBD)), EPS)

    return build


def router(n_expert: int) -> Build:
    """Logits, choice and weights; the result holds the choice as numbers."""

    def build(graph: Graph, rows: Ints) -> Tensor:
        b = graph.b
        x = b.scale(graph.leaf(rows_of(1, rows, N_EMBD)), 1.0)
        w: Any = {"ffn_gate_inp.weight": graph.weight(random(2, n_expert, N_EMBD) / 45)}
        hp: Any = SimpleNamespace(n_expert=n_expert, n_expert_used=N_USED)
        routing = build_router(b, hp, w, x, 0)
        ids = b.retype(b.cont(routing.topk), F32, N_USED)
        return b.concat(b.reshape(routing.weights, N_USED, len(rows)), ids, 0)

    return build


OPERATIONS: dict[str, Build] = {
    **{f"product {kind}": dense(kind, 2048) for kind in OURS},
    **{f"product {kind} of rows that end in a chunk": dense(kind, 512, 2880) for kind in ENDING},
    "product F32": dense("F32", 512),
    "head Q6_K": dense("Q6_K", 32768),
    "projections Q8_0": projections("Q8_0"),
    "router": router(256),
    "experts Q4_K Q5_K": experts("Q4_K", "Q5_K"),
    "experts Q4_K Q6_K": experts("Q4_K", "Q6_K"),
    "experts Q8_0": experts("Q8_0", "Q8_0"),
    "experts Q4_0": experts("Q4_0", "Q4_0"),
    "experts MXFP4": experts("MXFP4", "MXFP4"),
    "shared expert Q8_0": shared("Q8_0"),
}
OTHER_OPERATIONS: dict[str, Build] = {
    **{f"product {kind}": dense(kind, 2048) for kind in (*OTHERS, "F32")},
    **{f"experts {kind}": experts(kind, kind) for kind in OTHERS},
    **{f"shared expert {kind}": shared(kind) for kind in ("F16", "F32", "Q3_K")},
}


def compute(
    device: Device, build: Build, rows: Sequence[int], apart: bool = False
) -> npt.NDArray[np.float32]:
    """Return the results of rows together, numpy [n_rows, n]; apart: as with --deterministic."""
    graph = Graph()
    out = graph.b.expand(build(graph, np.array(rows)))
    if apart:
        C.moegraph_keep_rows_apart(graph.b.graph)
    return graph.run(device, [out])[0][0].reshape(len(rows), -1)


def differing(
    device: Device, build: Build, widths: Sequence[int] = WIDTHS, apart: bool = False
) -> dict[int, int]:
    """Return, for each width, how many rows have other bits than alone."""
    alone = [compute(device, build, [row], apart)[0] for row in range(max(widths))]
    found = {}
    for width in widths:
        together = compute(device, build, range(width), apart)
        found[width] = sum(together[row].tobytes() != alone[row].tobytes() for row in range(width))
    return found
