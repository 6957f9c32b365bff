"""Reads the prompts of a service: by a sweep in slices, or in pieces that are passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InternalError, MoegraphError, PoolFull
from ..kinds import SHORT_PROMPT
from ..resident.hostcopies import StatesCopy
from ..runner import Output
from ..runner.sweep import Sweep
from ..runner.sweep_batch import SweepBatch
from .answer import Answer
from .answers import Answers
from .costs import PIECES
from .drafting import Drafting
from .prefixtree import n_common
from .prompts import finished
from .swapping import Swapping

if TYPE_CHECKING:
    from .engine import Engine


# Fewest rows of a chunk beside other requests, on the CPU and on a device with streams. There, a
# chunk of fewer takes hardly less time, because nearly all experts are read for it.
_CHUNK, _CHUNK_STREAMS = 8, 512


class Reading:
    """The prompts of a service: one may be under way as a sweep, and one in pieces.

    Every method is called on the engine's thread.
    """

    def __init__(
        self, engine: Engine, answers: Answers, drafting: Drafting, swapping: Swapping
    ) -> None:
        self._passes, self._prefixes = engine.passes, engine.prefixes
        self._file, self._n_ubatch = engine.file, engine.runner.n_ubatch
        sweeps = engine.runner.parts[0].sweeps
        self._taps = engine.stage.taps
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

    def n_rest(self, answer: Answer) -> int:
        """Return how many tokens of a prompt are left to read; an estimate before it begins."""
        if answer.n_rest is None:
            known = [0]
            if answer.request.reuse:
                known = [self._n_kept(slot, answer) for slot in self._answers.idle_slots()]
                known.append(self._prefixes.n_saved(answer.ids))
            answer.n_rest = len(answer.ids) - max(known)
        return answer.n_rest

    def _n_kept(self, slot: int, answer: Answer) -> int:
        """Return how many tokens a slot holds, if the prompt goes on after all of them."""
        held = np.asarray(self._passes.held(slot), dtype=np.int32)
        goes_on = len(held) < len(answer.ids) and n_common(held, answer.ids) == len(held)
        return len(held) if goes_on else 0

    def begin(self, answer: Answer) -> None:
        """Give a request a slot and begin its prompt, as a sweep or in pieces.

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
            answer.n_rest = n = len(batch.tokens)
            is_sweeping = self._answers.sweeping is not None
            if is_sweeping and n > PIECES[-1]:
                return
            answer.marks = marks
            self._answers.enter_slot(answer, slot)
            answer.begin(len(answer.ids) - n)
            self._drafting.begin(slot, self._passes.held(slot))
            self._swapping.reserve(answer)
            if is_sweeping or n <= SHORT_PROMPT:
                answer.rest = batch
                return
            with self._answers.cancelling(answer):
                if self._answers.n_busy > 1:
                    batch = replace(batch, max_rows=self._chunk_rows(batch))
                self._answers.sweeping = answer
                self._begin_sweep(answer, batch)
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
        fewest = _CHUNK_STREAMS if self._streams else _CHUNK
        least = max(fewest, -(-min(len(batch.tokens), self._n_sweep) // max(n_chunks, 1)))
        n_busy, n_kv = self._answers.n_busy - 1, len(self._passes.held(batch.slot))
        n_kv += len(batch.tokens)
        most = min(self._n_ubatch, len(batch.tokens))
        return self._tally.costs.chunk_rows(most, least, n_busy, n_kv)

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
        self._tally.costs.upcoming = answer.sweep.upcoming

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
        words = drawing.words()
        draws = None if words is None else words[None]
        return SweepBatch(ids[n_cached:], slot, False, drawing.greedy, draws, cuts), marks

    def read(self, answer: Answer, seconds: float) -> float | None:
        """Run a step of the sweep that is under way, and more if they take so long in all.

        Return what such steps take; None: not known.

        Raises:
            MoegraphError: nothing more can be computed.
        """
        sweep, costs = answer.sweep, self._tally.costs
        if sweep is None:
            raise InternalError("a prompt that is not under way was to be read")
        expected_s, more = costs.step_s, True
        took_s = expected_s or 0.0
        try:
            with self._answers.cancelling(answer):
                while more:
                    more = self._step(sweep, answer)
                    costs.upcoming = step = sweep.upcoming
                    next_s = costs.step_s if step else None
                    if next_s is None or took_s + next_s > seconds:
                        break
                    took_s += next_s
                if not (more and self._streams):
                    self._tally.end_round()
                if not more and answer.rest:
                    self._keep(answer, sweep.saved, answer.marks)
                    self._begin_sweep(answer, answer.rest)
                    more = True
            if more and answer.sweep:
                self._note_progress(answer, answer.sweep)
            else:
                self._was_read(answer, finished(sweep), sweep.saved)
        except MoegraphError as error:
            self._answers.failed([answer], error)
        return None if expected_s is None else took_s

    def _step(self, sweep: Sweep, answer: Answer) -> bool:
        """Run a step; return whether there are more."""
        step = sweep.upcoming
        more = self._passes.step_prompt(sweep, answer.cancel)
        if step:
            self._tally.stepped(step)
        self._answers.tell()  # the device may be computing by now
        return more

    def _note_progress(self, answer: Answer, sweep: Sweep) -> None:
        n_new = len(sweep.batch.tokens)
        answer.n_read = sweep.n_past + n_new * sweep.n_done // sweep.n_steps
        answer.n_rest = len(answer.ids) - answer.n_read
        answer.tell_progress()

    def read_piece(self, answer: Answer, n_rows: int) -> float:
        """Read some rows of a prompt as one pass, up to the next mark; return what it took.

        Raises:
            MoegraphError: nothing more can be computed.
        """
        batch = answer.rest
        if batch is None:
            raise InternalError("a prompt that is not under way was to be read")
        slot, n_held = answer.slot, len(self._passes.held(answer.slot))
        most = self._taps.n_rows if self._taps.layers else self._n_ubatch
        n = min([n_rows, most, *(cut - n_held for cut in batch.cuts)])
        is_last = n >= len(batch.tokens)
        piece = replace(batch, tokens=batch.tokens[:n], cuts=(), as_pass=True)
        if not is_last:
            piece = replace(piece, greedy=True, draws=None)
        self._answers.tell()
        try:
            with self._answers.cancelling(answer):
                output, _ = self._passes.read(piece, answer.cancel)
            self._drafting.took(slot, piece.tokens.tolist())
        except MoegraphError as error:
            self._answers.failed([answer], error)
            return 0.0
        cuts = tuple(cut for cut in batch.cuts if cut > n_held + n)
        answer.rest = None if is_last else replace(batch, tokens=batch.tokens[n:], cuts=cuts)
        answer.n_read, answer.n_rest = n_held + n, len(batch.tokens) - n
        if is_last:
            self._was_read(answer, output, [])
        else:
            self._keep(answer, [], answer.marks)
            answer.tell_progress()
        return self._tally.end_piece(n)

    def _was_read(self, answer: Answer, output: Output, saved: list[StatesCopy]) -> None:
        """Draw the first token, and keep beginnings of the prompt."""
        answers = self._answers
        answers.succeeded()
        if answers.sweeping is answer:
            answers.sweeping = answer.sweep = self._tally.costs.upcoming = None
        answer.n_read = len(answer.ids)
        if answer.is_drawn:  # nothing is to be generated
            answers.keep(answer)
        else:
            answers.draw(answer, output, 0)
        self._keep(answer, saved, answer.marks)
        self._read.append(answer)

    def _keep(self, answer: Answer, saved: list[StatesCopy], marks: Sequence[int]) -> None:
        """Keep the beginnings of a prompt at the marks that its sequence has reached."""
        for states in saved:
            self._prefixes.save(answer.slot, states)
        if len(self._passes.held(answer.slot)) in marks:
            self._prefixes.save(answer.slot)
