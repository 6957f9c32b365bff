"""Small functions that several test folders share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from modelgen.build import write_model
from modelgen.presets import PRESETS

if TYPE_CHECKING:
    from moegraph.engine import Engine
    from moegraph.experts.cache import ExpertCache
    from moegraph.experts.slots import LayerSlots


def prompt(engine: Engine, n: int, seed: int = 0) -> np.ndarray:
    """Return n random token ids of the engine's vocabulary."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, engine.hparams.n_vocab, n).astype(np.int32)


def greedy_tokens(engine: Engine, ids: object, n: int) -> list[int]:
    """Return n greedily generated ids, end-of-generation tokens included."""
    return [event.token for event in engine.generate(ids, max_tokens=n, text=False)]


def resident_bytes() -> int:
    """Return this process's resident memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def empty(cache: ExpertCache, il: int, *experts: int) -> None:
    """Take the slots of resident experts away."""
    for expert in experts:
        cache.layers[il].owner[int(cache.tables[il, expert])] = -1
    cache.rollback()


def model_writer(folder: Path, seed: int) -> Callable[[str], Path]:
    """Return a function from a preset's name to its random model, written once into folder."""
    made: dict[str, Path] = {}

    def path_of(preset: str) -> Path:
        if preset not in made:
            chosen = PRESETS[preset]
            path = folder / f"{preset}.gguf"
            made[preset] = write_model(path, chosen.shape, chosen.mix, seed=seed)[0]
        return made[preset]

    return path_of


def residents(layer: LayerSlots) -> list[int]:
    """Return the resident experts, by falling score."""
    there = [e for e in layer.owner if e in layer.resident]
    return sorted(there, key=layer.policy.score.__getitem__, reverse=True)
