"""Builds graphs of usual passes and chunks while a service has nothing to do.

The first pass of a shape, and each layer's first chunk of one, build a graph. Without this, the
first requests would wait for hundreds of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from ..errors import MoegraphError
from ..ggml.choose import DRAW_ROWS
from ..graphs.chunk import Form, Segment
from ..graphs.head import no_races
from ..runner import AnyRunner, Batch, build_ahead
from ..runner.sweeps import Sweeps

# Rows of the sequences in chunks that prompts usually begin with.
_CHUNKS = (
    (128,), (256,), (384,), (512,), (768,), (1024,),
    (256,) * 4, (256, 256, 192, 64), (512,) * 2, (384,) * 2, (128,) * 8, (256,) * 2, (128,) * 4,
)  # fmt: skip
# A long prompt has chunks of so many rows, up to so many positions.
_LONG_CHUNKS, _LONG = (1024, 512), 8192


class Building:
    """Graphs that are built one at a time, as long as others need not give way for them.

    is_done: nothing is left to build.
    """

    def __init__(self, runner: AnyRunner, n_seq: int) -> None:
        """n_seq: most sequences of a pass."""
        self._runner, self._n_seq = runner, n_seq
        self._work = self._all()
        self.is_done = False

    def run(self, seconds: float) -> None:
        """Build graphs for about so long."""
        end = time.perf_counter() + seconds
        while not self.is_done and time.perf_counter() < end:
            self.step()

    def step(self) -> None:
        """Build a graph, or find that it is there; nothing happens if all are built."""
        is_full = any(part.graphs.is_half_full for part in self._runner.parts)
        work = None if is_full else next(self._work, None)
        try:
            if work:
                work()
        except MoegraphError:  # it comes up again with the request that needs the graph
            work = None
        self.is_done = work is None

    def _all(self) -> Iterator[Callable[[], object]]:
        """Yield the work, passes of answers first."""
        widths = {
            min(width, self._n_seq) for part in self._runner.parts for width in part.shapes.widths
        }
        for n in sorted(widths):
            yield from self._passes(n, n)
            if n - 1 > 1 and n - 1 not in widths:
                yield from self._passes(n - 1, n)
        usual = [[Segment(slot, 0, n) for slot, n in enumerate(each)] for each in _CHUNKS]
        long = [[Segment(0, at, n)] for n in _LONG_CHUNKS for at in range(n, _LONG, n)]
        for segments in usual + long:
            if len(segments) <= self._n_seq:
                for part in self._runner.parts:
                    yield from self._chunks(part.sweeps, segments)

    def _passes(self, n: int, width: int) -> Iterator[Callable[[], object]]:
        """Yield the work for n sequences, padded to width."""
        rows, slots = np.zeros((n, 1), np.int32), tuple(range(n))
        yield partial(build_ahead, self._runner, Batch(rows, slots, greedy=True))
        if width <= DRAW_ROWS:
            yield partial(build_ahead, self._runner, Batch(rows, slots, draws=no_races(n)))

    def _chunks(
        self, sweeps: Sweeps, segments: Sequence[Segment]
    ) -> Iterator[Callable[[], object]]:
        if not sweeps.takes(segments):
            return
        n, shape = sweeps.memory.inputs.shape_of(segments, Form.ROUNDED)
        for il in sweeps.stage.layers:
            yield partial(sweeps.graphs.chunk, il, n, shape)
