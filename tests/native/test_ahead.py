"""Experts fetched before the graphs that may miss them: the plan in C, and passes with copies.

Engines of the CPU device fetch ahead only here: their copies end before the next launch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from helpers.fetching_engines import FETCHING, N_LAYER, N_USED, PRESET, WIDTHS, check_sound, run
from helpers.shared import prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from moegraph.engine import Engine
from moegraph.errors import NativeError
from moegraph.ggml.lib import C, ffi
from moegraph.kinds import MAX_AHEAD
from moegraph.runner import layer_graphs, layered
from moegraph.runner.ahead import AheadFetch
from moegraph.runner.misses import MissHandler

Ints = npt.NDArray[np.int32]
N_SLOTS = 12
N_VICTIMS = 6  # of the rows of plans


def model(row: Ints, known: Ints, landing: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Do what mg_plan_ahead does in one layer; known: ids of all tokens, -1 for none."""
    expected = [e for e in known.reshape(-1).tolist() if e >= 0]
    counts = {e: expected.count(e) for e in expected}
    absent = [e for e in dict.fromkeys(expected) if row[e] == -1]
    absent.sort(key=counts.__getitem__, reverse=True)  # the order stays where counts are equal
    given = [pair for pair in landing if pair[1] not in counts]
    n_expert = len(row) - 2 * N_VICTIMS - 2
    for at, pair in enumerate(landing):
        if pair in given[: len(absent)]:
            row[n_expert + 2 * at : n_expert + 2 * at + 2] = -1
    found = [(expert, slot) for expert, (slot, _) in zip(absent, given)]
    for (expert, slot), (_, old) in zip(found, given):
        row[expert] = slot + C.MOEGRAPH_FETCH_COMES
        if old >= 0:
            row[old] = -1
    return found


@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_a_plan_is_what_tokens_chose_last_and_has_no_slot(seed: int, n: int, first: int) -> None:
    n_layer, n_expert, n_used, n_slots, n_vocab = 4, 24, 3, 12, 20
    rng = np.random.default_rng(seed)
    known = np.array([[rng.permutation(n_expert)[:n_used] for _ in range(n_layer)]
                      for _ in range(n_vocab)])  # fmt: skip
    known[rng.random(n_vocab) < 0.3] = -1
    tokens = rng.integers(0, n_vocab, n).astype(np.int32)
    rows = np.full((n_layer, n_expert + 2 * N_VICTIMS + 2), -1, np.int32)
    landings = []
    for row in rows:
        owner = rng.permutation(n_expert)[:n_slots]
        row[owner] = np.arange(n_slots)
        landings.append([(slot, int(owner[slot])) for slot in range(int(rng.integers(0, 5)))])
        if landings[-1] and rng.random() < 0.3:  # its slot is free
            row[landings[-1][0][1]], landings[-1][0] = -1, (0, -1)
        flat = [word for pair in landings[-1] for word in pair]
        row[n_expert : n_expert + len(flat)] = flat
        row[-2:] = 0, len(landings[-1])
    layers = ffi.new("struct mg_ahead_layer[]", n_layer)
    for layer, row in zip(layers, rows):
        layer.row = ffi.from_buffer("int32_t[]", row)
    layers[2].row = ffi.NULL  # it is full
    expected_rows, wanted = rows.copy(), []
    for at in range(first, n_layer):
        if at != 2:
            found = model(expected_rows[at], known[tokens, at], landings[at])
            wanted += [(at, *pair) for pair in found]
    words = (known + 1).astype(np.uint16)
    counts, out = np.zeros(n_expert, np.int32), np.zeros((n_layer * MAX_AHEAD, 3), np.int32)
    n_found = C.mg_plan_ahead(
        layers, n_layer, first, ffi.from_buffer("uint16_t[]", words),
        ffi.from_buffer("int32_t[]", tokens), n, n_used, n_expert, N_VICTIMS,
        ffi.from_buffer("int32_t[]", counts), ffi.from_buffer("int32_t[]", out),
    )  # fmt: skip
    assert [tuple(entry) for entry in out[:n_found].tolist()] == wanted
    np.testing.assert_array_equal(rows, expected_rows)
    assert not counts.any()


@pytest.fixture
def open_ahead(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Engine]:
    """Return what opens an engine whose passes fetch ahead."""
    monkeypatch.setattr(MissHandler, "fetches_ahead", lambda self, stage: bool(self.store.rows))

    def opened(**given: object) -> Engine:
        chosen = {**FETCHING, "cache_slots": N_LAYER * N_SLOTS, "policy": "lfu", **given}
        engine = open_engine(PRESET, **chosen)
        assert engine.runner.misses.ahead
        return engine

    return opened


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of how many experts each pass has sent."""
    counts, real = list[int](), AheadFetch.send

    def send(self: AheadFetch) -> int:
        counts.append(len(self.sent))
        return real(self)

    monkeypatch.setattr(AheadFetch, "send", send)
    return counts


def repeated(engine: Engine) -> npt.NDArray[np.float32]:
    """Return the logits of a text of few different tokens, row by row."""
    ids, found = np.tile(prompt(engine, 24, seed=3), 4), []
    engine.reset()
    for at, one in enumerate(ids):
        found.append(engine.forward_logits(np.array([one], np.int32), at))
        if not engine.stage.is_full:
            check_sound(engine)
    return np.concatenate(found)


def test_passes_that_fetch_ahead_have_the_bits_of_others(
    open_engine: Callable[..., Engine], open_ahead: Callable[..., Engine], sent: list[int]
) -> None:
    expected = repeated(open_engine(PRESET))
    engine = open_ahead()
    np.testing.assert_array_equal(repeated(engine), expected)
    assert sum(sent) > 40
    assert set(engine.runner.misses.ahead.sent) == set()


def test_passes_of_several_rows_do(
    open_engine: Callable[..., Engine], open_ahead: Callable[..., Engine], sent: list[int]
) -> None:
    widths = [1, 3, 3, 1, 2, 3, 3, 3, 2, 1, 3]
    expected, wide = run(open_engine(PRESET), widths), run(open_engine(PRESET))
    engine = open_ahead(cache_slots=N_LAYER * (3 * N_USED + MAX_AHEAD))
    for _ in range(2):  # the second time all tokens are known
        np.testing.assert_array_equal(run(engine, widths, lambda: check_sound(engine)), expected)
    assert sum(sent) > 10
    # among wider ones, which leave no slots for it
    np.testing.assert_array_equal(run(engine, WIDTHS, lambda: check_sound(engine)), wide)


def test_less_is_missing(open_ahead: Callable[..., Engine], sent: list[int]) -> None:
    """The cache has slots for a part of what the text needs, in a layer of the second graph."""
    engine = open_ahead()
    repeated(engine)
    ahead = engine.expert_stats().cache.missing[4:].sum()
    other = open_ahead()
    other.runner.misses.ahead = None
    repeated(other)
    assert ahead < 0.87 * other.expert_stats().cache.missing[4:].sum()


def test_what_a_prompt_chose_is_known(open_ahead: Callable[..., Engine], sent: list[int]) -> None:
    engine = open_ahead()
    ids = prompt(engine, 80, seed=5)
    engine.reset()
    engine.prefill(ids)
    known = engine.runner.misses.ahead._known[ids]
    assert (known > 0).all()
    sent.clear()
    for one in ids[:20]:
        engine.forward(np.array([one], np.int32))
        check_sound(engine)
    assert sum(sent[1:]) > 0


def test_nothing_is_fetched_ahead_behind_other_copies(
    open_ahead: Callable[..., Engine], sent: list[int]
) -> None:
    """A prompt's copies are still on their way when the next pass begins."""
    engine = open_ahead()
    ids = prompt(engine, 80, seed=5)
    engine.prefill(ids)
    sent.clear()
    engine.forward(ids[:1])
    assert sent == []


class FailingThen:
    """The native library, except that the launch after the copies fails."""

    def __init__(self) -> None:
        self.fails = False

    def mg_launch(self, *args: object) -> int:
        return C.GGML_STATUS_FAILED if self.fails else C.mg_launch(*args)

    def __getattr__(self, name: str) -> object:
        return getattr(C, name)


def test_a_pass_that_fails_behind_its_copies_is_undone(
    open_engine: Callable[..., Engine], open_ahead: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Landing slots have other experts then than the books say."""
    expected = repeated(open_engine(PRESET))
    engine, library = open_ahead(), FailingThen()
    repeated(engine)
    for module in (layered, layer_graphs):
        monkeypatch.setattr(module, "C", library, raising=False)
    real = AheadFetch.send

    def send(self: AheadFetch) -> int:
        library.fails = bool(self.sent)
        return real(self)

    monkeypatch.setattr(AheadFetch, "send", send)
    ids, n_failed = prompt(engine, 12, seed=3), 0
    for one in np.tile(ids, 3):
        try:
            engine.forward(np.array([one], np.int32))
        except NativeError:
            n_failed += 1
        library.fails = False
        check_sound(engine)
        engine.reset()
    assert n_failed > 0
    monkeypatch.setattr(AheadFetch, "send", real)
    np.testing.assert_array_equal(repeated(engine), expected)


def test_lists_have_victims_for_both(open_ahead: Callable[..., Engine]) -> None:
    """What comes takes some, and there are as many as a row may miss without these."""
    engine = open_ahead()
    repeated(engine)
    for layer in engine.runner.cache.layers:
        assert layer.landing == layer.victims[:MAX_AHEAD]
        assert len(layer.landing) == MAX_AHEAD and len(layer.victims) >= N_USED + MAX_AHEAD
    small = open_ahead(cache_slots=N_LAYER * (N_USED + MAX_AHEAD - 1))
    repeated(small)
    assert not any(layer.landing for layer in small.runner.cache.layers)
