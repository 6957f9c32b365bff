"""The preset `recorded` is the shipped model's routing at another size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

ROOT = Path(__file__).resolve().parents[2]
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.experts.machines import MACHINES
from moegraph.experts.policy import POLICIES
from moegraph.placement.generator import PRESETS, generate_trace
from moegraph.placement.identity import RouterShape, router_shape
from moegraph.placement.simulate import even_slots, simulate
from moegraph.placement.trace import Trace, TraceRecorder

N_TOKENS = 1536
SHARES = np.arange(1, 8) / 8
# Tokens at the start that fill the LRU and are not counted.
SKIP = 256


def lru_curve(trace: Trace, il: int) -> npt.NDArray[np.float64]:
    """Return the hit rates of an LRU with slots for SHARES of one layer's experts."""
    n_expert = trace.shape.n_expert
    last = np.full(n_expert, -1.0) - np.arange(n_expert)
    ages = []
    for at, chosen in enumerate(trace.ids[:, il].astype(np.intp)):
        used = last[chosen]
        if at >= SKIP:
            ages.append((last > used[:, None]).sum(axis=1))  # experts used since
        last[chosen] = at + np.arange(len(chosen))[::-1] / len(chosen)
    deep = np.concatenate(ages)
    return np.array([(deep < round(share * n_expert)).mean() for share in SHARES])


def popularity_curve(trace: Trace, il: int) -> npt.NDArray[np.float64]:
    """Return the shares of a layer's choices that its most popular experts get, for SHARES."""
    counts = np.sort(trace.part(SKIP, trace.n_tokens).counts()[il])[::-1]
    most = np.cumsum(counts) / counts.sum()
    return np.array([most[round(share * len(counts)) - 1] for share in SHARES])


@pytest.fixture(scope="module")
def recorded() -> Trace:
    """The shipped model on the held-out text."""
    config = EngineConfig(device="cpu", mode="layered", n_ctx=2048, n_ubatch=64, n_threads=1)
    with Engine.load("tiny", config) as engine:
        text = (ROOT / "tests" / "data" / "heldout.py.txt").read_text()
        ids = np.array(engine.tokenizer.encode(text)[:N_TOKENS], dtype=np.int32)
        recorder = TraceRecorder(router_shape(engine.file))
        engine.runner.observers.append(recorder)
        for start in range(0, len(ids), 64):
            engine.forward(ids[start : start + 64], greedy=True)
    return recorder.trace(0, "tiny")


@pytest.fixture(scope="module")
def scaled() -> Trace:
    """As many layers of the size of a 35B-A3B."""
    return generate_trace(RouterShape(8, 256, 8), N_TOKENS, seed=3, model=PRESETS["recorded"])


@pytest.mark.parametrize("il", range(8))
def test_a_layer_has_the_hit_rates_of_the_recorded_one(
    recorded: Trace, scaled: Trace, il: int
) -> None:
    """Of an LRU with slots for the same share of the experts, and of the most popular experts.

    The first layers chose 4 of 32, more of the experts at a time than 8 of 256, and the last has
    experts that are hardly ever chosen, more than normal scores give.
    """
    for curve in (lru_curve, popularity_curve):
        assert np.abs(curve(recorded, il) - curve(scaled, il)).max() < 0.07, curve.__name__


def test_the_policy_in_use_hits_as_often_at_the_same_share(recorded: Trace, scaled: Trace) -> None:
    """`lfu`, which the fit did not look at."""
    for share in (0.25, 0.5, 0.75):
        rates = []
        for trace in (recorded, scaled):
            n_slots = even_slots(8, trace.shape.n_expert, share)
            policy, machine = POLICIES["lfu"](), MACHINES["h200"]
            found = simulate(trace, n_slots, policy, machine, mode="stream", skip=256)
            rates.append(found.hit_rate)
        assert rates[0] == pytest.approx(rates[1], abs=0.05), share


def test_the_other_presets_come_back_to_fewer_experts(recorded: Trace) -> None:
    """At a quarter of the slots the shipped model hits .4, `flat` .6, `sticky` .8."""
    at = 1  # 25 %
    rates = [np.mean([lru_curve(recorded, il)[at] for il in range(8)])]
    for name in ("flat", "sticky"):
        trace = generate_trace(RouterShape(8, 256, 8), N_TOKENS, model=PRESETS[name])
        rates.append(np.mean([lru_curve(trace, il)[at] for il in range(8)]))
    assert [round(float(rate), 1) for rate in rates] == [0.4, 0.6, 0.8]
