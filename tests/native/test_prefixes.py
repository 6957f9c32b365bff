"""Beginnings of prompts that are not computed anew: the answer is that of a cold run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.faults import faulty
from helpers.interrupts import interrupted
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.errors import NativeError
from moegraph.events import CancelToken
from moegraph.ggml.free_memory import HostMemory
from moegraph.ggml.lib import C
from moegraph.passes import prefixes, prefixstore
from moegraph.resident import hostcopies

Open = Callable[..., Engine]
SLOTS = {"pin_layers": 0, "cache_slots": 48, "policy": "lru", "deterministic": True}
MODES: dict[str, dict[str, Any]] = {
    "whole": {"mode": "whole"},
    "stream": {**SLOTS, "miss": "stream"},
    "fetch": {**SLOTS, "miss": "stream", "host_pin": "all"},
}


@pytest.fixture(autouse=True)
def every_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short prompts have marks near each other."""
    monkeypatch.setattr(prefixes, "_WORTH", 1)


def answer(
    engine: Engine, ids: object, n: int = 6, reuse: bool = True, marks: Sequence[Any] = ()
) -> tuple[list[int], np.ndarray, int]:
    """Return tokens, logits of the first, and how many prompt tokens were not computed."""
    events = list(
        engine.generate(
            ids, max_tokens=n, text=False, ignore_eos=True, keep_logits=True, reuse=reuse,
            marks=marks,
        )
    )  # fmt: skip
    return [e.token for e in events], events[0].logits[-1], events[0].n_reused


def turns(engine: Engine, n: int = 4) -> list[tuple[np.ndarray, int]]:
    """Return prompts of a conversation that drops part of each answer, and a mark in each.

    Turn k begins with turn k-1 up to its mark, and goes on with other tokens than that.
    """
    found, before = [], prompt(engine, 30, seed=9)
    for turn in range(n):
        fresh = prompt(engine, 12 + 50 * (turn % 2), seed=turn)
        ids = np.concatenate([before, fresh, [7, 8, 9]]).astype(np.int32)
        mark = len(ids) - 2
        found.append((ids, mark))
        before = np.concatenate([ids[:mark], [10 + turn]]).astype(np.int32)
    return found


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_a_conversation_in_reference_mode_equals_cold_runs(
    open_engine: Open, settings: dict[str, Any]
) -> None:
    engine = open_engine(cpu_reference=True, **settings)
    other = open_engine(cpu_reference=True)
    last_mark = 0
    for ids, mark in turns(engine):
        tokens, logits, n_reused = answer(engine, ids, marks=(np.int64(30), mark))
        expected, cold, _ = answer(other, ids, reuse=False)
        assert (tokens, n_reused) == (expected, last_mark)
        np.testing.assert_array_equal(logits, cold)
        last_mark = mark


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_with_the_same_chunks_every_mode_equals_cold_runs(
    open_engine: Open, settings: dict[str, Any]
) -> None:
    """A resumed prompt is cut where the cold one is, so the same kernels compute the same rows."""
    engine = open_engine(**settings)
    (first, mark), (second, other_mark) = turns(engine, 2)
    answer(engine, first, marks=(mark,))
    tokens, logits, n_reused = answer(engine, second, marks=(mark, other_mark))
    assert n_reused == mark
    cold = open_engine(**settings)
    expected, cold_logits, n_reused = answer(cold, second, marks=(mark, other_mark))
    assert (tokens, n_reused) == (expected, 0)
    np.testing.assert_array_equal(logits, cold_logits)


def test_rows_come_back_to_no_other_sequences_pages(open_engine: Open) -> None:
    """The first position that comes back is in the middle of a page, before another's page."""
    engine, alone = open_engine(n_seq=3, n_ctx=1024), open_engine(n_ctx=1024)
    ids, others = prompt(engine, 700), prompt(engine, 200, seed=1)
    engine.prefill(ids[:600], 1)
    engine.prefixes.save(1)
    engine.reset(1)
    engine.prefill(ids[:100], 0)
    engine.prefill(others[:100], 2)
    assert engine.prefixes.resume(0, ids) == 600
    assert engine.state.pool.pages(0)[:2] == [0, 2] and engine.state.pool.pages(2) == [1]
    alone.prefill(others[:100])
    wanted = alone.forward(others[100:150]).logits
    np.testing.assert_array_equal(engine.forward(others[100:150], seq=2).logits, wanted)


def test_what_the_sequence_holds_is_continued_where_that_saves_more(open_engine: Open) -> None:
    engine = open_engine()
    ids = prompt(engine, 60)
    tokens = answer(engine, ids, marks=(20, 40))[0]
    longer = [*ids, *tokens, 5, 6]
    assert answer(engine, longer)[2] == 65  # the last token was never computed
    assert answer(engine, ids)[2] == 40
    assert answer(engine, ids[:40])[2] == 20  # one token at least is computed
    assert answer(engine, ids[:20])[2] == 0


def test_a_failed_or_cancelled_prompt_takes_nothing_away(open_engine: Open) -> None:
    engine, other = open_engine(cpu_reference=True), open_engine(cpu_reference=True)
    (first, mark), (second, _) = turns(engine, 2)
    expected = answer(other, second, reuse=False)
    answer(engine, first, marks=(mark,))
    cancel = CancelToken()
    cancel.set()
    (event,) = engine.generate(second, text=False, reuse=True, cancel=cancel)
    # what was reused stays, and nothing of the rest
    held = engine.held(0)
    assert event.finish_reason == "cancelled" and len(held) == event.n_reused > 0
    assert held == list(second[: len(held)])
    with faulty("mg_launch", 1, C.GGML_STATUS_FAILED), pytest.raises(NativeError):
        answer(engine, second)
    tokens, logits, n_reused = answer(engine, second)
    assert (tokens, n_reused) == (expected[0], mark)
    np.testing.assert_array_equal(logits, expected[1])


def test_the_limit_holds_and_the_latest_turns_stay(open_engine: Open) -> None:
    """Models are small here: the states of a sequence have less than 1 MiB."""
    engine = open_engine(cache_ram=1, n_ctx=512)
    states = engine.state.copies.states_bytes
    n_fit = (1 << 20) // (states + 100 * engine.state.copies.row_bytes)
    assert 1 <= n_fit < 10
    last_mark = 0
    for seed in range(12):
        ids = prompt(engine, 100, seed=seed)
        assert answer(engine, ids, n=1, marks=(90,))[2] == last_mark
        assert engine.prefixes.store.n_bytes <= 1 << 20
    assert n_fit <= engine.prefixes.store.tree.n_states < 12
    assert answer(engine, ids, n=1)[2] == 90
    engine.reset()
    assert answer(engine, prompt(engine, 100, seed=0), n=1)[2] == 0


def test_no_limit_and_no_memory(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited, off = open_engine(cache_ram=-1), open_engine(cache_ram=0)
    ids = prompt(off, 60)
    for engine, n_reused in ((unlimited, 40), (off, 0)):
        answer(engine, ids, marks=(40,))
        assert answer(engine, [*ids[:50], 1])[2] == n_reused
        tokens, _, _ = answer(engine, ids)
        assert answer(engine, [*ids, *tokens, 5])[2] == 65
    assert off.runner.graphs.n_built <= unlimited.runner.graphs.n_built
    monkeypatch.setattr(prefixstore, "_FRESH_S", 0.0)
    monkeypatch.setattr(prefixstore, "host_memory", lambda: HostMemory(8 << 30, 1 << 29, None))
    answer(unlimited, prompt(off, 60, seed=1), marks=(40,))
    assert unlimited.prefixes.store.n_bytes == 0


def test_memory_that_cannot_be_had_costs_only_the_reuse(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    ids = prompt(engine, 60)
    expected, kept = answer(engine, ids, reuse=False)[0], []
    for at in range(4):  # of two copies of states, and two of rows
        engine.prefixes.store.clear()
        calls, empty = count(), np.empty

        def refuse(shape: Any, dtype: Any) -> np.ndarray:
            return empty(1 << 62 if next(calls) == at else shape, dtype)

        with monkeypatch.context() as patch:
            patch.setattr(hostcopies, "np", SimpleNamespace(**{**vars(np), "empty": refuse}))
            assert answer(engine, ids, marks=(20, 40))[0] == expected
        kept.append(engine.prefixes.store.n_places)
    assert min(kept) < 2 and max(kept) == 2


def test_an_interrupt_at_any_line_loses_no_memory_and_no_bits(open_engine: Open) -> None:
    engine, other = open_engine(cpu_reference=True), open_engine(cpu_reference=True)
    (one, mark), (two, _) = turns(engine, 2)
    expected = answer(other, two, reuse=False)[0]
    line, n_came = 0, 0

    def both() -> None:
        answer(engine, one, n=1, marks=(40, mark))
        answer(engine, two, n=1, marks=(45,))

    ours = (
        "passes/prefixes.py", "passes/prefixtree.py", "passes/passes.py", "resident/hostcopies.py",
        "resident/state.py", "resident/tohost.py",
    )  # fmt: skip
    while interrupted(line, both, *ours):
        n_came += 1
        line += 11 + line // 6
        for copy in [
            c for n in engine.prefixes.store.tree.nodes() for c in (n.rows, n.states) if c
        ]:
            assert copy.n_bytes > 0
        assert answer(engine, two)[0] == expected, f"line {line}"
        engine.prefixes.store.clear()
        engine.reset()
    assert n_came > 15
