"""Small functions that several test folders share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from moegraph.engine import Engine


def prompt(engine: Engine, n: int, seed: int = 0) -> np.ndarray:
    """Return n random token ids of the engine's vocabulary."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, engine.hparams.n_vocab, n).astype(np.int32)


def greedy_tokens(engine: Engine, ids: object, n: int) -> list[int]:
    """Return n greedily generated ids, end-of-generation tokens included."""
    return [event.token for event in engine.generate(ids, max_tokens=n, text=False)]
