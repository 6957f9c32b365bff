"""Passes over any sequences in any order: each has the bits of its own sequence alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.cache_rules import check_pool
from helpers.faults import FAULTS, faulty, poison
from helpers.shared import prompt, resident_bytes

from moegraph.engine import Engine
from moegraph.errors import ContextOverflow, RequestError
from moegraph.ggml.handles import live_handles
from moegraph.resident.kvpool import PAGE
from moegraph.runner import NotFinite
from moegraph.server.host import give_back

Open = Callable[..., Engine]
MODES: list[dict[str, Any]] = [
    {"mode": "whole"},
    {"mode": "layered"},
    {"cache_slots": 48, "pin_layers": 0, "miss": "stream", "policy": "lru"},
    {"cache_slots": 48, "pin_layers": 0, "miss": "cpu", "policy": "lru"},
    {"cache_slots": 48, "pin_layers": 0, "miss": "stream", "policy": "lru", "host_pin": "all"},
]
NAMES = ["whole", "layered", "stream", "cpu", "fetch"]
N_SEQ = 5


def logits_alone(engine: Engine, ids: np.ndarray, chunk: int = 64) -> np.ndarray:
    """Return the logits of every position of one sequence, computed by itself."""
    engine.reset()
    parts = [
        engine.forward(ids[at : at + chunk], all_rows=True).logits
        for at in range(0, len(ids), chunk)
    ]
    return np.concatenate(parts)


@pytest.mark.parametrize("settings", MODES[::2], ids=NAMES[::2])
def test_any_slots_in_any_order_equal_each_alone(open_engine: Open, settings: dict) -> None:
    together = open_engine(cpu_reference=True, n_seq=N_SEQ, **settings)
    alone = open_engine(cpu_reference=True)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 1000, (N_SEQ, 130)).astype(np.int32)
    expected = [logits_alone(alone, row) for row in ids]
    at = [0] * N_SEQ
    for turn in range(60):
        if turn % 13 == 12:
            slot = int(rng.integers(0, N_SEQ))
            together.reset(slot)
            at[slot] = 0
        slots = rng.permutation(N_SEQ)[: rng.integers(1, N_SEQ + 1)].tolist()
        width = int(rng.choice([1, 1, 1, 3, 9]))
        slots = [slot for slot in slots if at[slot] + width <= 130]
        if not slots:
            continue
        rows = np.stack([ids[slot, at[slot] : at[slot] + width] for slot in slots])
        got = together.forward(rows, slots, all_rows=True).logits.reshape(len(slots), width, -1)
        for slot, logits in zip(slots, got):
            wanted = expected[slot][at[slot] : at[slot] + width]
            np.testing.assert_array_equal(logits, wanted, err_msg=f"turn {turn}, sequence {slot}")
            at[slot] += width
            assert together.held(slot) == ids[slot, : at[slot]].tolist()
    check_pool(together.state.pool)


@pytest.mark.parametrize("type_kv", ["f16", "q4_0"])
def test_pages_in_any_order_equal_pages_in_order(open_engine: Open, type_kv: str) -> None:
    kv = {"type_k": type_kv, "type_v": type_kv}
    settings = {"cpu_reference": True, "n_ctx": 3 * PAGE, "n_ubatch": 256, **kv}
    together, alone = (open_engine("legacy32", n_seq=n, **settings) for n in (3, 1))
    ids = np.random.default_rng(2).integers(0, 1000, (3, 3 * PAGE)).astype(np.int32)
    expected = [logits_alone(alone, row, 256) for row in ids]
    together.forward(ids[0, :PAGE], seq=0)
    together.forward(ids[2, :PAGE], seq=2)
    together.forward(ids[:1, PAGE : PAGE + 250], [0])
    together.reset(2)  # its page is taken by the next to grow
    together.forward(ids[1:, :250], [1, 2])
    got = together.forward(ids[1:, 250:262], [1, 2], all_rows=True).logits
    np.testing.assert_array_equal(got.reshape(2, 12, -1), [e[250:262] for e in expected[1:]])
    pages = [together.state.pool.pages(slot) for slot in range(3)]
    assert sorted(p for ps in pages for p in ps) == list(range(6)) and pages != [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    for slot, first in ((0, 506), (1, 262), (2, 262), (0, 507), (1, 263)):
        got = together.forward(ids[slot, first : first + 1], seq=slot).logits
        np.testing.assert_array_equal(got[0], expected[slot][first])


def settled_bytes() -> int:
    """Return the resident memory without what the process could give back."""
    give_back()
    return resident_bytes()


def test_sequences_in_and_out_at_random_keep_memory_flat(open_engine: Open) -> None:
    n, rng = 64, np.random.default_rng(4)
    engine = open_engine("legacy32", n_seq=n, n_ctx=512, n_ubatch=250)
    pool, longest, settled, handles = engine.state.pool, 0, 0, []
    for turn in range(150):
        if turn == 40:
            settled = settled_bytes()
        handles.append(live_handles())
        slot = int(rng.integers(0, n))
        if engine.held(slot) and rng.random() < 0.5:
            engine.reset(slot)
        elif len(engine.held(slot)) + 250 <= 512:
            engine.forward(prompt(engine, int(rng.choice([2, 250]))), seq=slot, greedy=True)
        check_pool(pool)
        needed = [-(-len(engine.held(s)) // PAGE) for s in range(n)]
        assert pool.n_pages - pool.n_free == sum(needed), f"turn {turn}"
        longest = max(longest, sum(needed))
    assert longest > 20
    assert all(found == handles[40] for found in handles[40:])
    assert settled_bytes() - settled < 1 << 20
    for slot in range(n):
        engine.reset(slot)
    assert pool.n_free == pool.n_pages == n * 512 // PAGE


@pytest.mark.parametrize("settings", MODES[:3:2], ids=NAMES[:3:2])
def test_a_nan_in_one_sequence_touches_no_other(open_engine: Open, settings: dict) -> None:
    engine = open_engine(cpu_reference=True, n_seq=3, **settings)
    alone = open_engine(cpu_reference=True)
    ids = prompt(engine, 60).reshape(3, 20)
    expected = [logits_alone(alone, row) for row in ids]
    engine.forward(ids[:, :10])
    poison(engine, 1)
    message = "logits of sequence 1 that are not finite after 11 positions, "
    with pytest.raises(NotFinite, match=message) as caught:
        engine.forward(ids[[2, 1, 0], 10:11], [2, 1, 0])
    assert caught.value.sequences == (1,)
    for row, slot in ((0, 2), (2, 0)):
        np.testing.assert_array_equal(caught.value.output.logits[row], expected[slot][10])
    assert [len(engine.held(slot)) for slot in range(3)] == [11, 0, 11]
    got = engine.forward(ids[[2, 0], 11:12], [2, 0]).logits
    np.testing.assert_array_equal(got, [expected[2][11], expected[0][11]])
    np.testing.assert_array_equal(engine.forward(ids[1], 1, all_rows=True).logits, expected[1])


def test_sequences_that_do_not_fit_the_rows_are_refused(open_engine: Open) -> None:
    engine = open_engine(n_seq=3, n_ctx=256)
    for rows, slots, kind, words in (
        ([[1], [2]], [1, 1], RequestError, "sequence 1 is named twice in one pass"),
        ([[1], [2]], [1], RequestError, "token ids for 2 sequences, but 1 sequences are named"),
        ([[1], [2]], [0, 3], RequestError, "no sequence 3; the engine has 0 to 2"),
        ([[1], [2]], [0, -1], RequestError, "no sequence -1"),
        ([[1], [2]], 2, RequestError, "the pass needs sequences 2 to 3; the engine has 0 to 2"),
    ):
        with pytest.raises(kind, match=words):
            engine.forward(rows, slots)
    for _ in range(4):
        engine.forward(prompt(engine, 64), seq=2)
    with pytest.raises(ContextOverflow, match="257 positions, the context holds 256"):
        engine.forward([[1], [2]], [0, 2])
    assert [len(engine.held(slot)) for slot in range(3)] == [0, 0, 256]


def test_a_pass_that_fails_is_awaited_before_its_host_memory_is_used_again(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, done = open_engine("legacy32", mode="whole"), list[str]()
    part, device = engine.runner.parts[0], engine.runner.parts[0].device
    fill, wait = part.fill, device.synchronize
    monkeypatch.setattr(part, "fill", lambda *a: (done.append("fill"), fill(*a))[1])
    monkeypatch.setattr(device, "synchronize", lambda: (done.append("wait"), wait())[1])
    result, kind = FAULTS["mg_launch"]
    with faulty("mg_launch", 1, result), pytest.raises(kind):
        engine.forward([1])
    engine.forward([1])
    assert done[:2] == ["fill", "wait"] and done.count("fill") == 2
