"""Passes that an engine runs before the first text, where experts may be missing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from helpers.faults import events_on_cpu
from helpers.fetching_engines import check_sound
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.engine.drafters import first_widths
from moegraph.engine.warmup import time_verify
from moegraph.runner.layered import LayeredRunner

SETTINGS = {
    "legacy32": {"pin_layers": 0, "cache_slots": 8 * 12, "policy": "lfu"},
    "mini35b": {"pin_layers": 0, "cache_slots": 64, "policy": "lru"},
}


def experts(engine: Engine) -> dict[str, Any]:
    """Return which experts are where, and what was counted of them."""
    runner = engine.runner
    assert isinstance(runner, LayeredRunner) and runner.misses
    cache, residency = runner.cache, runner.residency
    found = {
        "owners": [layer.owner for layer in cache.layers],
        "policies": [vars(layer.policy) for layer in cache.layers],
        "stats": {name: np.asarray(value).tolist() for name, value in vars(cache.stats).items()},
        "choices": residency.routing.counts,
        "means": [vars(width) for width in residency._choice._widths],
        "sent": (runner.misses.uploads.n_bytes, runner.misses.n_cpu_experts),
    }
    return deepcopy(found)


@pytest.mark.parametrize(
    ("preset", "miss", "is_used"),
    [("legacy32", "stream", True), ("mini35b", "stream", False), ("legacy32", "cpu", False)],
)
def test_passes_before_the_first_text_leave_the_experts_as_they_were(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch,
    preset: str, miss: str, is_used: bool,
) -> None:  # fmt: skip
    settings = {**SETTINGS[preset], "miss": miss, "host_pin": "all", "n_draft": 15}
    with events_on_cpu():
        engine, other = (open_engine(preset, **settings) for _ in range(2))
        runner = engine.runner
        widths = first_widths(engine.config, runner)
        assert widths == [4, 8]
        if is_used:
            for one in (engine, other):
                one.forward(prompt(one, 40, seed=1))
                one.reset()
        before, n_built = experts(engine), runner.n_built
        times = time_verify(runner, widths, engine.threads.begin)
        assert times and times.built == (4, 8) and not times.plain and not times.verify
        assert runner.n_built > n_built
        assert experts(engine) == before
        check_sound(engine)
        for at, n in enumerate((20, 1, 4, 1)):  # and all goes on as if there had been none
            ids = prompt(engine, n, seed=10 + at)
            a, b = (one.forward(ids).require_logits() for one in (engine, other))
            np.testing.assert_array_equal(a, b)
        if not is_used:  # of equal scores, another may then be the lowest
            assert experts(engine)["owners"] == experts(other)["owners"]
        check_sound(engine)
        # passes that are not undone have the tokens' experts come
        monkeypatch.setattr(LayeredRunner, "rehearsing", lambda _: nullcontext())
        before = experts(engine)
        time_verify(runner, widths, engine.threads.begin)
        assert experts(engine)["owners"] != before["owners"] or miss == "cpu"
        assert experts(engine)["choices"] != before["choices"]
