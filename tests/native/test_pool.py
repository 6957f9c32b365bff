"""Sequences that share a pool of KV rows: one may use all of it, and others wait in host memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cache_rules import check_pool
from helpers.pool_machine import PoolMachine, rows_left
from helpers.sequence_machine import NAMES, SETTINGS
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.errors import (
    Cancelled,
    ConfigError,
    ContextOverflow,
    NativeError,
    PoolFull,
    RequestError,
)
from moegraph.events import CancelToken
from moegraph.placement.footprint import needed_bytes
from moegraph.resident.layout import PAGE
from moegraph.runner.sweep_batch import SweepBatch

Open = Callable[..., Engine]
ONE = {"cpu_reference": True, "n_ctx": 1024, "n_ubatch": 128}
SHARED = {**ONE, "n_seq": 3, "n_kv": -1}


def last_row(engine: Engine, ids: np.ndarray, seq: int = 0) -> np.ndarray:
    """Return the logits after ids, computed as a prompt of an empty sequence."""
    engine.reset(seq)
    return engine.prefill(ids, seq).require_logits()[-1]


def test_one_sequence_may_use_the_whole_pool(open_engine: Open) -> None:
    engine, alone = open_engine(**SHARED), open_engine(**ONE)
    ids, room = prompt(engine, 1024), engine.passes.room
    assert (room.n_free_pages, rows_left(engine, 1), room.pages_for(1, 257)) == (4, 1024, 2)
    np.testing.assert_array_equal(last_row(engine, ids, 1), last_row(alone, ids))
    assert (room.n_free_pages, rows_left(engine, 0), rows_left(engine, 1)) == (0, 0, 0)
    with pytest.raises(ContextOverflow, match="1025 positions, the context holds 1024") as caught:
        engine.forward(ids[:1], seq=1)
    assert not isinstance(caught.value, PoolFull)
    engine.reset(1)
    np.testing.assert_array_equal(last_row(engine, ids[:300], 2), last_row(alone, ids[:300]))


def test_a_file_for_which_no_pages_are_left_leaves_all_idle_sequences(
    open_engine: Open, tmp_path: Path
) -> None:
    engine = open_engine(**SHARED)
    engine.keep_prefixes(None, 0, tmp_path)
    files, ids = engine.slot_files, prompt(engine, 600)
    assert files
    engine.prefill(ids, 0)
    files.save(0, "a", "", [0, 1, 2])
    engine.reset(0)
    engine.prefill(ids[:256], 0)
    engine.prefill(ids[:200], 1)
    engine.prefill(ids[:300], 2)  # the only one that is not idle
    held = [engine.held(seq)[:] for seq in range(3)]
    with pytest.raises(PoolFull, match="pages needed: 3, free: 2"):
        files.restore(0, "a", "", [0, 1])
    assert [engine.held(seq) for seq in range(3)] == held
    assert files.restore(0, "a", "", [0, 1, 2])[0] == 600


@pytest.mark.parametrize("settings", SETTINGS[::2], ids=NAMES[::2])
def test_what_finds_no_page_says_so_and_changes_nothing(
    open_engine: Open, settings: dict[str, Any]
) -> None:
    engine = open_engine(**SHARED, **settings)
    ids = prompt(engine, 600)
    engine.prefill(ids, 0)
    engine.forward(ids[:9], seq=1)
    held = [engine.held(seq)[:] for seq in range(3)]
    calls = (
        lambda: engine.forward(ids[:1], seq=2),
        lambda: engine.prefill(ids[:5], 2),
        lambda: engine.prefill(ids[:300], 2),
        lambda: engine.prefill(ids[:300], 1),
        lambda: engine.passes.verify(ids[:2], 2),
        lambda: engine.passes.begin_prompts([SweepBatch(ids[:200], 2)]),
        lambda: engine.forward(ids[:3].reshape(3, 1), seq=(0, 1, 2)),
    )
    for call in calls:
        with pytest.raises(PoolFull, match="the KV cache is full: pages needed: [12], free: 0"):
            call()
        assert [engine.held(seq) for seq in range(3)] == held
        check_pool(engine.state.pool)
    token = CancelToken()
    token.set()
    with pytest.raises(Cancelled):  # before its first graph
        engine.prefill(ids[:5], 1, cancel=token)
    assert [engine.held(seq) for seq in range(3)] == held
    assert rows_left(engine, 1) == PAGE - 9
    # those that have pages go on, and so does everybody once a page is free
    for seq in (0, 1):
        engine.forward(ids[:1], seq=seq)
    engine.reset(1)
    alone = open_engine(**ONE)
    np.testing.assert_array_equal(last_row(engine, ids[:250], 2), last_row(alone, ids[:250]))


def test_unequal_sequences_are_divided_among_passes(open_engine: Open) -> None:
    engine, alone = open_engine(**{**SHARED, "n_seq": 5}), open_engine(**ONE)
    ids, room = prompt(engine, 600), engine.passes.room
    lengths = (500, 4, 5, 0, 0)
    for seq, n in enumerate(lengths[:3]):
        engine.prefill(ids[:n], seq)
    assert room.groups([]) == []
    assert room.groups([1, 2]) == [(1, 2)]
    assert room.groups([2, 0, 1]) == [(0, 1), (2,)]
    tokens = np.array([[7], [8], [9]], dtype=np.int32)
    with pytest.raises(RequestError, match="a pass over 3 sequences reads up to 512 positions"):
        engine.forward(tokens, seq=(0, 1, 2))
    for group in room.groups([0, 1, 2]):
        found = engine.forward(tokens[list(group)], seq=group).require_logits()
        for row, seq in zip(found, group):
            wanted = last_row(alone, np.append(ids[: lengths[seq]], tokens[seq]))
            np.testing.assert_array_equal(row, wanted)
    # with a whole context for each, every set of sequences is one pass
    wide = open_engine(**{**ONE, "n_seq": 3})
    wide.prefill(ids[:500], 0)
    assert wide.passes.room.groups([0, 1, 2]) == [(0, 1, 2)]


def test_the_pool_has_its_own_size(open_engine: Open) -> None:
    with pytest.raises(ConfigError, match="n_kv is 1000: .* at least the context of one, 1024"):
        open_engine(n_ctx=1024, n_seq=3, n_kv=1000)
    sizes = {}
    for n_kv, n_rows in ((0, 3072), (-1, 1024), (1500, 1536), (9999, 3072)):
        engine = open_engine(n_ctx=1024, n_seq=3, n_kv=n_kv)
        assert engine.state.shape.n_rows == engine.state.pool.n_pages * PAGE == n_rows
        sizes[n_rows] = engine.state.states[0].kv_bytes
        need = needed_bytes(engine.file, engine.config, 1024)
        assert need.kv == engine.state.states[0].kv_bytes
        assert engine.runner.compute_bytes <= need.compute
    assert sizes[3072] > 2.9 * sizes[1024]


@pytest.mark.parametrize("settings", SETTINGS[::2], ids=NAMES[::2])
def test_a_swapped_sequence_goes_on_in_another_slot(
    open_engine: Open, settings: dict[str, Any]
) -> None:
    engine, alone = open_engine(**SHARED, **settings), open_engine(**ONE)
    ids, other = prompt(engine, 640), prompt(engine, 900, seed=1)
    engine.prefill(ids[:300], 0)
    engine.forward(ids[300:305], seq=0)
    with pytest.raises(PoolFull):
        engine.prefill(other, 1)
    swapped = engine.copies.swap_out(0)
    assert swapped.ids == ids[:305].tolist() and engine.held(0) == []
    copies = engine.copies
    assert swapped.n_bytes == copies.memory.states_bytes + 305 * copies.row_bytes
    np.testing.assert_array_equal(last_row(engine, other, 1), last_row(alone, other))
    with pytest.raises(PoolFull, match="pages needed: 2, free: 0"):
        engine.copies.swap_in(2, swapped)
    assert engine.held(1) == other.tolist() and engine.held(2) == []
    engine.reset(1)
    engine.forward(other[:3], seq=2)  # what the slot holds gives way
    engine.copies.swap_in(2, swapped)
    assert engine.held(2) == ids[:305].tolist() and swapped.n_bytes == 0
    found = engine.prefill(ids[305:], 2).require_logits()[-1]
    np.testing.assert_array_equal(found, last_row(alone, ids))
    check_pool(engine.state.pool)


def test_a_sequence_without_host_memory_stays(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, alone = open_engine(**SHARED), open_engine(**ONE)
    ids = prompt(engine, 100)
    engine.prefill(ids[:90], 0)

    def full(*_: object) -> None:
        raise MemoryError

    for name in ("take_states", "take_rows"):
        with monkeypatch.context() as patch:
            patch.setattr(engine.state.copies, name, full)
            with pytest.raises(NativeError, match="no host memory for .* of sequence 0"):
                engine.copies.swap_out(0)
    assert engine.held(0) == ids[:90].tolist()
    found = engine.prefill(ids[90:], 0).require_logits()[-1]
    np.testing.assert_array_equal(found, last_row(alone, ids))


@pytest.mark.parametrize(
    ("seed", "settings"), [(6, SETTINGS[0]), (4, SETTINGS[2])], ids=[NAMES[0], NAMES[2]]
)
def test_sequences_that_do_not_all_fit_hold_what_they_say(
    open_engine: Open, seed: int, settings: dict[str, Any]
) -> None:
    chosen = {"cpu_reference": True, "n_ctx": 512, "deterministic": True}
    engine = open_engine(n_seq=5, n_kv=1280, **chosen, **settings)
    machine = PoolMachine(engine, open_engine(**chosen), seed)
    machine.run(36)
    assert min(machine.n_full, machine.n_shared) > 2
    for swapped, _ in machine.away:
        swapped.close()
    for slot in range(5):
        engine.reset(slot)
    assert engine.passes.room.n_free_pages == 5
