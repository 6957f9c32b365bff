"""Groups of sequences in several stages at once: the same bits, and nothing of one is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.faults import faulty
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.engine.grouppasses import GroupPasses
from moegraph.errors import NativeError, RequestError
from moegraph.ggml.lib import C
from moegraph.kinds import Kind

Open = Callable[..., Engine]
TWO, THREE = "cpu,cpu", "cpu,cpu,cpu"
SLOTS = {"pin_layers": 0, "cache_slots": 48, "policy": "lru"}
MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "stream": {**SLOTS, "miss": "stream"},
    "cpu": {**SLOTS, "miss": "cpu"},
    "fetch": {**SLOTS, "miss": "stream", "host_pin": "all"},
}
N_SEQ = 7


def begun(engine: Engine, n_seq: int = N_SEQ) -> np.ndarray:
    """Give each sequence a text of its own; return their next tokens, [n_seq]."""
    rows = np.zeros(n_seq, np.int32)
    for seq in range(n_seq):
        ids = prompt(engine, 5 + 7 * seq, seed=seq)
        rows[seq] = engine.prefill(ids, seq).require_logits()[-1].argmax()
    return rows


def singly(engine: Engine, rows: np.ndarray, n: int) -> np.ndarray:
    """Return the logits of n passes over all sequences, [n, n_seq, n_vocab]."""
    found = []
    for _ in range(n):
        engine.passes.submit(rows[:, None], range(len(rows)), False, False, None, Kind.DECODE)
        found.append(engine.passes.collect().require_logits())
        rows = found[-1].argmax(1).astype(np.int32)
    return np.array(found)


class Groups:
    """Decodes groups in turn; found: the logits of each sequence, in order."""

    def __init__(self, engine: Engine, rows: np.ndarray, sizes: list[int]) -> None:
        assert isinstance(engine.passes, GroupPasses)
        self.passes, self.rows = engine.passes, rows
        ends = np.cumsum(sizes)
        self.waiting = deque(
            list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)
        )
        self.flying: deque[list[int]] = deque()
        self.found: list[list[np.ndarray]] = [[] for _ in rows]

    def submit(self) -> None:
        slots = self.waiting.popleft()
        self.passes.submit_group(self.rows[slots][:, None], slots, False, None)
        self.flying.append(slots)

    def collect(self) -> None:
        slots = self.flying.popleft()
        logits = self.passes.collect_group().require_logits()
        for row, slot in enumerate(slots):
            self.found[slot].append(logits[row])
            self.rows[slot] = logits[row].argmax()
        self.waiting.append(slots)

    def run(self, n: int) -> None:
        """Run so many passes of each group, with as many in flight as may be."""
        for _ in range(n * len(self.waiting)):
            while len(self.flying) == self.passes.most or not self.waiting:
                self.collect()
            self.submit()
        while self.flying:
            self.collect()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("preset", "device", "sizes"),
    [("legacy32", TWO, [4, 3]), ("mini35b", THREE, [3, 2, 2]), ("legacy32", THREE, [6, 1])],
)
def test_rows_have_the_bits_of_one_group(
    open_engine: Open, preset: str, device: str, sizes: list[int], mode: str
) -> None:
    settings = {"n_seq": N_SEQ, "deterministic": True, **MODES[mode]}
    one, cut = (open_engine(preset, device=d, **settings) for d in ("cpu", device))
    wanted = singly(one, begun(one), 9)
    groups = Groups(cut, begun(cut), sizes)
    groups.run(5)
    singles = singly(cut, groups.rows, 1)  # one group, and groups again
    groups.rows = singles[0].argmax(1).astype(np.int32)
    groups.run(3)
    found = np.array(groups.found).transpose(1, 0, 2)
    np.testing.assert_array_equal(found[:5], wanted[:5])
    np.testing.assert_array_equal(singles[0], wanted[5])
    np.testing.assert_array_equal(found[5:], wanted[6:])
    counts = cut.passes.flights.counts
    assert counts.passes == 8 * len(sizes)
    assert 0.0 <= counts.bubbles < 1.0 and all(busy > 0.0 for busy in counts.busy_s)


@pytest.mark.parametrize("mode", ["whole", "stream", "fetch"])
@pytest.mark.parametrize("n_calls", [1, 2, 4, 7, 11])
def test_a_fault_in_one_group_does_not_lose_the_other(
    open_engine: Open, mode: str, n_calls: int
) -> None:
    """A launch fails, in any stage; only the sequences of that pass are emptied."""
    settings = {"n_seq": 4, "deterministic": True, "device": TWO, **MODES[mode]}
    cut, whole = open_engine(**settings), open_engine(**settings)
    rows = begun(cut, 4)
    wanted = singly(whole, begun(whole, 4), 4)
    groups = Groups(cut, rows, [2, 2])
    groups.run(1)
    lost: list[int] = []
    with faulty("mg_launch", n_calls, C.GGML_STATUS_FAILED):
        for _ in range(3):
            for step in (groups.submit, groups.submit, groups.collect, groups.collect):
                before = list(groups.flying[0]) if groups.flying else []
                slots = list(groups.waiting[0]) if groups.waiting else []
                try:
                    if step == groups.submit and not groups.waiting:
                        continue
                    if step == groups.collect and not groups.flying:
                        continue
                    step()
                except NativeError:
                    lost += before if step == groups.collect else slots
    kept = [seq for seq in range(4) if seq not in lost]
    assert sorted(lost) in ([0, 1], [2, 3])
    for seq in range(4):
        n_held = len(cut.held(seq))
        assert n_held == (0 if seq in lost else 5 + 7 * seq + 4), seq
    for seq in kept:
        np.testing.assert_array_equal(np.array(groups.found[seq]), wanted[:, seq])
    # the engine goes on, with all sequences
    for seq in lost:
        cut.reset(seq)
    again = begun(open_engine(**settings), 4)
    for seq in range(4):
        cut.reset(seq)
    np.testing.assert_array_equal(begun(cut, 4), again)


def test_a_group_that_is_reset_in_flight_changes_no_other(open_engine: Open) -> None:
    settings = {"n_seq": 4, "deterministic": True, "device": TWO}
    cut, whole = open_engine(**settings), open_engine(**settings)
    wanted = singly(whole, begun(whole, 4), 2)
    groups = Groups(cut, begun(cut, 4), [2, 2])
    groups.submit()
    groups.submit()
    cut.reset(1)
    assert cut.held(1) == [] and cut.state.n_past[1] == 0
    groups.collect()
    groups.collect()
    for seq in (0, 2, 3):
        np.testing.assert_array_equal(groups.found[seq][0], wanted[0, seq])
    assert cut.held(1) == [] and cut.state.n_past[1] == 0


def test_logits_of_a_group_stay_until_the_next_call(open_engine: Open) -> None:
    cut = open_engine(n_seq=4, device=TWO, deterministic=True)
    passes, rows = cut.passes, begun(cut, 4)
    assert isinstance(passes, GroupPasses)
    for slots in ([0, 1], [2, 3]):
        passes.submit_group(rows[slots][:, None], slots, True, None, keeps_logits=True)
    found = passes.collect_group()
    assert found.argmax is not None
    for row in range(2):
        assert passes.logits(row).argmax() == found.argmax[row]
    assert passes.collect_group().argmax is not None


def test_nothing_else_runs_while_groups_are_in_flight(open_engine: Open) -> None:
    cut = open_engine(n_seq=4, device=TWO)
    passes, rows = cut.passes, begun(cut, 4)
    assert isinstance(passes, GroupPasses)
    with pytest.raises(RequestError, match="no group is in flight"):
        passes.collect_group()
    passes.submit_group(rows[:2, None], [0, 1], True, None)
    with pytest.raises(RequestError, match="in flight"):
        passes.submit(rows[2:, None], [2, 3], False, True, None)
    with pytest.raises(RequestError, match="has a row in flight"):
        passes.submit_group(rows[1:, None], [1, 2, 3], True, None)
    passes.submit_group(rows[2:3, None], [2], True, None)
    with pytest.raises(RequestError, match="collect the oldest"):
        passes.submit_group(rows[3:, None], [3], True, None)
    passes.give_up_groups()
    assert [len(cut.held(seq)) for seq in range(4)] == [0, 0, 0, 26]
    assert begun(cut, 3)[0] == rows[0]
