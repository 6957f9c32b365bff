"""Layers with a window: every kind of pass hides what is before the window, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.shared import prompt
from helpers.tree_shapes import TREES, path

from moegraph.arch.base import Layer
from moegraph.arch.blocks.attention import attention_layer
from moegraph.arch.inputs import PAGED, PassShape
from moegraph.arch.qwen3moe import Qwen3Moe
from moegraph.engine import Engine
from moegraph.errors import Cancelled
from moegraph.events import CancelToken
from moegraph.graphs.chunk import _patterns, _window_patterns
from moegraph.graphs.rows import Tree, Window, WindowRow, fill_mask, fill_window
from moegraph.resident.layout import PAGE
from moegraph.resident.state import State
from moegraph.runner.sweep_batch import SweepBatch

Open = Callable[..., Engine]
SHORT, LONG = 5, 300  # within a page of the KV caches, and longer than one


@pytest.fixture(params=[SHORT, LONG])
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Give all layers of qwen3moe a window but the last one."""

    def layer(hp: Qwen3Moe, il: int) -> Layer:
        return replace(attention_layer(hp), window=None if il == 2 else request.param)

    monkeypatch.setattr(Qwen3Moe, "layer", layer)
    return int(request.param)


@pytest.mark.parametrize("n_window", [1, SHORT, PAGE - 1, PAGE, PAGE + 1, LONG, 10_000])
def test_masks_show_the_last_positions(n_window: int) -> None:
    places, n_kv = np.array([0, 3, 254, 255, 256, 511, 700]), 3 * PAGE
    distance = places[:, None] - np.arange(n_kv)
    sees = (distance >= 0) & (distance < n_window)
    patterns, ends = _patterns(n_window), places[:, None] + 1 - PAGE * np.arange(3)
    found = patterns[_window_patterns(ends, n_window)].reshape(len(places), n_kv)
    np.testing.assert_array_equal(found, sees)
    whole = patterns[np.clip(ends, 0, PAGE)].reshape(len(places), n_kv)
    np.testing.assert_array_equal(whole, distance >= 0)
    # two chains of rows: a pass
    masks, pos0 = np.zeros((2, 2, 9, n_kv), np.float16), [0, 500]
    fill_mask(masks[0], pos0)
    columns = np.tile(np.arange(n_kv), (2, 1))
    fill_window(masks[1], masks[0], pos0, n_window, columns)
    distance = (np.array(pos0)[:, None] + np.arange(9))[:, :, None] - np.arange(n_kv)
    np.testing.assert_array_equal(masks[1] == 0, (distance >= 0) & (distance < n_window))


def test_the_window_of_a_drafted_row_follows_its_path() -> None:
    tree, n_window = Tree(np.array([[-1, 0, 0, 2, 3, -2]], np.int32), (5,)), 3
    masks = np.zeros((2, 1, 6, PAGE), np.float16)
    fill_mask(masks[0], [10], tree.sees)
    fill_window(masks[1], masks[0], [10], n_window, np.arange(PAGE)[None], tree.depths)
    seen = [np.flatnonzero(row == 0).tolist() for row in masks[1, 0]]
    # the last row is padding
    assert seen == [[8, 9, 10], [9, 10, 11], [9, 10, 12], [10, 12, 13], [12, 13, 14], [8, 9, 10]]


def test_what_is_before_the_windows_of_all_layers_does_not_matter(
    open_engine: Open, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Qwen3Moe, "layer", lambda hp, il: replace(attention_layer(hp), window=window)
    )
    engine = open_engine("qwen3moe", n_ctx=1280)
    ids = prompt(engine, 3 * window + 17, seed=1)
    first = len(ids) - 1 - 3 * (window - 1)  # the first position that the last row depends on
    base = engine.prefill(ids).require_logits().copy()
    engine.prefixes.save(0)
    # one of 300 positions, seen through three layers, may be too little for quantized activations
    n = 1 if window == SHORT else window
    for at, is_same in ((slice(first), True), (slice(first, first + n), False)):
        other = ids.copy()
        other[at] = (other[at] + 1) % engine.hparams.n_vocab
        engine.reset()
        assert np.array_equal(engine.prefill(other).require_logits(), base) is is_same
    engine.reset()  # what was saved has states alone, and no rows of pages
    engine.prefill(ids)
    wanted = engine.forward([9]).require_logits().copy()
    engine.reset()
    assert engine.prefixes.resume(0, np.append(ids, 9)) == len(ids)
    np.testing.assert_array_equal(engine.forward([9]).require_logits(), wanted)


@pytest.mark.parametrize("n_seq", [1, 3])
def test_all_kinds_of_passes_give_the_bits_of_single_rows(
    open_engine: Open, window: int, n_seq: int
) -> None:
    alone = open_engine("qwen3moe", n_ctx=1024, cpu_reference=True)
    engine = open_engine("qwen3moe", n_ctx=1024, n_seq=n_seq, cpu_reference=True)
    rng, lengths = np.random.default_rng(n_seq), (70, 45 + window, 33)
    texts = [prompt(engine, n, seed=i) for i, n in enumerate(lengths[:n_seq])]
    sweep = engine.passes.begin_prompts([SweepBatch(ids, i) for i, ids in enumerate(texts)])
    while engine.passes.step_prompt(sweep):
        pass
    for seq, swept in enumerate(sweep.prompts):
        ids, last = texts[seq], swept.output
        alone.reset()
        rows = [alone.forward([token]).require_logits()[0] for token in ids]
        assert last is not None
        np.testing.assert_array_equal(last.require_logits()[0], rows[-1])
        engine.reset(seq)
        found = [engine.forward(ids[at : at + 7], seq, all_rows=True).logits
                 for at in range(0, len(ids), 7)]  # fmt: skip
        np.testing.assert_array_equal(np.concatenate(found), rows)
    parents = [TREES[i](9, rng) for i in range(n_seq)]
    tokens, slots = rng.integers(0, 1000, (n_seq, 9)), list(range(n_seq))
    engine.passes.verify(tokens, slots, parents, [9, 7, 8][:n_seq], greedy=False)
    got = engine.collect().require_logits().reshape(n_seq, 9, -1)
    for seq, row in ((0, 8), (n_seq - 1, 4), (n_seq - 1, 6)):
        alone.reset()
        alone.prefill(texts[seq])
        for token in tokens[seq, path(parents[seq], row)]:
            wanted = alone.forward([token]).require_logits()[0]
        np.testing.assert_array_equal(got[seq, row], wanted)


def opened_wide(open_engine: Open, n_seq: int) -> tuple[Engine, Engine]:
    """Return an engine whose rings have all positions, and one whose rings wrap."""
    whole = open_engine("qwen3moe", n_ctx=1280, n_ubatch=1280, cpu_reference=True)
    engine = open_engine("qwen3moe", n_ctx=1280, n_ubatch=32, n_seq=n_seq, cpu_reference=True)
    assert engine.state.states[0].ring < whole.state.states[0].ring == 1280
    return whole, engine


@pytest.mark.parametrize("n_seq", [1, 3])
def test_rings_that_wrap_take_drafts_and_go_back_to_marks(
    open_engine: Open, window: int, n_seq: int
) -> None:
    whole, engine = opened_wide(open_engine, n_seq)
    ids, seq, at, edge = prompt(engine, 1100), n_seq - 1, 0, 3 * PAGE
    wanted = whole.forward(ids, all_rows=True).require_logits().copy()
    marks = (edge - 68, edge - 1, edge, edge + 1)
    for mark in marks:
        last = engine.prefill(ids[at:mark], seq).require_logits()
        np.testing.assert_array_equal(last[0], wanted[mark - 1])
        engine.prefixes.save(seq)
        at = mark
    parents, taken = [-1, 0, 0, 2, 3, 0], [0, 2, 3]  # most drafts are rejected, two are moved
    while at < 1030:
        tokens = np.full((1, 6), 7, np.int32)
        tokens[0, taken] = ids[at : at + 3]
        engine.passes.verify(tokens, [seq], [parents], [6], greedy=False)
        rows = engine.collect().require_logits().reshape(6, -1)
        np.testing.assert_array_equal(rows[taken], wanted[at : at + 3])
        engine.passes.commit({seq: taken})
        at += 3
    sweep = engine.passes.begin_prompts([SweepBatch(ids[at - 3 :][::-1].copy(), seq)])
    engine.passes.step_prompt(sweep)
    cancel = CancelToken()
    cancel.set()
    with pytest.raises(Cancelled):
        engine.passes.step_prompt(sweep, cancel)
    swapped = engine.copies.swap_out(seq)
    engine.prefill(ids[5:300], seq)
    engine.copies.swap_in(0, swapped)
    for row in (at, at + 1):
        logits = engine.forward([ids[row]], 0).require_logits()
        np.testing.assert_array_equal(logits[0], wanted[row])
    for mark in (*marks[1:], marks[0]):
        assert engine.prefixes.resume(seq, ids[: mark + 1]) == mark
        rows = engine.forward(ids[mark : mark + 20], seq, all_rows=True).require_logits()
        np.testing.assert_array_equal(rows, wanted[mark : mark + 20])


def ring_of(n: int, **state: int) -> Any:
    """Return the state of two sequences with rings of n positions, as `Window` needs it."""
    pool = SimpleNamespace(table=np.zeros((2, 16), np.int32))
    return SimpleNamespace(
        ring=n, pool=pool, ring_rows=lambda slots, at: slots * n + at % n, **state
    )


@pytest.mark.parametrize(
    ("window", "n_parts"), [(1, 2), (5, 16), (32, 5), (150, 5), (300, 2), (300, 16), (830, 16)]
)
def test_columns_of_a_single_row_are_summed_in_the_parts_of_all_positions(
    window: int, n_parts: int
) -> None:
    columns = Window(ring_of(512, window=window, n_attention_parts=n_parts))
    for n_kv in range(PAGE, 4097, PAGE):
        rows = columns.columns(PassShape(9, 1, n_kv, 1))[0]
        assert rows == n_kv if n_kv <= window else window + 8 <= rows <= n_kv
        assert 4 * columns.columns(PassShape(9, 4, n_kv, 4))[0] <= columns.most_columns(36, 4)
        for first in {*range(n_kv - PAGE, n_kv, 37), n_kv - 1}:
            shape = PassShape(1, 1, n_kv, 1)
            n, parts = columns.columns(shape)
            assert n <= min(n_kv, max(4 * window, 512 + n_parts), columns.most_columns(1, 1))
            places = columns.positions(shape, [first])[0]
            is_seen = columns.mask(places, first) == 0
            # ggml does not divide fewer than 512 columns; sinks are added in the first part
            own = np.arange(n) // (-(-n // parts) if n >= 512 else n)
            seen = np.arange(max(0, first - window + 1), first + 1)
            all_parts = seen // (-(-n_kv // n_parts) if n_kv >= 512 else n_kv)
            np.testing.assert_array_equal(places[is_seen], seen)
            got, first_part = own[is_seen], all_parts == 0
            np.testing.assert_array_equal(np.diff(got) > 0, np.diff(all_parts) > 0)
            np.testing.assert_array_equal(got == 0, first_part)


@pytest.mark.parametrize("n_parts", [0, 2])
@pytest.mark.parametrize("window", [1, SHORT, PAGE, LONG])
def test_a_row_that_goes_on_changes_what_a_new_one_writes(window: int, n_parts: int) -> None:
    columns = Window(ring_of(768, window=window, n_attention_parts=n_parts))
    shape = PassShape(1, 1, 2048, 1)
    n = columns.columns(shape)[0]
    found, fresh = (
        (np.zeros(n, np.float16), np.zeros(n, np.int32), np.zeros(1, np.int64)) for _ in range(2)
    )
    row = WindowRow(columns, shape, *found)
    for i, first in enumerate([*range(240, 1400), *range(90, 120), *range(60, 70)]):
        row.move_to(1, first, goes_on=i not in (0, 1160, 1190))
        WindowRow(columns, shape, *fresh).move_to(1, first, goes_on=False)
        is_seen = fresh[0] == 0
        np.testing.assert_array_equal(found[0], fresh[0])
        np.testing.assert_array_equal(found[1][is_seen], fresh[1][is_seen])
        assert found[2][0] == fresh[2][0] == 768 + first % 768


@pytest.mark.parametrize(
    ("window", "ring", "n_past"), [(5, 8, 3), (5, 8, 21), (8, 8, 12), (300, 256, 700)]
)
def test_states_are_the_last_rows_of_a_ring_and_the_others_are_cleared(
    window: int, ring: int, n_past: int
) -> None:
    """A ring is no longer than the context, which may be shorter than the window."""
    found, cleared = list[int](), list[int]()
    tensor: Any = SimpleNamespace(nb=(1, 1))
    state: Any = SimpleNamespace(window=window, ring=ring, _in_rings=[tensor])
    state._runs = partial(State._runs, state)
    state._clear = lambda _, start, size: cleared.extend(range(start, start + size))
    state._clear_rings = partial(State._clear_rings, state)
    for start, to, size in State.pieces(state, tensor, 2, n_past):
        assert to == len(found)
        found += range(start, start + size)
    n = min(window, ring)
    assert found == [2 * ring + at % ring for at in range(n_past - n, n_past)]
    State.clear_after(state, 2, n_past)
    assert sorted(found + cleared) == [*range(2 * ring, 3 * ring)]
    cleared.clear()
    state.recurrent = []
    State.clear_states(state, 2)
    assert cleared == [*range(2 * ring, 3 * ring)]


def test_a_paged_row_lists_the_pages_of_its_ring_once() -> None:
    window = Window(ring_of(3 * PAGE, window=PAGE, n_attention_parts=2))
    rows, idx = np.zeros(16, np.int32), np.zeros(1, np.int64)
    shape = PassShape(1, 1, PAGED, 1)
    row = WindowRow(window, shape, np.zeros(0, np.float16), rows, idx)
    row.move_to(1, 5 * PAGE + 7, goes_on=False)
    assert rows.tolist() == [3 + page % 3 for page in range(16)]
    rows[:] = -1
    row.move_to(1, 5 * PAGE + 8, goes_on=True)
    assert (set(rows.tolist()), idx[0]) == ({-1}, 3 * PAGE + 2 * PAGE + 8)
    assert not window.is_split(shape) and window.is_split(shape._replace(n_kv=2048))


def test_a_layer_with_a_window_takes_as_much_as_it_needs(open_engine: Open, window: int) -> None:
    few, many = (open_engine("qwen3moe", n_ctx=n, n_ubatch=32) for n in (1024, 2048))
    ring = few.state.states[0].ring
    assert window + 32 <= ring < window + 32 + PAGE
    row = few.memory()["kv_bytes"] // (few.hparams.n_layer * (ring + 1) + 1024 - ring)
    assert many.memory()["kv_bytes"] - few.memory()["kv_bytes"] == 1024 * row
    assert few.memory()["kv_bytes"] == few.plan.bytes["kv"]
