"""A run and the simulator drive the same coordinator: step by step, the same experts move."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.fetching_engines import N_LAYER, N_USED, PRESET
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.experts.cache import ExpertCache
from moegraph.experts.cost import MissSplit, MissWays
from moegraph.experts.machines import MACHINES
from moegraph.experts.policy import POLICIES
from moegraph.experts.residency import Residency
from moegraph.kinds import MAX_FETCH_ROWS
from moegraph.placement.simulate import _Replay

N_TOKENS = 60
SECONDS = [float(n) for n in range(N_USED + 1)]
WAYS = {
    "uploaded": ({"miss": "stream", "host_pin": "none"}, MissSplit.fixed(N_USED, False)),
    "fetched": ({"miss": "stream", "host_pin": "all"}, MissSplit.fixed(N_USED, False)),
    "cpu": ({"miss": "cpu"}, MissSplit.fixed(N_USED, True)),
    "shared": ({"miss": "cpu"}, MissSplit(SECONDS, SECONDS)),
}


def state(cache: ExpertCache) -> dict[str, Any]:
    """Return who is in which slot, resident or loading, and the counters of all layers."""
    counters = {
        name: getattr(cache.stats, name).tolist()
        for name in ("hits", "misses", "missing", "admitted", "evicted", "declined")
    }
    owners = [list(layer.owner) for layer in cache.layers]
    return {"owners": owners, "tables": cache.tables.tolist(), **counters}


def recorded(engine: Engine, n_prompt: int) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Run a prompt and tokens; return ids [n_rows, n_layer, n_used], and the state after each.

    States and counts of the CPU begin after the prompt; a pass of one row each follows.
    """
    seen: list[list[np.ndarray]] = []
    engine.runner.observers.append(lambda il, ids: seen[-1].append(ids.reshape(-1, N_USED).copy()))
    ids, states = prompt(engine, n_prompt + N_TOKENS, seed=6), []
    for start, end in ((0, n_prompt), *((at, at + 1) for at in range(n_prompt, len(ids)))):
        seen.append([])
        (engine.forward if start else engine.prefill)(ids[start:end], greedy=True)
        if not start:
            engine.runner.misses.n_cpu_experts = 0
        else:
            states.append(state(engine.runner.cache))
    return np.concatenate([np.stack(layers, axis=1) for layers in seen]), states


@pytest.mark.parametrize("n_prompt", [20, 50])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", WAYS)
def test_a_replay_moves_the_experts_of_the_run_token_by_token(
    open_engine, way: str, policy: str, n_prompt: int
) -> None:
    """Of 20 rows, a prompt is so short that its graphs fetch too."""
    settings, split = WAYS[way]
    engine = open_engine(
        PRESET, pin_layers=1, cache_slots=(N_LAYER - 1) * (N_USED + 3), policy=policy,
        **settings,
    )  # fmt: skip
    run = engine.runner.residency
    run.guard, run.split = None, split
    cache = ExpertCache(run.cache.n_expert, run.cache.n_slots, POLICIES[policy](), N_USED)
    for layer in cache.layers:
        layer.preload()
    assert state(cache) == state(run.cache), "both begin with the same slots"
    ids, states = recorded(engine, n_prompt)

    ways = MissWays(split, settings["miss"] == "cpu", MAX_FETCH_ROWS if way == "fetched" else 0)
    residency = Residency(cache, ways, fetchable=range(N_LAYER))
    replay = _Replay(residency, MACHINES["h200"], range(N_LAYER))
    replay.prompt(ids[:n_prompt])
    missing = np.zeros((N_TOKENS, N_LAYER), np.int64)
    for at, expected in enumerate(states):
        replay.token(ids[n_prompt + at], missing[at])
        assert state(cache) == expected, f"token {at}"
    assert run.routing.counts == replay.residency.routing.counts
    assert missing.sum() > 100 and cache.stats.evicted.any() == (policy != "static")
    assert (replay.n_cpu > 0) == (settings["miss"] == "cpu")
    assert replay.n_cpu == engine.runner.misses.n_cpu_experts
