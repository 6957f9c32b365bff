"""The cache of built graphs: what it keeps, and what it drops."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from moegraph.engine import Engine
from moegraph.errors import OutOfDeviceMemory
from moegraph.ggml.device import Device
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import F32, Builder
from moegraph.graphs.cache import BuiltGraph, GraphCache
from moegraph.resident.layout import CAPTURED_NODE_BYTES

N_NODES = 5


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


def first_node(built: BuiltGraph) -> int:
    return int(ffi.cast("uintptr_t", C.ggml_graph_node(built.graph, 0)))


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


class Told:
    """The native library; `forgotten` lists the first nodes of graphs that a device forgets."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(C, name)

    def mg_graph_forget(self, backend: Any, graph: Any) -> None:
        self.forgotten.append(int(ffi.cast("uintptr_t", C.ggml_graph_node(graph, 0))))
        C.mg_graph_forget(backend, graph)

    def take(self) -> list[int]:
        """Return what was forgotten since the last call."""
        taken, self.forgotten = self.forgotten, []
        return taken


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    library = Told()
    monkeypatch.setattr("moegraph.graphs.cache.C", library)
    return library


def test_a_device_forgets_what_is_dropped_and_nothing_else(graphs: GraphCache, told: Told) -> None:
    """CUDA would keep what it captured of a graph for ten seconds after its last use."""
    graphs.max_device_bytes = 3 * N_NODES * CAPTURED_NODE_BYTES
    kept = [get(graphs, key) for key in range(3)]
    assert not told.take()
    get(graphs, 0)
    kept += [get(graphs, key) for key in (3, 4)]
    assert told.take() == [first_node(kept[1]), first_node(kept[2])]
    graphs.clear()
    assert told.take() == [first_node(kept[at]) for at in (0, 3, 4)]


def test_a_device_forgets_graphs_that_are_stale(graphs: GraphCache, told: Told) -> None:
    """A graph that needs more memory moves the block; one that finds none fails."""
    small = get(graphs, 0)

    def build(b: Builder, n: int) -> Any:
        leaf = b.leaf(F32, (n,), "x")
        return b.expand(b.add(b.add(leaf, leaf), leaf))

    large = graphs.get("large", 64, lambda b: build(b, 1 << 16))
    assert told.take() == [first_node(small)] and len(graphs) == 1
    with pytest.raises(OutOfDeviceMemory):
        graphs.get("too large", 64, lambda b: build(b, 1 << 58))
    assert told.take() == [first_node(large)] and len(graphs) == 0


def test_graphs_that_a_caller_keeps_count_as_used(graphs: GraphCache) -> None:
    kept, dropped = get(graphs, 0), get(graphs, 1)
    graphs.max_device_bytes = 3 * N_NODES * CAPTURED_NODE_BYTES
    graphs.used([kept, dropped])
    for key in range(2, 9):
        get(graphs, key)
        graphs.used([kept])
    n_built = graphs.n_built
    assert get(graphs, 0) is kept and graphs.n_built == n_built
    graphs.used([dropped])  # is not there any more
    assert get(graphs, 1) is not dropped


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
