"""Prompts that are computed layer by layer: the bits of passes, and each expert sent once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import placements
from helpers.placements import SOME_FULL
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.errors import Cancelled, ContextOverflow, RequestError
from moegraph.events import CancelToken
from moegraph.graphs.chunk import Segment
from moegraph.placement import footprint
from moegraph.runner.inspect import read_tensor
from moegraph.runner.sweep import Sweep
from moegraph.runner.sweep_batch import SweepBatch, cut_parts, cut_together

Open = Callable[..., Engine]
Floats = npt.NDArray[np.float32]

PLACEMENTS, MISSING = [*placements.PLACEMENTS, SOME_FULL], [*placements.MISSING, SOME_FULL]


def in_passes(engine: Engine, ids: npt.NDArray[np.int32], seq: int = 0) -> Floats:
    """Return the logits of all rows of a prompt in passes of n_ubatch rows."""
    step, parts = engine.runner.n_ubatch, []
    for at in range(0, len(ids), step):
        parts.append(engine.forward(ids[at : at + step], seq, all_rows=True).require_logits())
    return np.concatenate(parts)


def swept(engine: Engine, ids: npt.NDArray[np.int32], seq: int = 0, **more: Any) -> Floats:
    """Return the logits of all rows of a prompt that is computed layer by layer."""
    return engine.prefill(ids, seq, all_rows=True, **more).require_logits()


def begin(engine: Engine, ids: Any, slot: int, all_rows: bool, greedy: bool, **more: Any) -> Sweep:
    """Begin a prompt that goes on step by step."""
    batch = SweepBatch(np.asarray(ids, dtype=np.int32), slot, all_rows, greedy, **more)
    return engine.passes.begin_prompts([batch])


def sent_bytes(engine: Engine) -> int:
    """Return the expert bytes sent so far."""
    stats = engine.expert_stats()
    return stats.n_bytes_to_device if stats else 0


@pytest.mark.parametrize(
    ("placement", "n"), [*((placement, 300) for placement in PLACEMENTS), (MISSING[0], 40)], ids=str
)
def test_a_prompt_has_the_bits_of_passes_of_its_chunks(open_engine: Open, placement, n) -> None:
    plain, engine = open_engine("kquant40"), open_engine("kquant40", **placement)
    ids = prompt(plain, n + 70, seed=1)
    np.testing.assert_array_equal(swept(engine, ids[:n]), in_passes(plain, ids[:n]))
    # a second prompt continues it, and so do single rows
    np.testing.assert_array_equal(swept(engine, ids[n:]), in_passes(plain, ids[n:]))
    for token in ids[:4]:
        found = [e.forward([token]).require_logits() for e in (engine, plain)]
        np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("n_rows", [130])
def test_a_prompt_may_need_several_sweeps(open_engine: Open, monkeypatch, n_rows: int) -> None:
    monkeypatch.setattr(footprint, "SWEEP_ROWS", n_rows)
    plain, engine = open_engine(), open_engine(**MISSING[1])
    ids = prompt(plain, 500, seed=3)
    np.testing.assert_array_equal(swept(engine, ids), in_passes(plain, ids))
    assert engine.runner.sweeps.memory.n_rows == n_rows
    engine.reset()
    sweep = begin(engine, ids, 0, False, True)
    assert len(sweep._parts) == -(-500 // (n_rows // 64 * 64))


@pytest.mark.parametrize("preset", ["mini35b"])
def test_reference_mode_is_bit_equal_for_every_chunk_size(open_engine: Open, preset: str) -> None:
    plain = open_engine(preset, cpu_reference=True)
    ids = prompt(plain, 200, seed=4)
    expected = in_passes(plain, ids)
    for n_ubatch, placement in ((64, MISSING[0]), (128, MISSING[1]), (48, PLACEMENTS[0])):
        engine = open_engine(preset, cpu_reference=True, **{**placement, "n_ubatch": n_ubatch})
        np.testing.assert_array_equal(swept(engine, ids), expected)


def test_every_missing_expert_crosses_the_link_once(open_engine: Open) -> None:
    for preset in ("kquant40", "mini35b"):
        engine = open_engine(preset, **MISSING[1])
        ids = prompt(engine, 400, seed=5)
        chosen: dict[int, set[int]] = {}
        engine.runner.observers.append(lambda il, e, to=chosen: to.setdefault(il, set()).update(e))
        tables, store = engine.runner.cache.tables.copy(), engine.stage.store
        before = sent_bytes(engine)
        engine.prefill(ids, greedy=True)
        cold = {il: [e for e in experts if tables[il, e] < 0] for il, experts in chosen.items()}
        needed = sum(
            store.packing(il).n_bytes * len(experts) for il, experts in cold.items() if experts
        )
        assert 0 < needed <= sent_bytes(engine) - before <= 1.1 * needed


@pytest.mark.parametrize("placement", [PLACEMENTS[0], MISSING[1]], ids=str)
def test_other_sequences_run_between_any_two_steps(open_engine: Open, placement) -> None:
    plain, engine = open_engine(n_seq=3), open_engine(n_seq=3, **placement)
    ids, other = prompt(plain, 200, seed=7), prompt(plain, 500, seed=8)
    expected, rows = in_passes(plain, ids, 1), []
    sweep = begin(engine, ids, 1, True, False)
    before, at = sent_bytes(engine), 0
    uploads = 0
    while engine.passes.step_prompt(sweep):
        uploads += sent_bytes(engine) - before
        for seq in (0, 2):
            rows.append(engine.forward([other[at]], seq).require_logits())
            at += 1
        before = sent_bytes(engine)
    np.testing.assert_array_equal(sweep.prompts[0].output.require_logits(), expected)
    for i, row in enumerate(rows):
        got = plain.forward([other[i]], (0, 2)[i % 2]).require_logits()
        np.testing.assert_array_equal(row, got)
    np.testing.assert_array_equal(
        *(e.forward([1], 1).require_logits() for e in (engine, plain)),
    )


def states(engine: Engine, seq: int) -> list[Floats]:
    """Return the recurrent states of a sequence."""
    state = engine.state.states[0]
    return [read_tensor(t)[seq].copy() for each in state.layer_states.values() for t in each]


def keys(engine: Engine, seq: int) -> list[npt.NDArray[Any]]:
    """Return the K and V rows of the positions that a sequence holds."""
    state = engine.state.states[0]
    rows = state.pool.rows(np.array(seq), np.arange(state.n_past[seq]))
    return [read_tensor(t)[rows].copy() for t in (*state.k.values(), *state.v.values())]


@pytest.mark.parametrize(
    ("placement", "n_held"), [(PLACEMENTS[0], 40), (MISSING[0], 0), (MISSING[1], 40)], ids=str
)
def test_a_cancelled_prompt_leaves_the_sequence_as_it_was(
    open_engine: Open, placement, n_held: int
) -> None:
    engine, plain = open_engine(**placement), open_engine()
    ids = prompt(engine, 240, seed=9)
    if n_held:
        for e in (engine, plain):
            e.prefill(ids[:n_held])
    held = engine.held(0).copy(), engine.state.n_past[0], states(engine, 0), keys(engine, 0)
    pages = engine.state.pool.pages(0)
    for n_steps in (0, 1, 2, 7, 19, 25):
        sweep = begin(engine, ids[n_held:], 0, False, True)
        for _ in range(n_steps):
            engine.passes.step_prompt(sweep)
        cancel = CancelToken()
        cancel.set()
        with pytest.raises(Cancelled):
            engine.passes.step_prompt(sweep, cancel)
        assert (engine.held(0), engine.state.n_past[0]) == held[:2]
        assert engine.state.pool.pages(0) == pages
        for before, now in ((held[2], states(engine, 0)), (held[3], keys(engine, 0))):
            for a, b in zip(before, now):
                np.testing.assert_array_equal(a, b)
        with pytest.raises(RequestError, match="begin another"):
            engine.passes.step_prompt(sweep)
    expected = plain.prefill(ids[n_held:]).require_logits()
    np.testing.assert_array_equal(engine.prefill(ids[n_held:]).require_logits(), expected)


def test_what_a_prompt_refuses(open_engine: Open) -> None:
    engine = open_engine(n_seq=2, n_ctx=256, **MISSING[1])
    ids = prompt(engine, 100, seed=12)
    with pytest.raises(ContextOverflow):
        begin(engine, np.zeros(257, np.int32), 0, False, True)
    with pytest.raises(RequestError, match="empty"):
        begin(engine, [], 0, False, True)
    sweep = begin(engine, ids, 0, False, True)
    with pytest.raises(RequestError, match="under way"):
        begin(engine, ids, 1, False, True)
    with pytest.raises(RequestError, match="under way"):
        engine.forward([1], 0)
    engine.forward([1], 1)
    engine.reset(0)  # cancels it
    with pytest.raises(RequestError, match="begin another"):
        engine.passes.step_prompt(sweep)
    assert engine.held(0) == [] and engine.held(1) == [1]


def test_chunks_and_parts() -> None:
    few = cut_together([(0, 5, 10, (7, 40))], 4, bool)
    assert few == [(Segment(0, 5, 2),), (Segment(0, 7, 4),), (Segment(0, 11, 4),)]
    chunks = cut_together([(0, 0, 100, ())], 16, bool)
    assert len(cut_parts(chunks, 48, 2)) == 4
    parts = cut_parts(chunks, 48, 9)
    assert [sum(c.n for c in part) for part in parts] == [48, 48, 4]
    assert [c.segments for part in parts for c in part] == chunks
    assert all(part[0].row == 0 for part in parts)


def test_going_back_cancels_the_prompt_of_that_sequence(open_engine: Open) -> None:
    engine, plain = open_engine(**MISSING[1]), open_engine()
    ids = prompt(engine, 140, seed=17)
    for e in (engine, plain):
        e.prefill(ids[:40])
    snapshot = engine.copies.snapshot(0)
    engine.prefill(ids[40:80])
    sweep = begin(engine, ids[80:], 0, False, True)
    for _ in range(5):
        engine.passes.step_prompt(sweep)
    engine.copies.restore(snapshot)
    assert engine.held(0) == ids[:40].tolist() and not sweep.is_open
    np.testing.assert_array_equal(swept(engine, ids[40:]), in_passes(plain, ids[40:]))
