"""Two stages on one GPU: near one stage, with what is fused at the boundary taken apart."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from helpers.stages import MODES, Stages, batches, new_config

from moegraph.arch import open_model
from moegraph.runner import LayeredRunner

# Squared error over squared logits, as in test_passes_cuda.py.
LIMIT, USUAL_LIMIT = 0.2, 2e-3


@pytest.mark.parametrize("mode", ["whole", "quantized", "stream", "fetch", "cpu"])
def test_two_stages_are_near_one(model_file: Callable[[str], Path], mode: str) -> None:
    # deterministic: otherwise times would decide what is cached
    config = new_config(device="cuda", n_threads=4, deterministic=True, **MODES[mode])
    with ExitStack() as stack:
        file = stack.enter_context(closing(open_model(model_file("mini35b"))))
        one, cut = (Stages(file, at, config, stack) for at in ([], [2]))
        errors, n_equal = [], 0
        for batch, paths in batches(file.hparams.n_vocab):
            got, wanted = cut.run(batch), one.run(batch)
            for slot, rows in paths.items():
                for stages in (one, cut):
                    stages.runner.commit({slot: rows})
            if got.logits is None or wanted.logits is None:
                continue
            real = batch.tree.real.reshape(-1) if batch.tree else slice(None)
            a, b = got.logits[real].astype(np.float64), wanted.logits[real].astype(np.float64)
            errors += (((a - b) ** 2).sum(1) / (b**2).sum(1)).tolist()
            n_equal += bool((a == b).all())
        print(f"{mode}: {n_equal} passes have the same bits; largest error {max(errors):.1e}")
        assert len(errors) > 60 and max(errors) < LIMIT and np.median(errors) < USUAL_LIMIT
        for runner in cut.runners if config.miss != "auto" else ():
            assert not isinstance(runner, LayeredRunner) or runner.cache.stats.misses.any()
