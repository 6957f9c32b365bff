"""The preset `recorded` is the shipped model's routing at another size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

ROOT = Path(__file__).resolve().parents[2]
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.placement.generator import PRESETS, generate_trace
from moegraph.placement.identity import RouterShape, router_shape
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


@pytest.mark.parametrize("il", [0, 3, 7])
def test_a_layer_has_the_hit_rates_of_the_recorded_one(
    recorded: Trace, scaled: Trace, il: int
) -> None:
    """Of an LRU with slots for the same share of the experts, and of the most popular experts.

    The first layers chose 4 of 32, more of the experts at a time than 8 of 256, and the last has
    experts that are hardly ever chosen, more than normal scores give.
    """
    for curve in (lru_curve, popularity_curve):
        assert np.abs(curve(recorded, il) - curve(scaled, il)).max() < 0.07, curve.__name__
