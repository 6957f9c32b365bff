"""Graphs that a service builds while it has nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.clients import Client, serving
from helpers.patience import until
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.loop.building import Building
from moegraph.runner.sweep_batch import SweepBatch

Open = Callable[..., Engine]
PLACEMENTS: list[dict[str, Any]] = [
    {"mode": "whole"},
    {"mode": "layered"},
    {"cache_slots": 60, "pin_layers": 0, "miss": "stream", "host_pin": "all"},
    {"device": "cpu,cpu"},
]


def opened(open_engine: Open, **placement: Any) -> Engine:
    """Open an engine of four sequences whose passes are padded, as those of a GPU are."""
    engine = open_engine("mini35b", n_seq=4, n_ctx=1024, n_ubatch=512, **placement)
    for part in engine.runner.parts:
        part.shapes.widths = (2, 4, 6)
    return engine


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_what_was_built_is_what_passes_and_chunks_need(
    open_engine: Open, placement: dict[str, Any]
) -> None:
    engine = opened(open_engine, **placement)
    work, runner = Building(engine.runner, 4), engine.runner
    n_steps, before = 0, runner.n_built
    while not work.is_done:
        work.step()
        n_steps += 1
    assert before < runner.n_built and n_steps > 20
    graphs = [set(part.graphs._graphs) for part in runner.parts]
    batches = [SweepBatch(prompt(engine, 120, seed=i), i, is_rounded=True) for i in range(4)]
    sweep = engine.passes.begin_prompts(batches)
    while engine.passes.step_prompt(sweep):
        pass
    long = SweepBatch(prompt(engine, 1000), 0, max_rows=512, is_rounded=True)
    engine.passes.reset(0)
    sweep = engine.passes.begin_prompts([long])
    while engine.passes.step_prompt(sweep):
        pass
    for n in (2, 3, 4):
        engine.forward(np.ones((n, 1), np.int32), list(range(n)), greedy=True)
    new = [key for part, old in zip(runner.parts, graphs) for key in set(part.graphs._graphs) - old]
    # how many rows chose missing experts is not known before; sums of a chunk are the CPU's
    others = {"sweep unit", "sweep inputs", "sweep head", "head", "sum_rows"}
    assert {" ".join(key[:2]) if key[0] == "sweep" else key[0] for key in new} <= others


def test_a_service_builds_while_it_rests_and_gives_way_to_requests(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(open_engine)
    steps, step = list[float](), Building.step
    monkeypatch.setattr(
        Building, "step", lambda self: (steps.append(time.perf_counter()), step(self))
    )
    with serving(engine) as service:
        service._building = Building(engine.runner, 4)
        assert Client(service, [1, 2], max_tokens=3).wait().reason == "length"
        client = Client(service, [1, 2], max_tokens=30).wait()
        assert client.reason == "length"
        assert service.drain(60.0)
        until(lambda: service._building.is_done)
        n = len(steps)
        time.sleep(0.05)
        assert n == len(steps) > 20 and service.failure is None
