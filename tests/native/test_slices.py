"""Slices of a prompt between the passes of other requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.clients import Client, serving
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.service.costs import Costs
from moegraph.service.reading import Reading


@pytest.mark.parametrize(
    "settings", [{}, {"pin_layers": 0, "cache_slots": 48, "miss": "stream"}], ids=["all", "few"]
)
def test_a_step_that_builds_graphs_is_the_last_of_its_slice(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Otherwise a prompt of a new length stops all others for as long as tens of builds take."""
    engine = open_engine(n_seq=2, n_ctx=1024, n_ubatch=64, **settings)
    slices: list[list[bool]] = []
    read, step = Reading.read, Reading._step

    def noted_read(self: Reading, seconds: float) -> float | None:
        slices.append([])
        return read(self, 10.0)  # so that nothing else ends it

    def noted_step(self: Reading, *given: Any) -> bool:
        before = self._tally.n_built
        more = step(self, *given)
        slices[-1].append(self._tally.n_built > before)
        return more

    monkeypatch.setattr(Reading, "read", noted_read)
    monkeypatch.setattr(Reading, "_step", noted_step)
    monkeypatch.setattr(Costs, "step_s", property(lambda self: 1e-6 if self.upcoming else None))
    with serving(engine) as service:
        Client(service, prompt(engine, 700, seed=1), max_tokens=2).wait()
    assert any(any(one) for one in slices)
    assert not any(any(one[:-1]) for one in slices)
    assert max(map(len, slices)) > 1  # others go on
