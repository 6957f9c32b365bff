"""Prepares one-row passes after loading, so that the first tokens are as fast as the others.

The first pass of a shape builds its graph. On CUDA it also loads kernels, the second pass captures
the graph, and only the third replays it. Together these cost as much as dozens of tokens.
"""

from __future__ import annotations

import numpy as np

from ..ggml.choose import DRAW_WORDS
from ..runner import AnyRunner, Batch, NotFinite

_N_PASSES = 3


def warm_up(runner: AnyRunner) -> None:
    """Build the graphs of the passes that answers consist of; with streams, also run them.

    Then sequence 0 is reset. Not for a runner whose experts may be missing: its cache would learn
    from these passes.
    """
    row = np.zeros((1, 1), dtype=np.int32)
    draws = np.full((1, DRAW_WORDS), -1, dtype=np.int32)
    draws[:, :1] = 0  # no race; the graph is the same with one
    state, n_passes = runner.sequences, _N_PASSES if runner.device.can.streams else 0
    try:
        for batch in (Batch(row, greedy=True), Batch(row, draws=draws)):
            runner.build_ahead(batch)
            for _ in range(n_passes):
                state.reset(0)
                runner.submit(batch)
                runner.collect()
    except NotFinite:
        pass  # the weights are damaged: the first request will say where
    finally:
        if n_passes:
            state.reset(0)
