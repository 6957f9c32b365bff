"""Passes of several rows whose graphs fetch: results, what is copied, and what the slots hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.fetching_engines import (
    ALL,
    FETCHING,
    N_LAYER,
    N_USED,
    PRESET,
    Countdown,
    check_sound,
)
from helpers.tree_shapes import TREES

from moegraph.engine import Engine
from moegraph.errors import Cancelled, NativeError
from moegraph.experts import cost
from moegraph.ggml.lib import C
from moegraph.kinds import Kind
from moegraph.runner import layer_graphs, layered

N_SEQ, N_VOCAB = 32, 1000
# Rows of passes in turn: lists of victims grow, shrink, and are cut.
WIDTHS = [8, 1, 2, 32, 2, 32, 16, 1, 8, 4, 32, 1, 8]


class Counting:
    """The native library, with a count of the launched graphs; the k-th fails."""

    def __init__(self, fails_at: int = 0) -> None:
        self.n_launches, self._fails_at = 0, fails_at

    def mg_launch(self, *args: Any) -> int:
        self.n_launches += 1
        status = C.mg_launch(*args)
        return C.GGML_STATUS_FAILED if self.n_launches == self._fails_at else status

    def __getattr__(self, name: str) -> Any:
        return getattr(C, name)


def open_rows(open_engine, **settings: Any) -> Engine:
    """Return an engine with many sequences whose graphs fetch."""
    engine = open_engine(PRESET, **{**FETCHING, "n_seq": N_SEQ, "n_ubatch": 8, **settings})
    return engine


def modes(engine: Engine, n: int) -> tuple[frozenset[int], frozenset[int]]:
    """Return the layers that fetch in decode passes of n rows, and those that may run short."""
    mode = engine.runner.residency.miss_mode(Kind.DECODE, n)
    return mode.fetch_layers, mode.short_layers


def decode(engine: Engine, turn: int, n: int) -> np.ndarray:
    """Decode the next row of n sequences."""
    rng = np.random.default_rng(turn)
    slots = rng.permutation(N_SEQ)[:n].tolist()
    return engine.forward(rng.integers(0, N_VOCAB, (n, 1)).astype(np.int32), slots).logits


@pytest.mark.parametrize(
    ("policy", "n_slots"),
    [
        ("lru", N_LAYER * N_USED),
        ("lfu", N_LAYER * (N_USED + 1)),
        ("lru", N_LAYER * 20 + 3),
        ("lfu", N_LAYER * N_USED - 3),
        ("lru", 0),
    ],
)
def test_sequences_that_decode_together_fetch_and_change_no_bit(
    open_engine, policy: str, n_slots: int
) -> None:
    plain = open_engine(PRESET, n_seq=N_SEQ, n_ubatch=8)
    engine = open_rows(open_engine, policy=policy, cache_slots=n_slots)
    for turn, n in enumerate(2 * WIDTHS):
        expected = decode(plain, turn, n)
        np.testing.assert_array_equal(decode(engine, turn, n), expected, err_msg=f"pass {turn}")
        check_sound(engine)
    fetching, short = modes(engine, N_SEQ)
    assert len(fetching) == (N_LAYER if n_slots >= N_LAYER * N_USED else 5 if n_slots else 0)
    assert short == fetching, "so many rows may choose every expert"
    stats = engine.runner.cache.stats
    assert stats.missing.sum() > 50
    sizes = [engine.runner.misses.store.packing(il).n_bytes for il in range(N_LAYER)]
    filled = engine.runner.cache.n_slots
    assert engine.runner.misses.stats({}).n_bytes_to_device == sum(sizes * (stats.missing + filled))


@pytest.mark.parametrize(("each", "limit"), [(12, 3.0), (24, 0.3)])
def test_what_passes_missed_decides_who_acts_next_and_no_bit_changes(
    open_engine, monkeypatch, each: int, limit: float
) -> None:
    """Graphs fetch, or the host uploads and the CPU computes: the law says what to try."""
    monkeypatch.setattr(cost, "fetches_in_graph", lambda *_: True)
    monkeypatch.setattr(cost, "fetch_limit", lambda *_: limit)
    monkeypatch.setattr(cost, "_JUDGED", 1)
    monkeypatch.setattr(cost, "_SETTLING", 0)
    plain = open_engine(PRESET, n_seq=N_SEQ, n_ubatch=8)
    engine = open_rows(open_engine, cache_slots=N_LAYER * each, miss="auto")
    seconds = [float(n) for n in range(N_USED + 1)]
    engine.runner.residency.split = cost.MissSplit(seconds, seconds, 1.0)
    residency, fetching_takes, manners = engine.runner.residency, 2.0, set()
    arrived = residency.results_arrived

    def results_arrived(_: float) -> None:
        arrived(fetching_takes if residency._pass.mode.fetch_layers else 1.0)

    monkeypatch.setattr(residency, "results_arrived", results_arrived)
    for turn in range(50):
        n = WIDTHS[turn % len(WIDTHS)] if turn < 26 else 8
        if turn == 40:
            fetching_takes, residency._choice._widths[7]._limit = 0.5, 99.0
        manners.add((n, bool(modes(engine, n)[0])))
        expected = decode(plain, turn, n)
        np.testing.assert_array_equal(decode(engine, turn, n), expected, err_msg=f"pass {turn}")
        check_sound(engine)
    assert {(8, True), (8, False), (1, True)} <= manners and (1, False) not in manners
    assert engine.runner.misses.n_cpu_experts > 0 and modes(engine, 8)[0] == ALL


@pytest.mark.parametrize("each", [N_USED, 14, 31])
def test_drafted_rows_fetch_and_change_no_bit(open_engine, each: int) -> None:
    """Trees of several sequences, padded to the largest; a path of each is committed."""
    plain = open_engine(PRESET, n_seq=3, n_ubatch=16)
    engine = open_rows(open_engine, cache_slots=N_LAYER * each, n_seq=3, n_ubatch=16)
    rng, n_fetched = np.random.default_rng(each), 0
    for _ in range(12):
        slots = rng.permutation(3)[: rng.integers(1, 4)].tolist()
        n = int(rng.choice([2, 5, 9]))
        tokens = rng.integers(0, N_VOCAB, (len(slots), n))
        parents = [TREES[rng.integers(0, len(TREES))](n, rng) for _ in slots]
        lengths = rng.integers(1, n + 1, len(slots)).tolist()
        assert modes(engine, n * len(slots))[0] == ALL
        before = engine.runner.cache.stats.admitted.sum()
        results = []
        for one in (plain, engine):
            one.passes.verify(tokens, slots, parents, lengths, greedy=False)
            results.append(one.collect().require_logits().reshape(len(slots), n, -1))
            for slot in slots:
                one.passes.commit({slot: [0]})
        for seq, length in enumerate(lengths):
            np.testing.assert_array_equal(*(r[seq, :length] for r in results))
        n_fetched += engine.runner.cache.stats.admitted.sum() - before
        check_sound(engine)
    assert n_fetched > 5


@pytest.mark.parametrize(("merged", "each"), [(1, 20), (4, N_USED)])
def test_a_failure_at_any_graph_leaves_the_cache_sound(
    open_engine, monkeypatch, merged: int, each: int
) -> None:
    for name in ("MERGED", "MERGED_LATER"):
        monkeypatch.setattr(layer_graphs, name, merged)
    engine = open_rows(open_engine, cache_slots=N_LAYER * each)
    plain, n_failed = open_engine(PRESET, n_seq=N_SEQ, n_ubatch=8), 0
    for at in range(1, 40):
        decode(engine, 3 * at, 5)
        with monkeypatch.context() as patch:
            patch.setattr(layered, "C", counting := Counting(at))
            try:
                decode(engine, 3 * at + 1, 5)
            except NativeError:
                n_failed += 1
        check_sound(engine)
        for one in (plain, engine):
            for slot in range(N_SEQ):
                one.reset(slot)
        np.testing.assert_array_equal(*(decode(e, 3 * at + 2, 5) for e in (plain, engine)))
        if counting.n_launches < at:
            break
    assert n_failed == at - 1 >= N_LAYER // merged


def test_a_pass_cancelled_between_two_graphs_leaves_the_cache_sound(open_engine) -> None:
    engine = open_rows(open_engine, cache_slots=N_LAYER * 6)
    for at in range(1, N_LAYER + 1):
        decode(engine, at, 8)
        with pytest.raises(Cancelled):
            engine.forward(np.full((8, 1), at, np.int32), range(8), cancel=Countdown(at))
        check_sound(engine)
