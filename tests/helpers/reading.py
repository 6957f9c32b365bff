"""Prompts that are read as a generation reads them: from what is kept, and keeping more."""

from __future__ import annotations

import numpy as np

from moegraph.engine import Engine
from moegraph.runner.sweep_batch import SweepBatch


def read(
    engine: Engine, seq: int, ids: np.ndarray, *marks: int, owner: str = ""
) -> tuple[np.ndarray, int]:
    """Have a sequence hold ids; return the logits after them, and how many were not computed."""
    n = engine.prefixes.resume(seq, ids, owner)
    kept = engine.prefixes.begin(ids, marks, n, owner)
    cuts = tuple(mark for mark in kept if n < mark < len(ids))
    output, saved = engine.passes.read(SweepBatch(ids[n:], seq, False, False, None, cuts), None)
    for states in saved:
        engine.prefixes.save(seq, states)
    return output.require_logits()[-1], n
