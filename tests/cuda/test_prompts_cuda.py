"""Prompts on CUDA with few experts on the device are near those with all of them.

How near two results must be is measured: kernels for few rows round activations in another way
than tiles do, and which rows they get depends on how a prompt is cut. So two ways to cut it with
all experts on the device give the yardstick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.ggml.ops import Tensor
from moegraph.runner import sweep_graphs
from moegraph.runner.inspect import read_tensor
from moegraph.runner.sweep_batch import SweepBatch

Open = Callable[..., Engine]
Rows = npt.NDArray[np.float32]
DEVICE = "cuda"
# Squared error over squared outputs of the first layer, where no router has parted yet: what is
# always allowed, and how many times the yardstick.
LIMIT, TIMES = 1e-6, 2


@pytest.fixture
def open_engine(model_file: Callable[[str], Path]) -> Iterator[Open]:
    """Return a function that loads a random model on the GPU and closes it after the test."""
    opened: list[Engine] = []

    def load(preset: str, **settings: Any) -> Engine:
        chosen = {"device": DEVICE, "n_ctx": 1024, "n_ubatch": 256, "profile": "none", **settings}
        opened.append(Engine.load(model_file(preset), EngineConfig(**chosen)))
        return opened[-1]

    yield load
    for engine in opened:
        engine.close()


def first_layer(engine: Engine, n: int) -> tuple[Rows, Rows]:
    """Compute a prompt of n tokens; return the outputs of the first layer, and the last logits."""
    rows: list[Rows] = []

    def tap(hidden: Tensor, m: int, first: int) -> None:
        engine.device.synchronize()
        rows.append(read_tensor(hidden)[:m].copy())

    ids = np.random.default_rng(n).integers(0, engine.hparams.n_vocab, n).astype(np.int32)
    engine.reset()
    sweep = engine.passes.begin_prompt(SweepBatch(ids, taps={0: tap}))
    while engine.passes.step_prompt(sweep):
        pass
    assert sweep.output is not None
    return rows[0], sweep.output.require_logits()


def error(found: Rows, expected: Rows) -> float:
    """Return the squared error over the squared outputs."""
    return float(((found - expected) ** 2).sum() / (expected**2).sum())


@pytest.mark.parametrize("min_tiled", [32, 1024, 1 << 20])
@pytest.mark.parametrize("preset", ["mini35b", "kquant40", "legacy32"])
def test_a_layer_with_missing_experts_is_near_the_whole_one(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, preset: str, min_tiled: int
) -> None:
    monkeypatch.setattr(sweep_graphs, "_MIN_TILED", min_tiled)
    whole, uncut = (open_engine(preset, mode="whole", n_ubatch=n) for n in (256, 1000))
    for slots, pin in ((0, "auto"), (60, "all"), (60, "none")):
        missing = open_engine(preset, pin_layers=0, cache_slots=slots, miss="stream", host_pin=pin)
        for n in (40, 300, 1000):
            expected, _ = first_layer(whole, n)
            limit = max(LIMIT, TIMES * error(first_layer(uncut, n)[0], expected))
            found, logits = first_layer(missing, n)
            assert error(found, expected) < limit, (slots, pin, n)
            assert np.isfinite(logits).all()
            # the second time, experts are sent ahead of their router
            again, _ = first_layer(missing, n)
            assert error(again, expected) < limit, (slots, pin, n)
        missing.close()
