"""Prepares one-row passes after loading, so that the first tokens are as fast as the others.

The first pass of a shape builds its graph. On CUDA it also loads kernels, the second pass captures
the graph, and only the third replays it. Together these cost as much as dozens of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..ggml.choose import DRAW_WORDS
from ..runner import AnyRunner, Batch, NotFinite

_N_PASSES = 3
# Plain passes, of which the fastest counts. How far apart the tokens of rows are.
_N_TIMED, _APART = 3, 7919


@dataclass(frozen=True)
class PassTimes:
    """Seconds of passes over an empty sequence, before the first text.

    plain: of a decode pass of one row. verify: by rows, of a verify pass and its commit.
    """

    plain: float
    verify: Mapping[int, float]


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


def time_verify(runner: AnyRunner, widths: Sequence[int]) -> PassTimes | None:
    """Build the graphs of verify passes of these rows and of their commits, and time them.

    Then sequence 0 is reset. None for a runner whose experts may be missing, as above.
    """
    if runner.mode != "whole" or not widths:
        return None
    row = Batch(_tokens(runner, 1), greedy=True)
    try:
        plain = min(_timed(runner, row, 0) for _ in range(_N_TIMED))
        return PassTimes(plain, {n_rows: _time_width(runner, n_rows) for n_rows in widths})
    except NotFinite:
        return None  # as above
    finally:
        runner.sequences.reset(0)


def _time_width(runner: AnyRunner, n_rows: int) -> float:
    """Return the seconds of a chain's pass whose graphs exist, greedy or not."""
    captures, tokens = runner.device.can.streams, _tokens(runner, n_rows)
    chain = Batch.verify(tokens, (0,), greedy=True)
    paths = range(1, n_rows + 1) if captures else [n_rows]
    seconds = [_timed(runner, chain, n) for n in paths for _ in range(_N_PASSES)]
    if captures:
        draws = np.full((n_rows, DRAW_WORDS), -1, dtype=np.int32)
        draws[:, :1] = 0
        raced = Batch.verify(tokens, (0,), draws=draws)
        for _ in range(_N_PASSES):
            _timed(runner, raced, 1)
    return min(seconds)


def _tokens(runner: AnyRunner, n_rows: int) -> npt.NDArray[np.int32]:
    """Return tokens that choose different experts, numpy shape [1, n_rows]."""
    tokens: npt.NDArray[np.int32] = np.arange(1, n_rows + 1, dtype=np.int32)[None] * _APART
    return tokens % runner.hp.n_vocab


def _timed(runner: AnyRunner, batch: Batch, n_taken: int) -> float:
    """Return the seconds of a pass over an empty sequence, which then takes so many of its rows."""
    runner.sequences.reset(0)
    start = time.perf_counter()
    runner.submit(batch)
    runner.collect()
    if n_taken:
        runner.commit({0: list(range(n_taken))})
        runner.device.synchronize()
    return time.perf_counter() - start
