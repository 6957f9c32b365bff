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

from collections.abc import Generator, Iterator, Sequence
from functools import partial

import numpy as np

from ..errors import Cancelled, RequestError
from ..graphs.chunk import Form
from ..kinds import SweepStep
from ..resident.sequences import Sequences
from .batch import Predicate
from .boundary import Boundary
from .results import NotFinite, Output
from .stage_sweep import StageSweep
from .sweep_batch import (
    Chunk,
    Cut,
    HiddenReaders,
    SweepBatch,
    SweptPrompt,
    cut_parts,
    cut_together,
)
from .sweeps import SweepMemory, Sweeps

# Rows of one head, where all rows have results: logits of more would take memory of the device.
_HEAD_ROWS = 64


def _joined(outputs: Sequence[Output]) -> Output:
    argmax = [o.argmax for o in outputs if o.argmax is not None]
    if argmax:
        return Output(argmax=np.concatenate(argmax))
    return Output(logits=np.concatenate([o.require_logits() for o in outputs]))


class Sweep:
    """Prompts under way, each of its own sequence; `Runner.sweep` makes it.

    prompts: what is computed. slots: their sequences. n_steps, n_done: steps in total as far as is
    known, and those that are enqueued. upcoming: the next step, from `begin` on; None after the
    last one. is_undone: it was cancelled before the last step had ended.
    """

    def __init__(
        self, each: Sequence[Sweeps], batches: Sequence[SweepBatch],
        boundaries: Sequence[Boundary] = (), readers: Sequence[HiddenReaders] = (),
    ) -> None:  # fmt: skip
        """each: of the stages, in order of layers. boundaries: between them. readers: as each stage
        calls them; empty if there is one stage.

        The caller has checked token ids and context length. Several batches have no results of all
        rows, and `may_join` was true of them.
        """
        self._each, self._boundaries = each, boundaries
        sequences = each[0].stage.sequences
        self.prompts = [SweptPrompt(batch, sequences) for batch in batches]
        self.slots = {batch.slot for batch in batches}
        memory = each[0].memory
        chunks = cut(memory, batches, sequences)
        readers = readers or [{batch.slot: batch.readers for batch in batches}]
        # a drafter takes the hidden states of one part after another
        self._is_read = any(reader for mine in readers[:-1] for reader in mine.values())
        no_ring = all(one.ring is None for one in each)
        flows = len(each) > 1 and not self._is_read and no_ring
        n_rows = max_rows_of(memory, batches) if flows else memory.n_rows
        self._parts = cut_parts(chunks, n_rows, memory.inputs.n_chunks)
        self.is_open = self.is_undone = False
        form = form_of(memory, batches, chunks)
        self._stages = [StageSweep(s, self.prompts, mine, form) for s, mine in zip(each, readers)]
        self.n_steps = each[0].stage.hp.n_layer * len(chunks)
        self._work = self._run()
        self.upcoming: SweepStep | None = None

    @property
    def n_done(self) -> int:
        """Return how many of the steps are enqueued."""
        return sum(stage.n_done for stage in self._stages)

    def begin(self) -> None:
        """Copy the states of the sequences, to go back to; after any error call `cancel`."""
        self.is_open = True
        for one in self._each:
            one.results.forget()
        for prompt in self.prompts:
            prompt.begin()
        self.upcoming = next(self._work, None)

    def step(self, cancelled: Predicate = lambda: False) -> bool:
        """Enqueue the next step; return whether there are more. After an error call `cancel`."""
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
        if self._is_read and i == 0:
            is_free = ended[-1] == begun[0]
        return begun[i] < len(self._parts) and has_rows and is_free

    def _take_rows(self, i: int, part: list[Chunk]) -> None:
        if i:
            source, to = (one.memory.hidden for one in self._each[i - 1 : i + 1])
            n_rows = part[-1].end
            self._boundaries[i - 1].copy(source, to, source.nb[1] * n_rows)

    def _results(self, part: list[Chunk], outputs: list[Output]) -> Iterator[SweepStep]:
        head, batch = self._stages[-1].head, self.prompts[0].batch
        for chunk in part:
            for segment in chunk.segments:
                self._prompt(segment.slot).n_whole = segment.end
        if batch.all_rows:
            for chunk in part:
                before = chunk.segments[0].first - self.prompts[0].n_past
                for row in range(max(batch.n_skipped - before, 0), chunk.n, _HEAD_ROWS):
                    n = min(_HEAD_ROWS, chunk.n - row)
                    yield SweepStep("head", n)
                    outputs.append(head(batch, chunk.row + row, n))
            return
        for chunk in part:
            row = chunk.row - 1
            for segment in chunk.segments:
                row += segment.n
                prompt = self._prompt(segment.slot)
                if segment.end < prompt.n_end or prompt.has_left:
                    continue
                yield SweepStep("head", 1)
                self._finish(prompt, row)

    def _prompt(self, slot: int) -> SweptPrompt:
        return next(prompt for prompt in self.prompts if prompt.slot == slot)

    def _finish(self, prompt: SweptPrompt, row: int) -> None:
        """Compute the results of a prompt; if they are not finite, others go on."""
        try:
            prompt.output = self._stages[-1].head(prompt.batch, row, 1)
        except NotFinite as error:
            if len(self.prompts) == 1:
                raise
            prompt.error = error

    def _end(self, outputs: list[Output]) -> None:
        if outputs:
            self.prompts[0].output = outputs[0] if len(outputs) == 1 else _joined(outputs)
        for prompt in self.prompts:
            prompt.end()
        self.is_open = False  # from here on nothing is undone
        self._free()

    def _free(self) -> None:
        """Free what was taken to go back; a second call does nothing."""
        for prompt in self.prompts:
            prompt.close(self.is_undone or not prompt.is_kept)

    def cancel(self) -> None:
        """Make the sequences what they were before the sweep, unless the last step has ended.

        Safe to call again if it was interrupted.
        """
        if self.is_open:
            self._work.close()  # it holds graphs
            self.upcoming = None
            for stage in self._stages:
                stage.cancel()
            for prompt in self.prompts:
                prompt.undo()
            self.is_undone, self.is_open = True, False
        self._free()


def max_rows_of(memory: SweepMemory, batches: Sequence[SweepBatch]) -> int:
    """Return the most rows of a chunk."""
    return min([memory.max_rows, *(batch.max_rows for batch in batches if batch.max_rows)])


def cut(memory: SweepMemory, batches: Sequence[SweepBatch], sequences: Sequences) -> list[Cut]:
    """Return the chunks of prompts."""
    most, n_past = max_rows_of(memory, batches), sequences.n_past
    pictures = {one.slot: one.pictures for one in batches if one.pictures}
    prompts = []
    for one in batches:  # pictures have chunks of their own, as in llama.cpp
        cuts = [*one.cuts, *(one.pictures.cuts if one.pictures else ())]
        prompts.append((one.slot, n_past[one.slot], len(one.tokens), cuts))
    form = _joint_form(batches)
    fits = partial(memory.inputs.fits, form=form)
    return cut_together(prompts, most, fits, form is Form.ROUNDED, pictures)


def _joint_form(batches: Sequence[SweepBatch]) -> Form:
    return Form.ROUNDED if batches[0].is_rounded else Form.JOINT


def form_of(memory: SweepMemory, batches: Sequence[SweepBatch], chunks: Sequence[Cut]) -> Form:
    """Return the form of the chunks of some prompts."""
    form = _joint_form(batches)
    is_joint = form is Form.ROUNDED and memory.inputs.fit(chunks, form)
    return form if is_joint or len(batches) > 1 else Form.PLAIN


def may_join(memory: SweepMemory, batches: Sequence[SweepBatch], sequences: Sequences) -> bool:
    """Return whether one sweep, as one part, has room for all these prompts."""
    if sum(len(batch.tokens) for batch in batches) > memory.n_rows:
        return False
    chunks, inputs = cut(memory, batches, sequences), memory.inputs
    fit = inputs.fit(chunks, _joint_form(batches))
    return len(batches) == 1 or (len(chunks) <= inputs.n_chunks and fit)
