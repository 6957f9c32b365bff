"""Slices of a prompt between the passes of other requests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from helpers.clients import Client, alone, serving
from helpers.patience import PATIENCE_S, until
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.loop.costs import Costs
from moegraph.loop.reading import Reading
from moegraph.runner.sweep import Sweep


@pytest.mark.parametrize(
    "settings", [{}, {"pin_layers": 0, "cache_slots": 48, "miss": "stream"}], ids=["all", "few"]
)
def test_a_step_that_builds_graphs_is_the_last_of_its_slice(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Otherwise a prompt of a new length stops all others for as long as tens of builds take."""
    engine = open_engine(n_seq=2, n_ctx=1024, n_ubatch=64, **settings)
    slices: list[list[bool]] = []
    known: list[bool] = []
    read, step = Reading.read, Reading._step

    def noted_read(self: Reading, seconds: float) -> float | None:
        slices.append([])
        took_s = read(self, 10.0)  # so that nothing else ends it
        known.append(took_s is not None)
        return took_s

    def noted_step(self: Reading, *given: Any) -> bool:
        before = self._runner.n_built
        more = step(self, *given)
        slices[-1].append(self._runner.n_built > before)
        return more

    monkeypatch.setattr(Reading, "read", noted_read)
    monkeypatch.setattr(Reading, "_step", noted_step)
    monkeypatch.setattr(Costs, "step_s", property(lambda self: 1e-6 if self.upcoming else None))
    with serving(engine) as service:
        for seed in (1, 2):  # the second one finds all graphs
            Client(service, prompt(engine, 700, seed=seed), max_tokens=2).wait()
    assert any(any(one) for one in slices)
    assert not any(any(one[:-1]) for one in slices)
    assert max(map(len, slices)) > 1  # others go on
    # and the scheduler does not go on at once with what it took to be left
    assert not any(is_known and one[-1] for is_known, one in zip(known, slices))
    assert any(known)


def test_an_answer_does_not_depend_on_the_chunks_of_its_prompt(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"n_ctx": 1024, "n_ubatch": 256, "cpu_reference": True}
    engine, single = open_engine(n_seq=3, n_kv=-1, **settings), open_engine(**settings)
    found = list[int]()

    def chunk_rows(self: Costs, most: int, *given: Any) -> int:
        return 24

    def noted(self: Reading, sweep: Sweep, *given: Any) -> bool:
        if sweep.upcoming and sweep.upcoming.kind != "head":
            found.append(sweep.upcoming.n_rows)
        return step(self, sweep, *given)

    step, go_on = Reading._step, threading.Event()
    monkeypatch.setattr(Reading, "_step", noted)
    with serving(engine) as service:
        first = Client(
            service,
            prompt(engine, 100),
            max_tokens=900,
            on_step=lambda step: step.tokens and go_on.wait(PATIENCE_S),
        )
        until(lambda: first.tokens)
        found.clear()
        monkeypatch.setattr(Costs, "chunk_rows", chunk_rows)
        second = Client(service, prompt(engine, 400, seed=1), max_tokens=9)
        go_on.set()
        second.wait()
        first.ticket.cancel()
    assert 24 in found
    assert second.tokens == alone(single, second.request)[0]
