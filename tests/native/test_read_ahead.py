"""Experts of a file that is not pinned are read by threads, before they are asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from helpers.faults import events_on_cpu
from helpers.interrupts import interrupted
from helpers.patience import PATIENCE_S
from helpers.shared import prompt

from moegraph.arch import ModelFile
from moegraph.engine import Engine
from moegraph.errors import Cancelled, ModelFileError
from moegraph.events import CancelToken
from moegraph.resident import store
from moegraph.resident.store import FileRing

Open = Callable[..., Engine]
SETTINGS = {"pin_layers": 0, "cache_slots": 40, "miss": "stream", "deterministic": True}


class SlowFile:
    """Every read of the model file takes a while, and the first ones until four are under way.

    n_now, most: reads under way, and the most at a time. n_asked, n_ahead: experts that were asked
    for, and those whose read had begun before.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.n_now = self.most = self.n_asked = self.n_ahead = self.n_reads = 0
        self.fails_at = 0
        are_four = threading.Event()
        lock, read, take = threading.Lock(), ModelFile.read, FileRing.take

        def slow_read(model: ModelFile, info: Any, out: np.ndarray, start: int = 0) -> None:
            with lock:
                self.n_now += 1
                self.n_reads += 1
                self.most = max(self.most, self.n_now)
                if self.most >= 4:
                    are_four.set()
                fails = self.n_reads == self.fails_at
            are_four.wait(PATIENCE_S)
            time.sleep(seconds)
            with lock:
                self.n_now -= 1
            if fails:
                raise ModelFileError("short read")
            read(model, info, out, start)

        def counted_take(ring: FileRing, il: int, expert: int) -> Any:
            self.n_asked += 1
            self.n_ahead += (il, expert) in ring._reads
            return take(ring, il, expert)

        monkeypatch.setattr(ModelFile, "read", slow_read)
        monkeypatch.setattr(FileRing, "take", counted_take)


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have many threads read experts, on any machine."""
    monkeypatch.setattr(store, "usable_cpus", lambda: 16)


@pytest.mark.parametrize("has_events", [False, True])
def test_a_prompt_reads_many_experts_at_once_and_before_they_are_asked_for(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, threaded: None, has_events: bool
) -> None:
    plain = open_engine(**SETTINGS)
    ids = prompt(plain, 200, seed=4)
    expected = plain.prefill(ids, all_rows=True).require_logits()
    with events_on_cpu() if has_events else nullcontext():
        check_prompt(open_engine(**SETTINGS), monkeypatch, ids, expected)


def check_prompt(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, ids: np.ndarray, expected: np.ndarray
) -> None:
    with monkeypatch.context() as patch:
        file = SlowFile(patch, 0.002)
        found = engine.prefill(ids, all_rows=True).require_logits()
    np.testing.assert_array_equal(found, expected)
    assert file.n_asked > 100 and file.most >= 4
    assert file.n_ahead > 0.9 * file.n_asked, "the prompt waited for reads"
    engine.stage.store.ring.forget()
    assert file.n_now == 0


def test_a_cancelled_or_failed_prompt_leaves_no_read_behind(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, threaded: None
) -> None:
    engine, plain = open_engine(**SETTINGS), open_engine(**SETTINGS)
    ids = prompt(engine, 150, seed=5)
    expected = plain.prefill(ids).require_logits()
    ring = engine.stage.store.ring
    with monkeypatch.context() as patch:
        file = SlowFile(patch, 0.001)
        for fails_at in (1, 2, 5, 17, 60, 120):
            file.n_reads, file.fails_at = 0, fails_at
            with pytest.raises(ModelFileError):
                engine.prefill(ids)
            assert file.n_now == 0 and not ring._reads and not ring._taken
            assert engine.held(0) == []
        cancel = CancelToken()
        file.fails_at = 0

        def progress(*_: object) -> None:
            cancel.set()

        with pytest.raises(Cancelled):
            engine.prefill(ids, cancel=cancel, progress=progress)
        assert file.n_now == 0 and not ring._reads
    np.testing.assert_array_equal(engine.prefill(ids).require_logits(), expected)


def test_an_interrupt_at_any_line_loses_no_block(open_engine: Open, threaded: None) -> None:
    engine, plain = open_engine(**SETTINGS), open_engine(**SETTINGS)
    ids = prompt(engine, 70, seed=6)
    expected = plain.prefill(ids).require_logits()
    ring, line, n_came = engine.stage.store.ring, 0, 0
    while interrupted(line, lambda: engine.prefill(ids), "resident/store.py"):
        n_came += 1
        line += 13 + line // 6
        engine.reset()
        np.testing.assert_array_equal(engine.prefill(ids).require_logits(), expected)
        engine.reset()
        engine.device.synchronize()
        assert len(ring._blocks) == len({id(block) for block in ring._blocks})
        assert ring._free(0) is not None
    assert n_came > 10
