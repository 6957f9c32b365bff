"""Ctrl-C again and again: the clean-up of a pass that failed may be interrupted itself.

Whatever it left undone is made good before the next pass: that one computes what a fresh engine
does, with a sound cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers.fetching_engines import FETCHING, N_LAYER, PRESET, Countdown, check_sound, run
from helpers.interrupts import Interrupt, interrupted
from helpers.shared import greedy_tokens, prompt

from moegraph.engine import Engine
from moegraph.errors import Cancelled
from moegraph.ggml.lib import C
from moegraph.runner import layer_graphs

SLOTS = {"pin_layers": 0, "cache_slots": N_LAYER * 6, "policy": "lru"}
WAYS = {
    "fetching": FETCHING,
    "streaming": {**SLOTS, "miss": "stream", "host_pin": "none"},
    "cpu": {**SLOTS, "miss": "cpu"},
}
OURS = (
    "moegraph/runner", "moegraph/experts", "moegraph/resident/bank.py",
    "moegraph/resident/store.py", "moegraph/passes/passes.py",
)  # fmt: skip
WIDTHS = [1, 8, 1, 3, 1]


@pytest.fixture(params=WAYS)
def engine(request, open_engine, monkeypatch) -> Engine:
    """Return an engine that launches every layer by itself, so that a pass has many ends."""
    for name in ("MERGED", "MERGED_LATER"):
        monkeypatch.setattr(layer_graphs, name, 1)
    engine = open_engine(PRESET, **WAYS[request.param])
    return engine


@pytest.fixture
def expected(open_engine) -> npt.NDArray[np.float32]:
    """Return the logits of `run` where everything is on the device."""
    return run(open_engine(PRESET), WIDTHS)


def interrupt_once(monkeypatch: pytest.MonkeyPatch, target: Any, name: str) -> list[None]:
    """Have a method end in KeyboardInterrupt the next time; return a list that it then fills."""
    real, came = getattr(target, name), []

    def once(*args: Any) -> None:
        real(*args)
        if not came:
            came.append(None)
            raise KeyboardInterrupt

    monkeypatch.setattr(target, name, once)
    return came


@pytest.mark.parametrize("n_rows", [4])
def test_an_interrupt_while_the_clean_up_waits_for_the_device(
    engine, expected, monkeypatch, n_rows: int
) -> None:
    for at in range(2, N_LAYER + 1):
        run(engine, [1, 8, 1, 1])
        with monkeypatch.context() as patch:
            came = interrupt_once(patch, engine.device, "synchronize")
            with pytest.raises(KeyboardInterrupt):
                engine.forward(np.arange(n_rows, dtype=np.int32), cancel=Countdown(at))
        assert came
        np.testing.assert_array_equal(run(engine, WIDTHS), expected, err_msg=f"graph {at}")
        check_sound(engine)
        assert (engine.runner._readback._ids == C.MG_NO_ID).all()


def test_a_generation_that_is_interrupted_twice_and_the_next_one(engine, open_engine) -> None:
    ids = prompt(engine, 40, seed=2)
    expected = greedy_tokens(open_engine(PRESET), ids, 20)
    for line in range(0, 400, 37):
        stream = engine.generate(prompt(engine, 30), text=False)
        next(stream)
        ended = interrupted(line, lambda: [next(stream) for _ in range(3)], *OURS)
        assert ended and interrupted(0, lambda: greedy_tokens(engine, ids, 1), *OURS)
        assert greedy_tokens(engine, ids, 20) == expected, f"line {line}"
        check_sound(engine)


class CancelAndInterrupt(Countdown):
    """A cancel token that is set from the k-th look on; an interrupt counts lines from there."""

    def __init__(self, n: int, interrupt: Interrupt) -> None:
        super().__init__(n)
        self._interrupt = interrupt

    def is_set(self) -> bool:
        is_set = super().is_set()
        if is_set:
            self._interrupt.begin()
        return is_set


@pytest.mark.parametrize("at", [5])
def test_an_interrupt_before_every_line_of_the_clean_up(engine, expected, at: int) -> None:
    for line in range(2000):
        # every line of the first forty, then in growing steps: the same lines for other layers
        line = line if line < 40 else int(40 * 1.1 ** (line - 40))
        run(engine, [1, 8, 1, 1])
        interrupt = Interrupt(line, *OURS)
        try:
            with pytest.raises((KeyboardInterrupt, Cancelled)):
                engine.forward([at], cancel=CancelAndInterrupt(at, interrupt))
        finally:
            interrupt.end()
        if not interrupt.came:
            assert line > 30
            break
        if line % 7 == 0:
            np.testing.assert_array_equal(run(engine, WIDTHS), expected, err_msg=f"line {line}")
        else:
            engine.forward([1])
            assert engine.held(0) == [1], "the sequence was not empty"
        check_sound(engine)
    else:
        raise AssertionError("it did not come to an end")
    np.testing.assert_array_equal(run(engine, WIDTHS), expected)


@pytest.mark.parametrize("n_rows", [1, 20])
def test_an_interrupt_before_any_line_of_a_pass(engine, expected, n_rows: int) -> None:
    line, step = 0, 0
    while True:
        run(engine, [1, 8, 1, 1])
        if not interrupted(line, lambda: engine.forward(range(n_rows)), *OURS):
            assert line > 200
            break
        np.testing.assert_array_equal(run(engine, WIDTHS), expected, err_msg=f"line {line}")
        check_sound(engine)
        step += 2
        line += 1 + step
    np.testing.assert_array_equal(run(engine, WIDTHS), expected)
