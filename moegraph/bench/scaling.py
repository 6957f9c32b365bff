"""The time of the model's passes over 1 to 128 rows, the cost of verifying a draft."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np

from ..config import MAX_VERIFY_ROWS, EngineConfig
from ..engine import Engine

# Rows of the passes, as the reference has them.
WIDTHS = (1, 4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128)
# Positions before the rows, repetitions, and passes before them.
_N_HELD, _N_TIMES, _N_WARM = 128, 5, 2


def scaling_config(config: EngineConfig) -> EngineConfig:
    """Return the settings of an engine that can verify as many rows as are measured."""
    return replace(config, spec="off", draft="", n_draft=MAX_VERIFY_ROWS - 1)


def measure_scaling(engine: Engine) -> Iterator[tuple[int, float]]:
    """Yield rows and seconds (median) of a pass of each width, as far as context and -ub allow.

    One row is a decode pass, up to MAX_VERIFY_ROWS a verify pass, more are a prompt. The rows are
    random tokens, which choose more experts than those of a text. engine: loaded with
    `scaling_config`.
    """
    rng, n_vocab = np.random.default_rng(1), engine.hparams.n_vocab
    n_held = min(_N_HELD, engine.n_ctx // 4)
    most = min(engine.runner.n_ubatch, engine.n_ctx - n_held)
    engine.reset()
    if n_held:
        engine.prefill(rng.integers(0, n_vocab, n_held).astype(np.int32), greedy=True)
    for n in (n for n in WIDTHS if n <= most):
        samples = []
        for _ in range(_N_WARM + _N_TIMES):
            samples.append(_one(engine, rng.integers(0, n_vocab, (1, n)).astype(np.int32)))
        yield n, statistics.median(samples[_N_WARM:])


def _one(engine: Engine, rows: np.ndarray) -> float:
    """Return the seconds of one pass, which leaves the sequence as it was."""
    passes = engine.passes
    if 1 < rows.shape[1] <= MAX_VERIFY_ROWS:
        begin = time.perf_counter()
        passes.verify(rows, 0)
        passes.collect()
        return time.perf_counter() - begin
    with closing(engine.copies.snapshot(0)) as before:
        begin = time.perf_counter()
        passes.run(rows, 0, False, True, None)
        seconds = time.perf_counter() - begin
        engine.copies.restore(before)
    return seconds
