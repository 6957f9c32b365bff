"""Experts with gate and up in one tensor: the kernels, the launches and the bits of two tensors."""

from __future__ import annotations

import functools
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
from moegraph.graphs.layer import build_expert_sum, build_slots

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from modelgen.blocks import TYPES

N_FF, N_SLOTS, N_USED, PAD = 256, 12, 8, 16


def choose(how: str, n_rows: int) -> npt.NDArray[np.int32]:
    """Choose slots: every one there, few of them and often, some absent, or none there."""
    rng = np.random.default_rng(n_rows)
    ids = np.array([rng.permutation(N_SLOTS)[:N_USED] for _ in range(n_rows)], np.int32)
    if how == "repeated":
        ids %= 3
    elif how == "absent":
        ids[rng.random(ids.shape) < 0.3] = -1
        ids[0, :3] = N_SLOTS, 2**31 - 1, -(2**31)
    elif how == "none":
        ids[:] = -1
    return ids


@functools.cache
def fill(kind: str, seed: int, n_out: int, n_in: int) -> npt.NDArray:
    """Return random experts [slots, rows, bytes of a row]."""
    block = TYPES[kind]
    count = N_SLOTS * n_out * n_in // block.n_elem
    raw = block.fill(np.random.default_rng(seed), count, n_in**-0.5)
    return raw.reshape(N_SLOTS, n_out, block.row_bytes(n_in))


@functools.lru_cache(maxsize=2)
def values(kind: str, n_embd: int) -> npt.NDArray:
    """Return gate and up in float64 [slots * 2 N_FF, n_embd]."""
    raw = np.concatenate([fill(kind, seed, N_FF, n_embd) for seed in (3, 4)], 1)
    rows = raw.reshape(-1, raw.shape[-1])
    return quants.dequantize(rows, GGMLQuantizationType[kind]).astype(np.float64)


class Experts:
    """Routed experts of a few tokens; slots lie further apart than their rows."""

    def __init__(self, kind: str, ids: npt.NDArray[np.int32], n_embd: int = 512) -> None:
        self.kind, self.ids, self.n_embd = kind, ids, n_embd
        self.n_rows = len(ids)
        self.raw = {"gate": fill(kind, 3, N_FF, n_embd), "up": fill(kind, 4, N_FF, n_embd)}
        self.down = fill(kind, 5, n_embd, N_FF)
        self.x = random(1, self.n_rows, n_embd)
        self.routing = random(2, self.n_rows, N_USED, 1)

    def bank(self, graph: Graph, *parts: str) -> Tensor:
        """Append these parts as one tensor; what lies between slots are no numbers."""
        rows = [self.raw[part] for part in parts]
        gap = np.full((N_SLOTS, PAD, rows[0].shape[2]), 0xFF, np.uint8)
        data = np.concatenate([*rows, gap], 1)
        whole = graph.blocks(self.kind, data, self.n_embd, data.shape[1], N_SLOTS)
        shape = (self.n_embd, data.shape[1] - PAD, N_SLOTS)
        # in front of all products: views in between would part what is one kernel
        return graph.b.expand(graph.b.view(whole, shape, (whole.nb[1], whole.nb[2])))

    def build(
        self, graph: Graph, merged: bool, slots: Tensor | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Append them; return weighted rows, activations, and the products in front of these."""
        slots = graph.leaf(self.ids, I32) if slots is None else slots
        names = [("gate", "up")] if merged else [("gate",), ("up",)]
        parts = {"_".join(name): self.bank(graph, *name) for name in names}
        parts["down"] = graph.blocks(self.kind, self.down, N_FF, self.n_embd, N_SLOTS)
        x = graph.b.scale(graph.leaf(self.x), 1.0)
        routing = graph.leaf(self.routing)
        rows = build_expert_rows(graph.b, parts, x, slots, routing, 0)
        act = rows.src[0].src[1]
        products = [act.src[0].src[0]] if merged else [act.src[0], act.src[1]]
        return rows, act, products

    def run(self, device: Device, merged: bool, repeat: int = 1) -> tuple[Array, Array]:
        """Return the activations, and the products (not a number where they were not written)."""
        graph = Graph()
        _, act, products = self.build(graph, merged)
        found = graph.run(device, [act, *products], repeat)[0]
        return found[0].reshape(*self.ids.shape, N_FF), np.concatenate(found[1:])

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """Which of the chosen slots there are: [rows, used]."""
        return (self.ids >= 0) & (self.ids < N_SLOTS)

    def both(self) -> npt.NDArray:
        """Compute the products in float64: [rows, used, gate and up]."""
        every = self.x @ values(self.kind, self.n_embd).T
        every = every.reshape(self.n_rows, N_SLOTS, 2 * N_FF)
        at = np.where(self.present, self.ids, 0)
        return np.take_along_axis(every, at[..., None], 1) * self.present[..., None]


def swiglu(gate: npt.NDArray, up: npt.NDArray) -> npt.NDArray:
    """Compute silu(gate) * up."""
    return gate / (1 + np.exp(-gate)) * up


def check(device: Device, experts: Experts) -> None:
    """Hold one tensor to one kernel, to float64, to two tensors, and to a captured graph."""
    act, products = experts.run(device, True)
    assert np.isnan(products).all(), "not one kernel"
    both, present = experts.both(), experts.present
    assert not act[~present].any()
    if present.any():
        assert nmse(act.reshape(-1), swiglu(both[..., :N_FF], both[..., N_FF:])) < 1e-3
    two, products = experts.run(device, False)
    assert np.isnan(products).all(), "two tensors: not one kernel"
    assert act.tobytes() == two.tobytes()
    assert experts.run(device, True, 4)[0].tobytes() == act.tobytes(), "captured"


@pytest.mark.parametrize("n_rows", [1, 2, 4, 8, 17, 32, 64, 65, 300])
@pytest.mark.parametrize(("how", "n_embd"), [
    ("all", 2048), ("absent", 2048), ("repeated", 512), ("absent", 512), ("none", 512),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_gate_and_up_of_one_tensor_are_one_kernel(
    device: Device, kind: str, n_rows: int, how: str, n_embd: int
) -> None:
    check(device, Experts(kind, choose(how, n_rows), n_embd))


@pytest.mark.parametrize("kind", ["Q2_K", "Q5_1", "IQ4_XS", "F16", "BF16"])
@pytest.mark.parametrize("how", ["all", "absent"])
def test_types_that_only_the_vector_kernels_of_one_token_know(
    device: Device, kind: str, how: str
) -> None:
    check(device, Experts(kind, choose(how, 1)))


@pytest.mark.parametrize(("kind", "n_rows"), [("Q5_1", 65), ("IQ4_XS", 100), ("F16", 8)])
def test_more_rows_are_computed_as_they_were(device: Device, kind: str, n_rows: int) -> None:
    experts = Experts(kind, choose("absent", n_rows))
    act, products = experts.run(device, True)
    assert not np.isnan(products).any()
    both = experts.both()
    assert nmse(act.reshape(-1), swiglu(both[..., :N_FF], both[..., N_FF:])) < 1e-3
    assert not act[~experts.present].any()


@pytest.mark.parametrize("n_rows", [1, 8])
@pytest.mark.parametrize(
    "change", ["output", "half is output", "read", "half is read", "shifted", "twice", "reversed"]
)
def test_products_that_something_else_needs(device: Device, change: str, n_rows: int) -> None:
    """The product is written for all but the last, which only takes up for gate."""
    experts, graph = Experts("Q4_K", choose("absent", n_rows)), Graph()
    b = graph.b
    x = b.reshape(b.scale(graph.leaf(experts.x), 1.0), experts.n_embd, 1, n_rows)
    both = b.mul_mat_id(experts.bank(graph, "gate", "up"), x, graph.leaf(experts.ids, I32))
    extents, strides = (N_FF, N_USED, n_rows), (both.nb[1], both.nb[2])
    starts = {"shifted": (0, N_FF // 2), "twice": (0, 0), "reversed": (N_FF, 0)}
    gate_at, up_at = starts.get(change, (0, N_FF))
    gate = b.view(both, extents, strides, 4 * gate_at)
    up = gate if change == "twice" else b.view(both, extents, strides, 4 * up_at)
    outputs = [b.expand(b.swiglu(gate, up)), both]
    if "read" in change:
        outputs.append(b.cont(gate) if "half" in change else b.scale(both, 2.0))
    if "output" in change:
        C.ggml_set_output(gate if "half" in change else both)
    act, products = graph.run(device, outputs)[0][:2]
    assert np.isnan(products).all() if change == "reversed" else not np.isnan(products).any()
    full = experts.both()
    halves = (full[..., at : at + N_FF] for at in (gate_at, up_at))
    assert nmse(act, swiglu(*halves)) < 1e-3


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("n_rows", [1, 4])
def test_the_end_of_the_experts_may_start_early_behind_it(
    device: Device, kind: str, n_rows: int
) -> None:
    """Constant weights: down is fetched while gate and up run, for slots looked up just before."""
    ids = choose("all", n_rows)
    table = np.random.default_rng(6).permutation(N_SLOTS).astype(np.int32)
    table[ids[0, :2]] = -1
    experts = Experts(kind, table[ids], 2048)

    def result(merged: bool, look_up: bool, repeat: int) -> bytes:
        graph = Graph()
        slots = None
        if look_up:
            leaves = graph.leaf(table[:, None], I32), graph.leaf(ids, I32)
            slots = build_slots(graph.b, *leaves)
        rows, _, products = experts.build(graph, merged, slots)
        out = build_expert_sum(graph.b, rows, 0)
        found = graph.run(device, [out, rows.src[0], *products], repeat)[0]
        assert not np.isnan(found[0]).any() and found[0].any()
        assert all(np.isnan(parts).all() for parts in found[1:]), "more than two kernels"
        return found[0].tobytes()

    expected = result(False, False, 1)
    assert all(result(True, True, repeat) == expected for repeat in (1, 2, 8))
