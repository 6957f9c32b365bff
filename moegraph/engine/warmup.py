"""Prepares passes of one row, and of drafts, after loading: so the first tokens are as fast as all.

The first pass of a shape builds its graph. On CUDA it also loads kernels, the second pass captures
the graph, and only the third replays it. Together these cost as much as dozens of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..ggml.choose import DRAW_WORDS
from ..runner import AnyRunner, Batch, LayeredRunner, NotFinite, build_ahead

_N_PASSES = 3
# Plain passes, of which the fastest counts. How far apart the tokens of rows are.
_N_TIMED, _APART = 3, 7919


@dataclass(frozen=True)
class PassTimes:
    """Seconds of passes over an empty sequence, before the first text.

    plain: of a decode pass of one row, 0 if none was timed. verify: by rows, of a verify pass and
    its commit. built: rows of the verify passes whose graphs exist.
    """

    plain: float
    verify: Mapping[int, float]
    built: tuple[int, ...]


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
            build_ahead(runner, batch)
            for _ in range(n_passes):
                state.reset(0)
                runner.submit(batch)
                runner.collect()
    except NotFinite:
        pass  # the weights are damaged: the first request will say where
    finally:
        if n_passes:
            state.reset(0)


def time_verify(
    runner: AnyRunner, widths: Sequence[int], begins: Callable[[int], None]
) -> PassTimes | None:
    """Build the graphs of verify passes of these rows and of their commits, and time them.

    widths: in order. begins: sets the CPU threads of a pass of so many rows. Then sequence 0 is
    reset. If experts may be missing, nothing is timed; where graphs are captured they are, and
    then the same experts are on the device as before.
    """
    if not widths:
        return None
    captures, is_whole = runner.device.can.streams, runner.mode == "whole"
    if not (captures or is_whole):
        for batch in (batch for n_rows in widths for batch in _chains(runner, n_rows)):
            build_ahead(runner, batch)
        return PassTimes(0.0, {}, tuple(widths))
    row = Batch(np.full((1, 1), _APART % runner.hp.n_vocab, dtype=np.int32), greedy=True)
    try:
        with ExitStack() as stack:
            for part in runner.parts:
                if isinstance(part, LayeredRunner):
                    stack.enter_context(part.rehearsing())
            plain = (
                min(_timed(runner, row, 0, begins) for _ in range(_N_TIMED)) if is_whole else 0.0
            )
            steps = pairwise((0, *widths))
            verify = {n: _time_width(runner, n, before, begins) for before, n in steps}
        return PassTimes(plain, verify if is_whole else {}, tuple(widths))
    except NotFinite:
        return None  # as above
    finally:
        runner.sequences.reset(0)


def _time_width(
    runner: AnyRunner, n_rows: int, before: int, begins: Callable[[int], None]
) -> float:
    """Return the seconds of a chain's pass whose graphs exist, greedy or not.

    before: rows of which paths have been committed.
    """
    captures, (chain, raced) = runner.device.can.streams, _chains(runner, n_rows)
    paths = range(before + 1, n_rows + 1) if captures else [n_rows]
    seconds = [_timed(runner, chain, n, begins) for n in paths for _ in range(_N_PASSES)]
    if captures:
        for _ in range(_N_PASSES):
            _timed(runner, raced, 1, begins)
    return min(seconds)


def _chains(runner: AnyRunner, n_rows: int) -> tuple[Batch, Batch]:
    """Return verify passes of a chain whose tokens choose different experts: greedy, and not."""
    tokens = np.arange(1, n_rows + 1, dtype=np.int32)[None] * _APART % runner.hp.n_vocab
    draws = np.full((n_rows, DRAW_WORDS), -1, dtype=np.int32)
    draws[:, :1] = 0
    return Batch.verify(tokens, (0,), greedy=True), Batch.verify(tokens, (0,), draws=draws)


def _timed(runner: AnyRunner, batch: Batch, n_taken: int, begins: Callable[[int], None]) -> float:
    """Return the seconds of a pass over an empty sequence, which then takes so many of its rows."""
    runner.sequences.reset(0)
    begins(batch.tokens.size)
    start = time.perf_counter()
    runner.submit(batch)
    runner.collect()
    if n_taken:
        runner.commit({0: list(range(n_taken))})
        runner.device.synchronize()
    return time.perf_counter() - start
