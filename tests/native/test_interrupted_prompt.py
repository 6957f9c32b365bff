"""Ctrl-C where a prompt begins and ends: the sequence then has all of it or nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.interrupts import Interrupt, interrupted
from helpers.shared import prompt

from moegraph.engine import Engine

OURS = "runner/sweep.py", "runner/sweep_batch.py"


@pytest.mark.parametrize("device", ["cpu", "cpu,cpu"])
def test_an_interrupt_before_the_first_lines_and_the_last_ones(
    open_engine: Callable[..., Engine], device: str
) -> None:
    engine, alone = (open_engine(cpu_reference=True, device=name) for name in (device, "cpu"))
    ids = prompt(engine, 90)
    alone.forward(ids[:1])
    wanted = alone.prefill(ids[1:60]).logits, alone.forward(ids[60:61]).logits
    n_lines = count(lambda: engine.prefill(ids[:60]))
    step = 1 if device == "cpu" else 3
    for line in (*range(0, 60, step), *range(n_lines - 60, n_lines + 40, step)):
        engine.reset()
        engine.forward(ids[:1])
        interrupted(line, lambda: engine.prefill(ids[1:60]), *OURS)
        n_held = len(engine.held(0))
        assert engine.held(0) == ids[:n_held].tolist() and n_held in (1, 60), f"line {line}"
        if n_held == 1:
            np.testing.assert_array_equal(engine.prefill(ids[1:60]).logits, wanted[0])
        np.testing.assert_array_equal(engine.forward(ids[60:61]).logits, wanted[1])


def count(call: Callable[[], object]) -> int:
    """Return how many of our lines a call runs."""
    counting = Interrupt(1 << 40, *OURS)
    counting.begin()
    call()
    counting.end()
    return counting.n_lines
