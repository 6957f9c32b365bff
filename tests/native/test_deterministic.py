"""--deterministic: no clock decides who computes what, so two runs do the same."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import numpy as np
import pytest
from helpers.fetching_engines import N_LAYER, PRESET, fetch_layers, run
from helpers.shared import greedy_tokens, prompt

from moegraph.engine import Engine
from moegraph.runner.cpu_experts import CpuExperts
from moegraph.runner.misses import Uploader

SLOTS = {"pin_layers": 0, "cache_slots": N_LAYER * 6}
PLACES = {
    "pinned": {**SLOTS, "host_pin": "all"},
    "not pinned": {**SLOTS, "host_pin": "none"},
    "cpu": {**SLOTS, "miss": "cpu"},
    "few slots": {"pin_layers": 0, "cache_slots": N_LAYER * 2},
}
CLOCKS = [(Uploader, "seconds"), (CpuExperts, "measure")]


def asked(*_: object) -> Any:
    raise AssertionError("a clock was asked")


def work(engine: Engine) -> list[int]:
    """Run a prompt, decode, and run another prompt."""
    tokens = greedy_tokens(engine, prompt(engine, 40, seed=1), 136)
    return tokens + greedy_tokens(engine, prompt(engine, 9, seed=2), 20)


@pytest.mark.parametrize("place", PLACES)
def test_no_clock_is_asked(open_engine, monkeypatch, place: str) -> None:
    expected = work(open_engine(PRESET))
    for owner, name in CLOCKS:
        monkeypatch.setattr(owner, name, asked)
    engine = open_engine(PRESET, **PLACES[place], deterministic=True)
    assert work(engine) == expected
    stats = engine.expert_stats()
    assert stats.cache.missing.sum() > 100
    assert (stats.n_cpu_experts > 0) == (place == "cpu")
    assert len(fetch_layers(engine)) == (N_LAYER if place == "pinned" else 0)


@pytest.mark.parametrize(("owner", "name"), CLOCKS)
def test_the_clocks_are_asked_by_default(open_engine, monkeypatch, owner: Any, name: str) -> None:
    """What the test above watches is where the clocks are."""
    monkeypatch.setattr(owner, name, asked)
    with pytest.raises(AssertionError, match="a clock was asked"):
        work(open_engine(PRESET, **SLOTS))


@pytest.mark.parametrize("place", PLACES)
def test_a_clock_gone_wild_changes_nothing(open_engine, monkeypatch, place: str) -> None:
    found = []
    for seed in (1, 2):
        rng = random.Random(seed)
        steps = itertools.accumulate(iter(lambda: 10 ** rng.uniform(-7, 0), None))
        with monkeypatch.context() as patch:
            patch.setattr(time, "perf_counter", lambda steps=steps: next(steps))
            engine = open_engine(PRESET, **PLACES[place], deterministic=True)
            tokens, logits = work(engine), run(engine)
        stats, cache = engine.expert_stats(), engine.runner.cache
        counted = (stats.n_bytes_to_device, stats.n_cpu_experts, tokens)
        found.append((counted, logits, cache.tables.copy(), stats.cache.missing))
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1:], found[1][1:]):
        np.testing.assert_array_equal(one, other)
