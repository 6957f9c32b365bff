"""Beginnings that one sequence computed serve others: pages are shared, answers stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.cache_rules import check_pool
from helpers.reading import read
from helpers.sequence_machine import NAMES, SETTINGS
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.errors import Cancelled, PoolFull
from moegraph.events import CancelToken
from moegraph.passes import prefixes
from moegraph.placement import footprint
from moegraph.resident.hostcopies import StatesCopy
from moegraph.runner.sweep_batch import SweepBatch

Open = Callable[..., Engine]
ONE = {"cpu_reference": True, "n_ctx": 1024, "n_ubatch": 128}
SHARED = {**ONE, "n_seq": 3, "n_kv": -1}


def cold(engine: Engine, ids: np.ndarray) -> np.ndarray:
    """Return the logits after ids, computed anew."""
    engine.reset(0)
    return engine.prefill(ids, 0).require_logits()[-1]


@pytest.mark.parametrize("settings", SETTINGS[::2], ids=NAMES[::2])
def test_a_beginning_that_another_sequence_holds_is_shared(
    open_engine: Open, settings: dict[str, Any]
) -> None:
    engine, alone = open_engine(**SHARED, **settings), open_engine(**ONE)
    ids, other = prompt(engine, 700), prompt(engine, 100, seed=1)
    room, pool = engine.passes.room, engine.state.pool
    read(engine, 0, ids[:620], 600)
    asked = np.concatenate([ids[:600], other])
    assert engine.prefixes.n_saved(asked) == 600 and room.n_free_pages == 1
    logits, n = read(engine, 1, asked)
    np.testing.assert_array_equal(logits, cold(alone, asked))
    # two whole pages are shared, of the third it has a copy
    assert n == 600 and pool.pages(1)[:2] == pool.pages(0)[:2] and room.n_free_pages == 0
    check_pool(pool)
    # both go on, and each is what it says
    for seq, before in ((0, ids[:620]), (1, asked)):
        found = engine.forward(other[:3], seq=seq).require_logits()[-1]
        np.testing.assert_array_equal(found, cold(alone, np.append(before, other[:3])))
    with pytest.raises(PoolFull):
        engine.forward(other[:1], seq=2)
    engine.reset(0)
    assert room.n_free_pages == 1
    found = engine.forward(other[:5], seq=1).require_logits()[-1]
    np.testing.assert_array_equal(found, cold(alone, np.concatenate([asked, other[:3], other[:5]])))
    engine.reset(1)
    assert room.n_free_pages == 4
    # nobody has the rows now: they come from host memory
    logits, n = read(engine, 2, asked)
    assert n == 600
    np.testing.assert_array_equal(logits, cold(alone, asked))


def test_a_sequence_that_goes_back_into_a_shared_page_gets_its_own(open_engine: Open) -> None:
    engine, alone = open_engine(**{**SHARED, "n_kv": 2048}), open_engine(**ONE)
    ids, other = prompt(engine, 700), prompt(engine, 100, seed=1)
    read(engine, 0, ids[:300])
    before = engine.copies.snapshot(0)
    read(engine, 0, ids[:620], 600)
    read(engine, 1, np.concatenate([ids[:600], other]))
    engine.copies.restore(before)
    check_pool(engine.state.pool)
    assert engine.held(0) == ids[:300].tolist()
    for seq, n in ((0, 300), (1, 600)):
        held = np.array(engine.held(seq), dtype=np.int32)
        found = engine.prefill(other[::-1], seq).require_logits()[-1]
        wanted = cold(alone, np.concatenate([held, other[::-1]]))
        np.testing.assert_array_equal(found, wanted)
        assert len(held) >= n
    before.close()


@pytest.mark.parametrize("settings", SETTINGS[::2], ids=NAMES[::2])
def test_a_cancelled_prompt_leaves_what_all_layers_have(
    open_engine: Open, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client gives up while its prompt is read, and asks the same again."""
    monkeypatch.setattr(footprint, "SWEEP_ROWS", 128)
    monkeypatch.setattr(prefixes, "_EVERY", 128)
    engine, alone = open_engine(**ONE, n_seq=2, **settings), open_engine(**ONE)
    ids, n_known = prompt(engine, 700), 0
    read(engine, 0, ids[:20])
    for n_whole in (0, 150, 420):
        n = engine.prefixes.resume(0, ids)
        assert n == (n_known if n_whole else 20)
        cuts = tuple(engine.prefixes.begin(ids, (690,), n))
        assert cuts[-1] == 690
        cancel = CancelToken()
        sweep = engine.passes.begin_prompts([SweepBatch(ids[n:], 0, cuts=cuts)])
        while sweep.prompts[0].n_whole < n_whole:
            engine.passes.step_prompt(sweep, cancel)
        engine.passes.step_prompt(sweep, cancel)
        engine.forward(ids[:1], seq=1)  # others go on meanwhile
        cancel.set()
        with pytest.raises(Cancelled):
            engine.passes.step_prompt(sweep, cancel)
        assert engine.held(0) == ids[:n].tolist()
        whole = [cut for cut in cuts if cut <= sweep.prompts[0].n_whole]
        n_known = max([n_known, *whole])
        assert n_known >= n_whole - 128
        engine.reset(0)
    assert 280 < n_known < 690
    logits, n = read(engine, 0, ids)
    assert n == n_known
    np.testing.assert_array_equal(logits, cold(alone, ids))


def test_what_is_not_finite_is_not_kept(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "SWEEP_ROWS", 128)
    monkeypatch.setattr(prefixes, "_EVERY", 128)
    monkeypatch.setattr(StatesCopy, "is_finite", False)
    engine = open_engine(**ONE)
    ids, cancel = prompt(engine, 500), CancelToken()
    cuts = tuple(engine.prefixes.begin(ids, (490,), 0))
    sweep = engine.passes.begin_prompts([SweepBatch(ids, 0, cuts=cuts)])
    while sweep.prompts[0].n_whole < 256:
        engine.passes.step_prompt(sweep)
    cancel.set()
    with pytest.raises(Cancelled):
        engine.passes.step_prompt(sweep, cancel)
    assert engine.prefixes.store.n_places == 0 and engine.prefixes.resume(0, ids) == 0
