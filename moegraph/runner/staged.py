"""Runs passes over a model in several stages: each in turn, with a copy of the rows between.

`Pipeline` has passes of several groups of sequences under way at once. One after another enters the
first stage and goes through all of them; a stage has one pass at a time. The host serves all
stages: where it would wait for one device, it looks at the others.

    stage 0:  A . | B . | A' | B' |
    stage 1:      | A . | B  | A' |
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from ..errors import InternalError, RequestError
from ..ggml.handles import Owner
from .base import Runner, run_out
from .batch import Batch, Callback, Once, Predicate
from .boundary import Boundary, Relay
from .results import Output
from .sweep import Sweep
from .sweep_batch import HiddenReaders, SweepBatch

# Seconds without results after which the host waits for one device at a time, as it does for a
# single pass: that finds out about a device that has stopped.
_PATIENCE_S = 1.0


@dataclass
class _PipelinePass:
    """A pass: the stage where it is, what is left to launch there, and how it ended."""

    batch: Batch
    keeps_logits: bool
    at: int = 0
    work: Generator[None, None, None] | None = None
    output: Output | None = None
    error: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self.output is not None or self.error is not None


@dataclass
class PipelineCounts:
    """How well the stages were used.

    passes: that have ended. seconds: in which passes were in flight. busy_s: of them, for each
    stage, those between a launch and the moment when the host saw its end. That is more than its
    device computed where a pass is one graph, which is launched before its rows are there.
    """

    passes: int = 0
    seconds: float = 0.0
    busy_s: list[float] = field(default_factory=list)

    @property
    def bubbles(self) -> float:
        """Share of the time in which a stage had no work, the mean of all stages."""
        whole = self.seconds * len(self.busy_s)
        return max(0.0, 1.0 - sum(self.busy_s) / whole) if whole else 0.0


class Pipeline:
    """The passes in flight: `submit` starts one, `collect` returns the results of the oldest.

    All sequences of passes in flight differ. An error in one pass leaves the others as they are:
    the caller that collects it gets the error.
    """

    def __init__(
        self,
        parts: Sequence[Runner],
        hand_over: Callable[[int, int], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """hand_over: enqueues the copy of so many rows to a stage from the one before it."""
        self._parts, self._hand_over, self._clock = tuple(parts), hand_over, clock
        self._passes: deque[_PipelinePass] = deque()  # the oldest first
        self._began: list[float | None] = [None for _ in parts]  # of what a stage computes
        self._since = 0.0
        self._may_pause = True
        self._was_kept = False  # the logits of the pass that was collected last may be read
        self.counts = PipelineCounts(busy_s=[0.0 for _ in parts])

    @property
    def is_empty(self) -> bool:
        """Whether no pass is in flight."""
        return not self._passes

    def require_idle(self) -> None:
        """Check that one more pass may start."""
        if len(self._passes) >= len(self._parts):
            raise RequestError("each stage has a pass in flight; collect the oldest one first")

    def submit(
        self, batch: Batch, cancelled: Predicate = lambda: False, begins: Callback = lambda: None,
        keeps_logits: bool = False,
    ) -> None:  # fmt: skip
        """Start a pass in the first stage, and have earlier ones go on.

        Errors as in `Runner.submit`, of this pass. keeps_logits: after `collect`, `Runner.logits`
        has its rows until the next call here: they are copied before a pass enters the last stage,
        or if there is no memory for that, none enters before.
        """
        self.require_idle()
        self._release()
        for part in self._parts:
            part.results.is_watched = True
        if not self._passes:
            self._since = self._clock()
        self._clear_first()
        entry = _PipelinePass(batch, keeps_logits)
        self._enter(entry, 0, cancelled, begins)
        self._passes.append(entry)
        self._step(entry)
        if entry.error:
            self._passes.pop()
            raise entry.error

    def _clear_first(self) -> None:
        end = self._clock() + _PATIENCE_S
        while any(entry.at == 0 and not entry.is_done for entry in self._passes):
            self._turn()
            self._may_pause = self._clock() < end
        self._may_pause = True

    def _enter(self, entry: _PipelinePass, i: int, cancelled: Predicate, begins: Callback) -> None:
        """Begin a pass in a stage; the one before it has left."""
        part = self._parts[i]
        self._leave(i)
        try:
            shape = part.prepare(entry.batch)
            part.fill(entry.batch, shape)
            if i:
                self._hand_over(i, entry.batch.tokens.size)
        except BaseException:
            part.give_up()
            raise
        entry.at, self._began[i] = i, self._clock()
        entry.work = part.launch(entry.batch, shape, cancelled, begins, lambda: self._may_pause)

    def _leave(self, i: int) -> None:
        """Wait until a stage has computed what it was given, unless its results were read."""
        if self._parts[i].pending:
            self._parts[i].collect()
        self._ended(i)

    def _ended(self, i: int) -> None:
        """Note that a stage was seen to have ended its work."""
        began, self._began[i] = self._began[i], None
        if began is not None:
            self.counts.busy_s[i] += self._clock() - began

    def _turn(self, wanted: _PipelinePass | None = None) -> None:
        """Have each pass go on as far as it can without waiting, the oldest first.

        wanted: whose results are waited for, if there is nothing else to do.
        """
        for entry in self._passes:
            if entry.is_done:
                continue
            if entry.work:
                self._step(entry)
            if entry.work is None and not entry.is_done:
                self._go_on(entry, wanted)

    def _step(self, entry: _PipelinePass) -> None:
        try:
            if entry.work and next(entry.work, self) is self:  # at its end
                entry.work = None
                part = self._parts[entry.at]
                if part.mode == "layered" and entry.at < len(self._parts) - 1:
                    self._ended(entry.at)  # it has read what the last layer chose
        except Exception as error:  # noqa: BLE001 - the one that collects the pass gets it
            self._fail(entry, error)

    def _fail(self, entry: _PipelinePass, error: Exception) -> None:
        if entry.work:
            entry.work.close()
        entry.work, entry.error = None, error
        part = self._parts[entry.at]
        part.give_up()
        self._ended(entry.at)

    def _go_on(self, entry: _PipelinePass, wanted: _PipelinePass | None) -> None:
        """Have a pass that is launched in its stage enter the next one, or end."""
        i, last = entry.at + 1, len(self._parts) - 1
        if entry.at == last:
            is_last_work = not (self._may_pause and any(other.work for other in self._passes))
            if (entry is wanted and is_last_work) or self._parts[last].results.have_arrived():
                self._end(entry)
            return
        is_taken = any(other.at == i and not other.is_done for other in self._passes)
        if is_taken or (i == last and not self._may_enter_last()):
            return
        try:
            self._enter(entry, i, lambda: False, lambda: None)
        except Exception as error:  # noqa: BLE001
            self._fail(entry, error)
        else:
            self._step(entry)

    def _may_enter_last(self) -> bool:
        """Whether the logits of the pass before are not wanted, or a copy of them is kept."""
        if any(entry.is_done and entry.keeps_logits for entry in self._passes):
            return False  # they will be wanted
        if self._was_kept and self._parts[-1].results.keep():
            self._was_kept = False
        return not self._was_kept

    def _release(self) -> None:
        """Note that the logits of the pass that was collected last are not wanted any more."""
        self._was_kept = False
        self._parts[-1].results.release()

    def _end(self, entry: _PipelinePass) -> None:
        try:
            entry.output = self._parts[-1].collect()
        except Exception as error:  # noqa: BLE001
            entry.error = error
        self._ended(entry.at)

    def collect(self) -> Output:
        """Wait for the oldest pass, return its results, and have the others go on.

        Errors are those of this pass; it is not in flight any more.
        """
        if not self._passes:
            raise RequestError("no pass is in flight; submit one first")
        self._release()
        oldest = self._passes[0]
        self._run(oldest)
        self._passes.popleft()
        self._was_kept = oldest.keeps_logits
        self.counts.passes += 1
        if self._passes:
            self._turn()
        else:
            for i in range(len(self._parts)):
                self._leave(i)
        now = self._clock()
        self.counts.seconds, self._since = self.counts.seconds + now - self._since, now
        if oldest.error:
            raise oldest.error
        if oldest.output is None:
            raise InternalError("a pass ended without results")
        return oldest.output

    def _run(self, entry: _PipelinePass) -> None:
        end = self._clock() + _PATIENCE_S
        while not entry.is_done:
            is_alone = all(other.is_done for other in self._passes if other is not entry)
            self._may_pause = not is_alone and self._clock() < end
            self._turn(entry)
        self._may_pause = True

    def drop(self, slot: int) -> None:
        """Have a sequence not be in flight; the results of all passes are kept, logits are not."""
        if any(slot in entry.batch.slots for entry in self._passes):
            self._release()
            for entry in self._passes:
                entry.keeps_logits = False
            for entry in self._passes:
                self._run(entry)

    def give_up(self) -> None:
        """Wait for all passes, and forget them."""
        while self._passes:
            entry = self._passes.pop()
            self._fail(entry, RequestError("the pass was given up"))
        for i in range(len(self._parts)):
            self._parts[i].give_up()
            self._ended(i)


class StagedRunner(Owner):
    """Runs passes over consecutive stages, one pass at a time; used like a `Runner`.

    A pass is enqueued on all devices before the host waits, unless a stage may lack experts. Every
    stage keeps its own graphs and experts; the sequences are one, and the last stage's passes and
    commits record what they hold. After an error in any stage no pass is in flight in any of them.

    parts: the runners of the stages, in order of layers. pipeline: passes of several groups at
    once, instead of one; no drafter reads them. hand_over: enqueues the copy of so many rows to a
    stage from the one before. sequences, hp: of the whole model. device: of the last stage, which
    has the results. n_ubatch, max_rows: as of each part. mode: 'whole' if each stage computes a
    pass as one graph, else 'layered'.
    """

    def __init__(self, parts: Sequence[Runner]) -> None:
        """Take the runners, which the caller closes after this."""
        self.parts = tuple(parts)
        self._last = last = self.parts[-1]
        self.sequences, self.hp, self.device = last.sequences, last.hp, last.device
        self.n_ubatch, self.max_rows = last.n_ubatch, last.max_rows
        is_whole = all(part.mode == "whole" for part in self.parts)
        self.mode = "whole" if is_whole else "layered"
        self._boundaries = [
            self.own(Boundary(before.device, after.device))
            for before, after in zip(self.parts, self.parts[1:])
        ]
        self._relays: dict[int, Relay] = {}  # of stages whose hidden states a drafter wants
        for i, part in enumerate(self.parts[:-1]):
            n_rows = part.sweeps.memory.n_rows
            if not {*part.stage.layers}.isdisjoint(last.stage.hidden_states.layers):
                self._relays[i] = self.own(Relay(part.stage, last.stage, n_rows))
        n_bytes = 4 * self.hp.n_embd
        self.hand_over = partial(_hand_over, self.parts, self._boundaries, n_bytes)
        self.pipeline = Pipeline(self.parts, self.hand_over)

    @property
    def n_built(self) -> int:
        """Return how many graphs were built."""
        return sum(part.n_built for part in self.parts)

    @property
    def lines(self) -> list[str]:
        """Return how rows come from each stage to the next one, a line each."""
        return list(dict.fromkeys(boundary.line() for boundary in self._boundaries))

    def require_idle(self) -> None:
        """Check that no pass is in flight; see `Runner.require_idle`."""
        if not self.pipeline.is_empty:
            raise RequestError("passes of groups are in flight; collect their results first")
        self._last.require_idle()

    def drop(self, slot: int) -> None:
        """Forget a sequence's verified rows, and its results in flight; see `Runner.drop`."""
        self.pipeline.drop(slot)
        for part in self.parts:
            part.drop(slot)

    def give_up(self) -> None:
        """Wait for all passes in flight, if there are any, and forget their results."""
        self.pipeline.give_up()
        for part in self.parts:
            part.give_up()

    def submit(
        self, batch: Batch, cancelled: Predicate = lambda: False, begins: Callback = lambda: None,
        meanwhile: Once | None = None,
    ) -> None:  # fmt: skip
        """Start a pass; see `Runner.submit`."""
        self.require_idle()
        try:
            shapes = []
            for part in self.parts:
                part.give_up()  # left there if the clean-up of an earlier pass was interrupted
                shapes.append(part.prepare(batch))
            for part, shape in zip(self.parts, shapes):  # before the host may wait for a stage
                part.fill(batch, shape)
            for i, (part, shape) in enumerate(zip(self.parts, shapes)):
                if i:
                    self.hand_over(i, batch.tokens.size)
                run_out(part, batch, shape, cancelled, bool if i else begins, meanwhile)
                if i in self._relays:
                    self._relays[i].bring(batch.tokens.size)
        except BaseException:
            for part in self.parts:
                part.give_up()
            raise

    def collect(self) -> Output:
        """Wait for the pass in flight and return its results; see `Runner.collect`."""
        try:
            for part in self.parts:
                output = part.collect()
        except BaseException:
            self.give_up()
            raise
        return output

    def commit(
        self, paths: Mapping[int, list[int]], begins: Callback = lambda: None
    ) -> dict[int, list[int]]:
        """Enqueue the commit of verified rows in all stages; see `Runner.commit`."""
        tokens: dict[int, list[int]] = {}
        for i, part in enumerate(self.parts):
            tokens = part.commit(paths, (lambda: None) if i else begins)
        return tokens

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return the logits of a row of the pass that was collected last; see `Runner.logits`."""
        return self._last.logits(row)

    def sweep(self, *batches: SweepBatch) -> Sweep:
        """Return a sweep over prompts; see `Runner.sweep`."""
        readers: list[HiddenReaders] = [{} for _ in self.parts]
        readers[-1] = {batch.slot: batch.readers for batch in batches}
        for i, relay in self._relays.items():
            mine = self.parts[i].stage.layers
            readers[i] = {
                slot: {il: relay.relayed(reader) for il, reader in found.items() if il in mine}
                for slot, found in readers[-1].items()
            }
        each = [part.sweeps for part in self.parts]
        return Sweep(each, batches, self._boundaries, readers)


def _hand_over(
    parts: Sequence[Runner], boundaries: Sequence[Boundary], row_bytes: int, i: int, n_rows: int
) -> None:
    source, to = parts[i - 1].hidden.all, parts[i].hidden.all
    boundaries[i - 1].copy(source, to, row_bytes * n_rows)


AnyRunner = Runner | StagedRunner


def build_ahead(runner: AnyRunner, batch: Batch) -> None:
    """Build the graphs of a pass that will be submitted later, also while one is in flight."""
    for part in runner.parts:
        part.build(part.shapes.of(batch), batch.kind, batch.results)
