"""A sweep: a prompt computed layer by layer, all its chunks in one layer before the next.

So a sweep sends every absent expert at most once, however long the prompt is (stage_sweep.py).

A sweep goes on by steps: one chunk of one layer, or one group of experts. Between steps other
sequences may be computed. The sequence has the new rows once the last step is done; until then
`cancel` makes it what it was before.

The layers may be in several stages. Then the rows of a part of the prompt go from one stage to the
next. Where all experts are resident, a part is one chunk, so that the stages work on different
chunks at once. Otherwise parts are as long as possible, so that experts are sent as seldom.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..errors import Cancelled, NativeError, RequestError
from ..kinds import SweepStep
from ..resident.hostcopies import StatesCopy
from ..resident.snapshots import Snapshot
from .boundary import Boundary
from .results import Output
from .stage_sweep import StageSweep
from .sweep_batch import Chunk, SweepBatch, Tap, cut_chunks, cut_parts
from .sweeps import Sweeps


def _joined(outputs: Sequence[Output]) -> Output:
    """Return the results of all chunks as one: argmax, or logits."""
    argmax = [o.argmax for o in outputs if o.argmax is not None]
    if argmax:
        return Output(argmax=np.concatenate(argmax))
    return Output(logits=np.concatenate([o.require_logits() for o in outputs]))


class Sweep:
    """One prompt under way; `Runner.sweep` makes it.

    n_steps, n_done: steps in total as far as is known, and those that are enqueued. upcoming: the
    next step, from `begin` on; None after the last one. output: the results; valid after the last
    step. saved: the states at the cuts, in host memory; they are complete after the last step, and
    the caller closes them. n_whole: positions of the sequence that all layers have; those of the
    last part come with the last step.
    """

    def __init__(
        self,
        each: Sequence[Sweeps],
        batch: SweepBatch,
        boundaries: Sequence[Boundary] = (),
        taps: Sequence[Mapping[int, Tap]] = (),
    ) -> None:
        """each: of the stages, in order of layers. boundaries: between them. taps: of the batch, as
        each stage calls them; empty if there is one stage.

        The caller has checked token ids and context length.
        """
        self.batch, self.slot = batch, batch.slot
        self._each, self._boundaries = each, boundaries
        self._sequences = sequences = each[0].stage.sequences
        self.n_past = self.n_whole = sequences.n_past[self.slot]
        memory = each[0].memory
        max_rows = min(batch.max_rows or memory.max_rows, memory.max_rows)
        chunks = cut_chunks(len(batch.tokens), self.n_past, max_rows, batch.cuts)
        taps = taps or [batch.taps]
        # a drafter takes the taps of one part after another
        self._is_tapped = any(taps[:-1])
        flows = len(each) > 1 and not self._is_tapped and all(one.ring is None for one in each)
        n_rows = max_rows if flows else memory.n_rows
        self._parts = cut_parts(chunks, n_rows, memory.inputs.n_chunks)
        self._before: Snapshot | None = None
        self.saved: list[StatesCopy] = []
        self.is_open = False
        self.output: Output | None = None
        self._stages = [
            StageSweep(one, replace(batch, taps=mine), self.n_past, self.saved)
            for one, mine in zip(each, taps)
        ]
        self.n_steps = each[0].stage.hp.n_layer * len(chunks)
        self._work = self._run()
        self.upcoming: SweepStep | None = None

    @property
    def n_done(self) -> int:
        """Return how many of the steps are enqueued."""
        return sum(stage.n_done for stage in self._stages)

    def begin(self) -> None:
        """Copy the state of the sequence, to go back to; after any error call `cancel`.

        Raises:
            OutOfDeviceMemory: there is no memory for a snapshot.
        """
        sequences = self._sequences
        self.is_open = True
        for one in self._each:
            one.results.forget()
        if self.n_past:
            self._before = sequences.snapshot(self.slot)
        for cut in self.batch.cuts:
            try:
                self.saved.append(sequences.copies.new_states(cut))
            except NativeError:  # nothing but this copy depends on it
                break
        sequences.pool.grow(self.slot, self.n_past + len(self.batch.tokens))
        self.upcoming = next(self._work, None)

    def step(self, cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Enqueue the next step; return whether there are more. After an error call `cancel`.

        Raises:
            Cancelled: cancelled() returned true.
            RequestError: the sweep has ended.
            NotFinite: results are NaN or infinite.
        """
        if not self.is_open:
            raise RequestError("the prompt has been computed or cancelled; begin another one")
        if cancelled():
            raise Cancelled("cancelled")
        self.upcoming = next(self._work, None)
        return self.upcoming is not None

    def _run(self) -> Generator[SweepStep]:
        """Do all the work; before each step, yield what it is."""
        parts, n = self._parts, len(self._stages)
        work: list[Iterator[SweepStep] | None] = [None] * n
        upcoming: list[SweepStep | None] = [None] * n
        begun, ended, outputs = [0] * n, [0] * n, list[Output]()
        while ended[-1] < len(parts):
            for i in reversed(range(n)):
                if work[i] is None and self._may_begin(i, begun, ended):
                    self._take_rows(i, parts[begun[i]])
                    begun[i] += 1
                    work[i] = self._stages[i].run(parts[begun[i] - 1], begun[i] == len(parts))
                    upcoming[i] = next(work[i] or iter(()), None)
                steps, step = work[i], upcoming[i]
                if steps is None:
                    continue
                if step:
                    yield step
                    upcoming[i] = next(steps, None)
                if upcoming[i]:
                    continue
                work[i] = None
                ended[i] += 1
                if i == n - 1:
                    yield from self._results(parts[begun[i] - 1], outputs)
        self._end(outputs)

    def _may_begin(self, i: int, begun: list[int], ended: list[int]) -> bool:
        """Return whether a stage may begin its next part; begun, ended: parts of each stage."""
        has_rows = i == 0 or ended[i - 1] > begun[i]
        # the next stage has taken what this one left
        is_free = i == len(begun) - 1 or ended[i] == begun[i + 1]
        if self._is_tapped and i == 0:
            is_free = ended[-1] == begun[0]
        return begun[i] < len(self._parts) and has_rows and is_free

    def _take_rows(self, i: int, part: list[Chunk]) -> None:
        """Enqueue the copy of the rows of a part from the stage before."""
        if i:
            source, to = (one.memory.hidden for one in self._each[i - 1 : i + 1])
            n_rows = part[-1].row + part[-1].n
            self._boundaries[i - 1].copy(source, to, source.nb[1] * n_rows)

    def _results(self, part: list[Chunk], outputs: list[Output]) -> Iterator[SweepStep]:
        """Compute the results of a part, which all layers have."""
        last, head = part[-1], self._stages[-1].head
        self.n_whole = last.first + last.n
        if self.batch.all_rows:
            for chunk in part:
                yield SweepStep("head", chunk.n)
                outputs.append(head(chunk.row, chunk.n))
        elif part is self._parts[-1]:
            yield SweepStep("head", 1)
            outputs.append(head(last.row + last.n - 1, 1))

    def _end(self, outputs: list[Output]) -> None:
        """Close the sweep; its sequence has all rows."""
        self.output = outputs[0] if len(outputs) == 1 else _joined(outputs)
        self._sequences.n_past[self.slot] = self.n_past + len(self.batch.tokens)
        self.is_open = False
        if self._before:
            self._before.close()

    def cancel(self) -> None:
        """Make the sequence what it was before the sweep; does nothing after the last step.

        Safe to call again if it was interrupted.
        """
        if not self.is_open:
            return
        sequences = self._sequences
        self._work.close()  # it holds graphs
        self.upcoming = None
        for stage in self._stages:
            stage.cancel()
        if self._before:
            sequences.restore(self._before)
        elif self.n_past:
            sequences.truncate(self.slot, self.n_past)  # it failed before anything was computed
        else:
            sequences.reset(self.slot)
        self.is_open = False
        for copy in self.saved:
            copy.close()
        if self._before:
            self._before.close()
