"""Engines whose graphs fetch by themselves: failures, what is copied, and when they do not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers.fetching_engines import (
    ALL,
    FETCHING,
    N_LAYER,
    N_USED,
    PRESET,
    WIDTHS,
    Countdown,
    check_sound,
    fetch_layers,
    run,
)

from moegraph.engine import Engine
from moegraph.errors import Cancelled, NativeError
from moegraph.ggml.lib import C
from moegraph.graphs import cache
from moegraph.runner import layer_graphs, layered


@pytest.fixture
def expected(open_engine) -> npt.NDArray[np.float32]:
    """Return the logits of `run` where everything is on the device."""
    return run(open_engine(PRESET))


def open_fetching(open_engine: Callable[..., Engine], **settings: object) -> Engine:
    """Return an engine whose graphs fetch in all layers."""
    engine = open_engine(PRESET, **{**FETCHING, **settings})
    assert fetch_layers(engine) == ALL
    return engine


class Failing:
    """The native library, except that the k-th launch fails, before or after it ran."""

    def __init__(self, at: int, runs: bool) -> None:
        self._at, self._runs = at, runs
        self.n_launches = 0

    def mg_launch(self, *args: Any) -> int:
        self.n_launches += 1
        status = C.GGML_STATUS_FAILED
        if self.n_launches != self._at or self._runs:
            status = C.mg_launch(*args)
        return C.GGML_STATUS_FAILED if self.n_launches == self._at else status

    def __getattr__(self, name: str) -> Any:
        return getattr(C, name)


@contextmanager
def failing(at: int, runs: bool) -> Iterator[None]:
    """Have the k-th launch of a layered pass fail, and make sure that it comes to that."""
    library = layered.C = cache.C = Failing(at, runs)
    try:
        yield
    finally:
        layered.C = cache.C = C
    assert library.n_launches == at, "nothing failed"


@pytest.mark.parametrize(
    ("merged", "runs", "policy"),
    [(1, True, "lru"), (3, False, "lfu"), (4, True, "lfu"), (4, False, "lru")],
)
def test_a_failure_at_any_graph_leaves_the_cache_sound(
    open_engine, expected, monkeypatch, merged: int, runs: bool, policy: str
) -> None:
    for name in ("MERGED", "MERGED_LATER"):
        monkeypatch.setattr(layer_graphs, name, merged)
    engine = open_fetching(open_engine, policy=policy)
    n_graphs, lost = -(-N_LAYER // merged) + 1, 0
    for at in range(1, n_graphs + 1):
        run(engine, [1, 1, 8, 1])
        before = (engine.runner.cache.tables >= 0).sum()
        with failing(at, runs), pytest.raises(NativeError, match="failed on cpu"):
            engine.forward_logits([at], 11)
        check_sound(engine)
        lost += before - (engine.runner.cache.tables >= 0).sum()
        np.testing.assert_array_equal(
            run(engine, after=lambda: check_sound(engine)), expected, err_msg=f"graph {at}"
        )
    assert lost > 0, "nothing was at risk"


@pytest.mark.parametrize("merged", [1, 4])
def test_a_pass_cancelled_between_two_graphs_leaves_the_cache_sound(
    open_engine, expected, monkeypatch, merged: int
) -> None:
    for name in ("MERGED", "MERGED_LATER"):
        monkeypatch.setattr(layer_graphs, name, merged)
    engine = open_fetching(open_engine)
    for at in range(1, N_LAYER // merged + 1):
        run(engine, [1, 8, 1, 1])
        with pytest.raises(Cancelled):
            engine.forward(np.array([at], np.int32), cancel=Countdown(at))
        check_sound(engine)
        np.testing.assert_array_equal(run(engine), expected, err_msg=f"graph {at}")
        check_sound(engine)


def test_a_pass_cancelled_inside_a_graph_leaves_the_cache_sound(open_engine, expected) -> None:
    """Wherever the flag finds it: some of a graph's layers have fetched, others have not."""
    engine, flag = open_fetching(open_engine), np.zeros(1, np.int32)
    rng, n_cancelled, lost = np.random.default_rng(2), 0, set()
    engine.device.bind_cancel(flag)
    try:
        for turn in range(40):
            run(engine, [1, 1])
            setter = threading.Timer(rng.uniform(0, 2e-3), flag.fill, (1,))
            setter.start()
            try:
                for token in range(99):
                    engine.forward(np.array([turn + token], np.int32))
            except Cancelled:
                n_cancelled += 1
            setter.join()
            flag[0] = 0
            check_sound(engine)
            lost.add(int((engine.runner.cache.tables < 0).sum()))
            if turn % 8 == 0:
                np.testing.assert_array_equal(run(engine), expected)
    finally:
        engine.device.bind_cancel(None)
    assert n_cancelled > 30 and len(lost) > 1
    np.testing.assert_array_equal(run(engine), expected)


@pytest.mark.parametrize("merged", [1, 4])
def test_a_failure_while_the_host_looks_leaves_the_cache_sound(
    open_engine, expected, monkeypatch, merged: int
) -> None:
    """Layers that the host has noted are as they are; those behind are given up."""
    for name in ("MERGED", "MERGED_LATER"):
        monkeypatch.setattr(layer_graphs, name, merged)
    engine = open_fetching(open_engine)

    def observe(il: int, _: object) -> None:
        if il == at:
            raise RuntimeError("the observer failed")

    for at in range(N_LAYER):
        run(engine, [1, 1, 1])
        engine.runner.observers.append(observe)
        with pytest.raises(RuntimeError, match="the observer failed"):
            engine.forward_logits([at], 3)
        engine.runner.observers.clear()
        check_sound(engine)
        residents = (engine.runner.cache.tables >= 0).sum(axis=1).tolist()
        assert residents[: at + 1] == [N_USED + 1] * (at + 1)
        np.testing.assert_array_equal(run(engine), expected, err_msg=f"layer {at}")


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_single_rows_copy_what_is_missing_and_no_more(open_engine, policy: str) -> None:
    engine = open_fetching(open_engine, policy=policy)
    handler, cache = engine.runner.misses, engine.runner.cache
    sizes = np.array([handler.store.packing(il).n_bytes for il in range(N_LAYER)])
    assert handler.stats({}).n_bytes_to_device == (sizes * cache.n_slots).sum(), "filling the slots"
    run(engine, [1] * 40)
    stats = cache.stats
    assert stats.missing.sum() > 100
    assert handler.stats({}).n_bytes_to_device == (sizes * (stats.missing + cache.n_slots)).sum()
    np.testing.assert_array_equal(stats.admitted, stats.missing)
    np.testing.assert_array_equal(stats.evicted, stats.missing)
    assert stats.declined.sum() == handler.n_cpu_experts == 0
    check_sound(engine)


@pytest.mark.parametrize(("policy", "more"), [("lru", 0), ("lfu", 1), ("lru", 27)])
def test_passes_of_several_rows_between_change_nothing(
    open_engine, expected, policy: str, more: int
) -> None:
    engine = open_fetching(open_engine, policy=policy, cache_slots=N_LAYER * (N_USED + more))
    for _ in range(2):
        got = run(engine, after=lambda: check_sound(engine))
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"host_pin": "none"}, set()),
        ({"miss": "cpu"}, set()),
        ({"cache_slots": N_LAYER * (N_USED - 1)}, set()),
        ({"cache_slots": 0}, set()),
        ({"cache_slots": N_LAYER * N_USED}, ALL),
        ({"n_ubatch": 1}, ALL),
        ({"pin_layers": 2, "cache_slots": (N_LAYER - 2) * N_USED}, N_LAYER - 2),
        ({"cache_slots": N_LAYER * N_USED - 3}, N_LAYER - 3),
    ],
    ids=str,
)
def test_which_layers_fetch_and_that_results_do_not_depend_on_it(
    open_engine, expected, settings, layers
) -> None:
    engine = open_engine(PRESET, **{**FETCHING, **settings})
    fetching = fetch_layers(engine)
    assert (len(fetching) if isinstance(layers, int) else fetching) == layers
    widths = [1] * sum(WIDTHS) if settings.get("n_ubatch") else WIDTHS
    np.testing.assert_array_equal(run(engine, widths), expected)
    check_sound(engine)
    fetched = engine.runner.misses.stats({}).n_bytes_to_device
    assert fetched > 0 or settings == {"miss": "cpu"}
