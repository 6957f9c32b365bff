"""Prompts on CUDA with few experts on the device are near those with all of them.

How near two results must be is measured: kernels for few rows round activations in another way
than tiles do, and which rows they get depends on how a prompt is cut. So two ways to cut it with
all experts on the device give the yardstick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from regression.harness import FAMILIES

from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.ggml.ops import Tensor
from moegraph.runner import sweeps
from moegraph.runner.inspect import read_tensor
from moegraph.runner.sweep_batch import SweepBatch

Open = Callable[..., Engine]
Rows = npt.NDArray[np.float32]
DEVICE = "cuda"
PRESETS = ["mini35b", "kquant40", "legacy32"]
# Squared error over squared outputs of the first routed layer, where no router has parted yet: what
# is always allowed, and how many times the yardstick.
# FEW: between kernels for few rows, which round activations to eight bits, and tiles. PARTED: of a
# row whose router chose another expert at a near tie. MANY: of the median row of a short prompt,
# where near ties are common (512 experts: 7.5e-4 on an H200).
LIMIT, FEW, TIMES, PARTED, MANY = 2e-6, 3e-4, 2, 0.1, 3e-3


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
    """Compute n tokens; return the outputs of the first routed layer, and the last logits."""
    rows: list[Rows] = []

    def read(hidden: Tensor, row: int, m: int, first: int) -> None:
        engine.device.synchronize()
        rows.append(read_tensor(hidden)[row : row + m].copy())

    ids = np.random.default_rng(n).integers(0, engine.hparams.n_vocab, n).astype(np.int32)
    engine.reset()
    sweep = engine.passes.begin_prompts(
        [SweepBatch(ids, readers={engine.hparams.routed_layers[0]: read})]
    )
    while engine.passes.step_prompt(sweep):
        pass
    assert sweep.prompts[0].output is not None
    return rows[0], sweep.prompts[0].output.require_logits()


def some_slots(engine: Engine) -> int:
    """Return slots for a third of the experts at most."""
    hp = engine.hparams
    return min(60, len(hp.routed_layers) * hp.n_expert // 3)


def error(found: Rows, expected: Rows) -> float:
    """Return the squared error over the squared outputs."""
    return float(((found - expected) ** 2).sum() / (expected**2).sum())


@pytest.mark.parametrize(
    ("preset", "min_tiled"),
    [*product(PRESETS, [32, 1024, 1 << 20]), *product(FAMILIES, [32, 1 << 20])],
)
def test_a_layer_with_missing_experts_is_near_the_whole_one(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, preset: str, min_tiled: int
) -> None:
    monkeypatch.setattr(sweeps, "_MIN_TILED", min_tiled)
    whole, uncut = (open_engine(preset, mode="whole", n_ubatch=n) for n in (256, 1000))
    some, least = some_slots(whole), LIMIT if preset in PRESETS else FEW
    for slots, pin in ((0, "auto"), (some, "all"), (some, "none")):
        missing = open_engine(preset, pin_layers=0, cache_slots=slots, miss="stream", host_pin=pin)
        for n in (40, 300, 1000):
            expected, _ = first_layer(whole, n)
            limit = max(least, TIMES * error(first_layer(uncut, n)[0], expected))
            found, logits = first_layer(missing, n)
            assert error(found, expected) < limit, (slots, pin, n)
            assert np.isfinite(logits).all()
            # the second time, experts are sent ahead of their router
            again, _ = first_layer(missing, n)
            assert error(again, expected) < limit, (slots, pin, n)
        missing.close()


def layer_rows(engine: Engine, batches: list[SweepBatch]) -> list[Rows]:
    """Compute prompts in one sweep; return the outputs of its first layer, of each prompt."""
    found: list[list[Rows]] = [[] for _ in batches]

    def read(at: int, hidden: Tensor, row: int, m: int, first: int) -> None:
        engine.device.synchronize()
        found[at].append(read_tensor(hidden)[row : row + m].copy())

    read_out = [replace(batch, readers={0: partial(read, at)}) for at, batch in enumerate(batches)]
    sweep = engine.passes.begin_prompts(read_out)
    while engine.passes.step_prompt(sweep):
        pass
    for batch, swept in zip(batches, sweep.prompts, strict=True):
        assert swept.output is not None and np.isfinite(swept.output.require_logits()).all()
        engine.forward([5], batch.slot)  # it goes on from there
    return [np.concatenate(each) for each in found]


@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("lacks", [False, True], ids=["whole", "missing"])
@pytest.mark.parametrize("preset", [*PRESETS, "qwen3moe", "qwen3next", "gemma4", "gptoss"])
def test_prompts_read_together_are_near_each_alone(
    open_engine: Open, preset: str, lacks: bool, is_rounded: bool
) -> None:
    cut, uncut = (
        open_engine(preset, mode="whole", n_seq=6, n_ctx=2048, n_ubatch=n) for n in (64, 1000)
    )
    place: dict[str, Any] = {"mode": "whole"}
    if lacks:
        place = {"pin_layers": 0, "cache_slots": some_slots(uncut), "miss": "stream"}
    engine = open_engine(preset, n_seq=6, n_ctx=2048, **place)
    rng = np.random.default_rng(1)
    ids = [
        rng.integers(0, engine.hparams.n_vocab, n).astype(np.int32)
        for n in (200, 7, 90, 333, 1, 60)
    ]
    for one in (engine, cut, uncut):
        one.prefill(ids[3], 4, greedy=True)  # a sequence that goes on
    batches = [SweepBatch(each, i, cuts=(20,) if i == 2 else ()) for i, each in enumerate(ids)]
    batches = [replace(batch, is_rounded=is_rounded) for batch in batches]
    together = layer_rows(engine, batches)
    for batch, found in zip(batches, together, strict=True):
        alone = replace(batch, cuts=(), is_rounded=False)
        expected, other = layer_rows(uncut, [alone])[0], layer_rows(cut, [alone])[0]
        # alone, kernels for few rows compute a short prompt, in pieces or not; no cut changes that
        least = FEW if len(batch.tokens) <= 256 else LIMIT
        limit = max(least, TIMES * error(other, expected))
        each = [error(a, b) for a, b in zip(found, expected, strict=True)]
        assert max(each) < PARTED, (batch.slot, each)
        off = error(found, expected)
        if engine.hparams.n_expert > 256:
            off, limit = float(np.median(each)), max(limit, MANY)
        assert off <= limit, (batch.slot, off, limit)
