"""Products of experts in CUDA's ways, on the CPU: units of missing ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.ggml.device import Capabilities
from moegraph.ggml.lib import ffi
from moegraph.ggml.ops import Tensor
from moegraph.resident.bank import Ring
from moegraph.runner import sweeps
from moegraph.runner.inspect import read_tensor
from moegraph.runner.sweep_batch import SweepBatch
from moegraph.runner.sweeps import Sweeps

Open = Callable[..., Engine]
CUDA = Path(__file__).resolve().parents[2] / "native" / "ggml" / "src" / "ggml-cuda"
MISSING: dict[str, Any] = {"cache_slots": 10, "pin_layers": 0, "miss": "stream"}
# Numbers of a row that a tile reads at once.
PIECE = 512


@pytest.fixture
def without_exact_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the CPU device go the way of CUDA: experts are added to a finished sum, in units."""
    real = Capabilities.of.__func__
    of = classmethod(lambda cls, dev: replace(real(cls, dev), exact_sums=False))
    monkeypatch.setattr(Capabilities, "of", of)


def first_layer(engine: Engine, ids: np.ndarray) -> np.ndarray:
    """Return the outputs of the first layer for a prompt, F32 numpy [n, n_embd]."""
    rows: list[np.ndarray] = []

    def read(hidden: Tensor, row: int, n: int, first: int) -> None:
        rows.append(read_tensor(hidden)[row : row + n].copy())

    sweep = engine.passes.begin_prompts([SweepBatch(ids, greedy=True, readers={0: read})])
    while engine.passes.step_prompt(sweep):
        pass
    return rows[0]


@pytest.mark.parametrize(
    ("preset", "min_tiled"), [("kquant40", 1), ("iq64", 1024), ("mxfp256", 1), ("legacy32", 1024)]
)
def test_groups_of_the_ring_may_have_any_number_of_slots(
    open_engine: Open, monkeypatch, without_exact_sums: None, preset: str, min_tiled: int
) -> None:
    """kquant40: groups of five slots, which divide no number of places that a graph is for."""
    settings = {"n_ctx": 1024, "n_ubatch": 512}
    monkeypatch.setattr(sweeps, "_MIN_TILED", min_tiled)
    engine = open_engine(preset, **settings, **MISSING)
    assert not engine.runner.sweeps.sums_last
    ids = prompt(engine, 400, seed=1)
    expected = first_layer(open_engine(preset, mode="whole", **settings), ids)
    found = first_layer(engine, ids)
    assert ((found - expected) ** 2).sum() < 1e-6 * (expected**2).sum()


def behind(ring: Ring, packing: Any, il: int, group: int, slot: int) -> list[np.ndarray]:
    """Return the bytes behind each part of an expert that a tile reads as its own."""
    found = []
    for part, tensor in ring.bank(il, group).parts.items():
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        n_bytes = -tensor.ne[0] % PIECE // block * block_bytes
        start = slot * packing.stride + packing.sizes[part]
        data = ffi.cast("char *", tensor.data) + start
        found.append(np.frombuffer(ffi.buffer(data, n_bytes), np.uint8) if block > 1 else [])
    return found


@pytest.mark.parametrize(
    ("preset", "pin"), [("legacy32", "none"), ("kquant40", "all"), ("iq64", "none")]
)
def test_zeros_follow_each_part_of_an_expert_in_the_ring(
    open_engine: Open, monkeypatch, preset: str, pin: str
) -> None:
    """CUDA's tiles multiply them by zero. In these models, layers of several kinds share it."""
    engine = open_engine(preset, cache_slots=0, pin_layers=0, miss="stream", host_pin=pin)
    send, ring, n_bytes = Sweeps.send, engine.runner.sweeps.ring, 0

    def sent(sweeps: Sweeps, il: int, group: int, pairs: list[tuple[int, int]]) -> None:
        nonlocal n_bytes
        send(sweeps, il, group, pairs)
        for _, slot in pairs:
            for data in behind(ring, engine.stage.store.packing(il), il, group, slot):
                assert not np.any(data)
                n_bytes += len(data)

    monkeypatch.setattr(Sweeps, "send", sent)
    for seed in range(2):
        engine.reset()
        engine.prefill(prompt(engine, 60, seed=seed), greedy=True)
    assert n_bytes > 1000
