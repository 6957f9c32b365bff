"""The cache of built graphs: what it keeps, and what it drops."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from moegraph.arch.base import Routing
from moegraph.arch.gptoss import GptOss
from moegraph.engine import Engine
from moegraph.errors import UnsupportedModel
from moegraph.ggml.device import Device
from moegraph.ggml.lib import C
from moegraph.ggml.ops import F32, Builder
from moegraph.graphs.cache import BuiltGraph, GraphCache
from moegraph.resident.layout import CAPTURED_NODE_BYTES

N_NODES = 5
IQ2_XXS = 16  # a type to which the CPU converts nothing


@pytest.fixture
def graphs() -> Iterator[GraphCache]:
    device = Device("cpu", n_threads=1)
    with closing(device), closing(GraphCache(device)) as found:
        yield found


def get(graphs: GraphCache, key: int) -> BuiltGraph:
    def build(b: Builder) -> Any:
        leaf = out = b.leaf(F32, (4,), "x")
        for _ in range(N_NODES):
            out = b.add(out, leaf)
        return b.expand(out)

    return graphs.get(key, 64, build)


def test_a_node_that_the_device_cannot_compute_is_named(graphs: GraphCache) -> None:
    def build(b: Builder) -> Any:
        fine = b.expand(b.name(b.add(*[b.leaf(F32, (256, 2), name) for name in "xy"]), "fine"))
        packed = b.leaf(IQ2_XXS, (256, 2), "packed")
        return b.expand(b.name(C.ggml_cpy(b.ctx, fine, packed), "copied"))

    said = r"cpu cannot compute copied: no CPY for f32\[256, 2, 1, 1\], iq2_xxs\[256"
    with pytest.raises(UnsupportedModel, match=said):
        graphs.get(0, 64, build)
    assert len(graphs) == 0


def test_graphs_stay_within_the_limit_of_the_device(graphs: GraphCache) -> None:
    graphs.max_device_bytes = 3 * N_NODES * CAPTURED_NODE_BYTES
    for key in range(8):
        get(graphs, key)
        assert graphs.n_device_bytes == min(key + 1, 3) * N_NODES * CAPTURED_NODE_BYTES
        assert graphs.is_half_full == (key > 0)
    assert (len(graphs), graphs.n_dropped) == (3, 5)
    n_built = graphs.n_built
    for key in (5, 6, 7):  # those used last are there
        get(graphs, key)
    assert graphs.n_built == n_built
    graphs.clear()
    assert graphs.n_device_bytes == 0


@pytest.mark.parametrize("settings", [{"mode": "layered"}, {"cache_slots": 60, "miss": "stream"}])
def test_no_plan_keeps_a_dropped_graph(
    open_engine: Callable[..., Engine], settings: dict[str, Any]
) -> None:
    """Whatever had it dropped, it is built again for the next pass, and counts again."""
    engine = open_engine(n_ctx=256, **settings)
    [part] = engine.runner.parts
    expected = engine.forward([1, 2, 3], greedy=True), engine.forward([5], greedy=True)
    head = next(key for key in reversed(part.graphs._graphs) if "head" in key)
    dropped = weakref.ref(part.graphs._graphs[head].context)
    part.graphs.max_device_bytes = 1
    get(part.graphs, 0)
    part.graphs.max_device_bytes = math.inf
    assert len(part.graphs) == 1
    engine.reset()
    found = engine.forward([1, 2, 3], greedy=True), engine.forward([5], greedy=True)
    np.testing.assert_array_equal(found, expected)
    assert dropped() is None and head in part.graphs._graphs


def test_weights_of_gpt_oss_do_not_take_the_memory_of_its_scores(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or CUDA would not run the choice of experts as one kernel."""
    found: list[Routing] = []
    build = GptOss.router
    monkeypatch.setattr(GptOss, "router", lambda *x: found.append(build(*x)) or found[-1])
    engine = open_engine("gptoss", n_ctx=256)
    found.clear()  # of graphs that were only measured
    engine.forward([1, 2, 3], greedy=True)
    assert found and all(r.weights_data.data != r.argsort.src[0].data for r in found)
