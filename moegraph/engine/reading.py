"""Reads the prompts of a service: short ones as one pass, others by a sweep in slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InternalError, MoegraphError, PoolFull
from ..kinds import SHORT_PROMPT
from ..resident.hostcopies import StatesCopy
from ..runner import Output
from ..runner.sweep_batch import SweepBatch
from .answer import Answer
from .answers import Answers
from .drafting import Drafting
from .prefixtree import n_common
from .prompts import finished, is_short
from .swapping import Swapping

if TYPE_CHECKING:
    from .engine import Engine


class Reading:
    """The prompts of a service, of which one may be under way as a sweep.

    Every method is called on the engine's thread.
    """

    def __init__(
        self, engine: Engine, answers: Answers, drafting: Drafting, swapping: Swapping
    ) -> None:
        self._passes, self._prefixes = engine.passes, engine.prefixes
        self._file, self._n_ubatch = engine.file, engine.runner.n_ubatch
        sweeps = engine.runner.parts[0].sweeps
        self._n_sweep = sweeps.memory.n_rows if sweeps else self._n_ubatch
        self._n_chunks = sweeps.memory.inputs.n_chunks if sweeps else 1
        self._streams = engine.device.can.streams
        self._answers, self._tally = answers, answers.tally
        self._drafting, self._swapping = drafting, swapping
        self._read: list[Answer] = []

    def take_read(self) -> list[Answer]:
        """Return the requests whose prompts were read since the last call."""
        found, self._read = self._read, []
        return found

    def is_short(self, answer: Answer) -> bool:
        """Return whether a waiting request's prompt needs no sweep; an estimate."""
        if answer.n_rest is None:
            known = [0]
            if answer.request.reuse:
                known = [self._n_kept(slot, answer) for slot in self._answers.idle_slots()]
                known.append(self._prefixes.n_saved(answer.ids))
            answer.n_rest = len(answer.ids) - max(known)
        return answer.n_rest <= SHORT_PROMPT

    def _n_kept(self, slot: int, answer: Answer) -> int:
        """Return how many tokens a slot holds, if the prompt goes on after all of them."""
        held = np.asarray(self._passes.held(slot), dtype=np.int32)
        goes_on = len(held) < len(answer.ids) and n_common(held, answer.ids) == len(held)
        return len(held) if goes_on else 0

    def begin(self, answer: Answer) -> None:
        """Give a request a slot and begin its prompt, or read it if it is short.

        A prompt that is longer than it seemed waits, if another sweep is under way.

        Raises:
            PoolFull: there is no memory for it now; it waits.
            MoegraphError: nothing more can be computed.
        """
        try:
            known = answer.ids if answer.request.reuse else answer.ids[:0]
            slot = self._prefixes.choose(known, self._answers.idle_slots())
            self._swapping.make_room(answer, slot)
            batch, marks = self._batch(answer, slot)
            is_sweep = not is_short(batch, self._n_ubatch)
            if is_sweep and self._answers.n_busy:
                batch = replace(batch, max_rows=self._chunk_rows(batch))
            if is_sweep and self._answers.sweeping:
                answer.n_rest = len(batch.tokens)
                return
            self._answers.enter_slot(answer, slot)
            answer.begin(len(answer.ids) - len(batch.tokens))
            self._drafting.begin(slot, self._passes.held(slot))
            with self._answers.cancelling(answer):
                if is_sweep:
                    self._swapping.reserve(answer)
                    answer.marks, self._answers.sweeping = marks, answer
                    self._begin_sweep(answer, batch)
                    return
                output, saved = self._passes.read(batch, answer.cancel)
            self._drafting.took(slot, batch.tokens.tolist(), range(len(batch.tokens)))
            self._was_read(answer, output, saved, marks)
            self._tally.end_short()
        except PoolFull as error:
            self._answers.leave_slot(answer)
            if self._answers.n_busy:
                raise
            self._answers.failed([answer], error)
        except MoegraphError as error:
            self._answers.failed([answer], error)

    def _chunk_rows(self, batch: SweepBatch) -> int:
        """Return the rows of a chunk beside other requests: so few that steps take a short time.

        But not so few that the chunks would need one more sweep.
        """
        n_chunks = self._n_chunks - len(batch.cuts) - 1
        least = max(SHORT_PROMPT, -(-min(len(batch.tokens), self._n_sweep) // max(n_chunks, 1)))
        return self._tally.costs.chunk_rows(self._n_ubatch, least, self._answers.n_busy)

    def _begin_sweep(self, answer: Answer, batch: SweepBatch) -> None:
        """Begin the sweep of as much of a prompt as one sweep can have; the rest comes after it.

        A prompt that is cancelled leaves its sequence with what earlier sweeps have read.
        """
        n, n_past = self._n_sweep, len(self._passes.held(answer.slot))
        answer.rest = None
        if len(batch.tokens) > n:
            later = tuple(cut for cut in batch.cuts if cut > n_past + n)
            cuts = tuple(cut for cut in batch.cuts if cut < n_past + n)
            answer.rest = replace(batch, tokens=batch.tokens[n:], cuts=later)
            first = batch.tokens[:n]
            batch = replace(batch, tokens=first, cuts=cuts, greedy=True, draws=None)
        answer.sweep = self._passes.begin_prompt(self._drafting.tapped(batch))
        rows = batch.max_rows or self._n_ubatch
        self._tally.costs.begin_sweep(min(rows, len(batch.tokens)))

    def _batch(self, answer: Answer, slot: int) -> tuple[SweepBatch, list[int]]:
        """Have a slot hold what is known of a prompt; return the rest of it, and its marks."""
        self._file.check_unchanged()
        ids, request, drawing = answer.ids, answer.request, answer.drawing
        n_cached, marks = 0, list[int]()
        if request.reuse:
            n_cached = self._prefixes.resume(slot, ids)
            marks = self._prefixes.begin(ids, request.marks, n_cached)
        else:
            self._passes.reset(slot)
        cuts = tuple(mark for mark in marks if n_cached < mark < len(ids))
        if self._answers.sweeping and len(ids) - n_cached <= SHORT_PROMPT:
            cuts = ()  # they would need a sweep
        words = drawing.words()
        draws = None if words is None else words[None]
        return SweepBatch(ids[n_cached:], slot, False, drawing.greedy, draws, cuts), marks

    def read(self, answer: Answer, n_steps: int) -> None:
        """Run some steps of the sweep that is under way.

        Raises:
            MoegraphError: nothing more can be computed.
        """
        sweep = answer.sweep
        if sweep is None:
            raise InternalError("a prompt that is not under way was to be read")
        more = True
        try:
            with self._answers.cancelling(answer):
                while more and n_steps:
                    more = self._passes.step_prompt(sweep, answer.cancel)
                    self._tally.stepped()
                    n_steps -= 1
                    self._answers.tell()  # the device may be computing by now
                if not (more and self._streams):
                    self._tally.end_round()
                if not more and answer.rest:
                    self._keep(answer, sweep.saved, answer.marks)
                    self._begin_sweep(answer, answer.rest)
                    more = True
            if more and answer.sweep:
                sweep = answer.sweep
                n_new = len(sweep.batch.tokens)
                answer.n_read = sweep.n_past + n_new * sweep.n_done // sweep.n_steps
                answer.tell_progress()
            else:
                self._was_read(answer, finished(sweep), sweep.saved, answer.marks)
        except MoegraphError as error:
            self._answers.failed([answer], error)

    def _was_read(
        self, answer: Answer, output: Output, saved: list[StatesCopy], marks: Sequence[int]
    ) -> None:
        """Draw the first token, and keep beginnings of the prompt."""
        answers = self._answers
        answers.succeeded()
        if answers.sweeping is answer:
            answers.sweeping = answer.sweep = None
        answer.n_read = len(answer.ids)
        if answer.is_drawn:  # nothing is to be generated
            answers.keep(answer)
        else:
            answers.draw(answer, output, 0)
        self._keep(answer, saved, marks)
        self._read.append(answer)

    def _keep(self, answer: Answer, saved: list[StatesCopy], marks: Sequence[int]) -> None:
        """Keep the beginnings of a prompt at the marks that its sequence has reached."""
        for states in saved:
            self._prefixes.save(answer.slot, states)
        if len(self._passes.held(answer.slot)) in marks:
            self._prefixes.save(answer.slot)
