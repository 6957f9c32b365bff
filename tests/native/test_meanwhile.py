"""What the host does while the device computes: when it is done, and what follows from errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.kinds import Kind

Open = Callable[..., Engine]
SOME = {"pin_layers": 0, "cache_slots": 8 * 12, "cpu_reference": True}


def late(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the device seem to compute later than it does: no ids are there when the host looks."""
    device = engine.runner.device
    monkeypatch.setattr(device, "can", replace(device.can, streams=True))
    monkeypatch.setattr(engine.runner._readback, "has", lambda host_ids: False)


def submitted(engine: Engine, meanwhile: Callable[[], object], is_verify: bool = False) -> Any:
    row = np.array([[7]], dtype=np.int32)
    if is_verify:
        return engine.passes.verify(row, 0, meanwhile=meanwhile)
    return engine.passes.submit(row, 0, False, True, None, Kind.DECODE, None, meanwhile)


@pytest.mark.parametrize("is_verify", [False, True])
def test_work_is_done_when_the_host_first_waits(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, is_verify: bool
) -> None:
    engine, seen, waits = open_engine("legacy32", **SOME), list[int](), list[Any]()
    engine.forward_logits(prompt(engine, 5), 0)
    wait = engine.runner._readback.wait
    monkeypatch.setattr(engine.runner._readback, "wait", lambda ids: waits.append(wait(ids)))
    late(engine, monkeypatch)
    submitted(engine, lambda: seen.append(len(waits)), is_verify)
    engine.passes.collect()
    assert seen == [0] and len(waits) == engine.hparams.n_layer


def test_an_error_in_between_ends_the_pass_and_nothing_else(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine("legacy32", **SOME)
    expected = engine.forward_logits(prompt(engine, 6), 0)
    engine.passes.reset(0)
    engine.forward_logits(prompt(engine, 6)[:5], 0)
    late(engine, monkeypatch)

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        submitted(engine, fail)
    engine.passes.require_resting(0)
    assert engine.held(0) == []  # some layers may have advanced
    monkeypatch.undo()
    np.testing.assert_array_equal(engine.forward_logits(prompt(engine, 6), 0), expected)
