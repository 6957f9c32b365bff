"""Experts that a prompt sends to the device anyway, and that get slots there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.fetching_engines import check_sound
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.errors import Cancelled
from moegraph.events import CancelToken
from moegraph.runner.sweep_batch import SweepBatch

Open = Callable[..., Engine]
PRESET = "mini35b"


def open_partial(open_engine: Open, **more: Any) -> Engine:
    settings = {"cache_slots": 60, "pin_layers": 0, "miss": "stream", "host_pin": "all"}
    engine = open_engine(PRESET, **settings | more)
    return engine


def sent(engine: Engine) -> int:
    return int(engine.runner.misses.stats({}).n_bytes_to_device)


def most_chosen(engine: Engine, found: dict[int, Any]) -> list[tuple[int, int]]:
    """Return (layer, expert) of the experts that a prompt chose most: half as many as slots."""
    pairs = []
    for il, ids in found.items():
        counts = np.bincount(ids, minlength=engine.hparams.n_expert)
        n = engine.runner.cache.n_slots[il] // 2
        pairs += [(il, int(expert)) for expert in np.argsort(-counts, kind="stable")[:n]]
    return pairs


@pytest.mark.parametrize(
    ("host_pin", "policy", "n"),
    [("none", "lfu", 300), ("all", "lfu", 40), ("all", "lru", 300)],
)
def test_what_a_prompt_used_most_has_slots_and_is_not_sent_again(
    open_engine: Open, host_pin: str, policy: str, n: int
) -> None:
    plain = open_engine(PRESET)
    engine = open_partial(open_engine, host_pin=host_pin, policy=policy)
    cache, residency, found = engine.runner.cache, engine.runner.residency, dict[int, Any]()
    ids = prompt(engine, n + 5, seed=6)
    engine.runner.observers.append(lambda il, chosen: found.update({il: chosen.copy()}))
    for one in (plain, engine):
        one.prefill(ids[:n], greedy=True)
    engine.runner.observers.clear()
    assert residency.n_kept > 0
    check_sound(engine)
    if policy == "lfu":
        best = most_chosen(engine, found)
        assert np.mean([cache.tables[pair] >= 0 for pair in best]) > 0.95
    before, missing = sent(engine), cache.stats.missing
    for token in ids[n:]:
        wanted = plain.forward([token]).require_logits()
        np.testing.assert_array_equal(engine.forward([token]).require_logits(), wanted)
        check_sound(engine)
    sizes = np.array([engine.runner.misses.store.packing(il).n_bytes for il in found])
    assert sent(engine) - before == (sizes * (cache.stats.missing - missing)).sum()


def test_a_prompt_beside_others_keeps_nothing(open_engine: Open) -> None:
    """What it prefers is not what they choose."""
    engine = open_partial(open_engine, n_seq=3)
    ids, residency = prompt(engine, 300, seed=7), engine.runner.residency
    engine.prefill(ids[:50], greedy=True)
    n_kept = residency.n_kept
    sweep = engine.passes.begin_prompts([SweepBatch(ids[50:], 1)])
    assert engine.passes.step_prompt(sweep)
    engine.forward(ids[:1])
    while engine.passes.step_prompt(sweep):
        check_sound(engine)
    sweep = engine.passes.begin_prompts([SweepBatch(ids[:80], 1), SweepBatch(ids[:90], 2)])
    while engine.passes.step_prompt(sweep):
        pass
    assert residency.n_kept == n_kept > 0


@pytest.mark.parametrize("is_followed", [False, True])
def test_a_prompt_that_is_cancelled_leaves_slots_that_hold_what_they_say(
    open_engine: Open, is_followed: bool
) -> None:
    """At every step; followed: another sequence has decoded before."""
    plain, engine = open_engine(PRESET, n_seq=2), open_partial(open_engine, n_seq=2)
    ids, n_steps, at = prompt(engine, 120, seed=8), 1, 0
    while at < n_steps:
        at += 1
        sweep = engine.passes.begin_prompts([SweepBatch(ids, 1)])
        n_steps = sweep.n_steps
        for _ in range(at):
            assert engine.passes.step_prompt(sweep)
        if is_followed:
            engine.forward(ids[:1])
        token = CancelToken()
        token.set()
        with pytest.raises(Cancelled):
            engine.passes.step_prompt(sweep, token)
        check_sound(engine)
    assert engine.runner.residency.n_kept > 0
    for one in (plain, engine):
        one.reset(0)
        one.prefill(ids, seq=0, greedy=True)
    found = [one.forward(ids[:1]).require_logits() for one in (plain, engine)]
    np.testing.assert_array_equal(*found)
