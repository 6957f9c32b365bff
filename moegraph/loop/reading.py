"""Reads the prompts of requests: by a sweep in slices, or in pieces that are passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..errors import InternalError, MoegraphError, PoolFull
from ..kinds import SHORT_PROMPT
from ..passes.prefixtree import n_common
from ..resident.hostcopies import StatesCopy
from ..runner import Output
from ..runner.sweep import Sweep, may_join
from ..runner.sweep_batch import SweepBatch
from .answer import Answer, Core
from .answers import Answers, Swapping
from .costs import PIECES, piece_of
from .drafting import Drafting

# Fewest rows of a chunk beside other requests, on the CPU and on a device with streams. There, a
# chunk of fewer takes hardly less time, because nearly all experts are read for it.
_CHUNK, _CHUNK_STREAMS = 8, 512

# A sweep reads several prompts only if they have at most as many rows as so many chunks. Prompts
# fill one chunk poorly, and several chunks well; missing experts cross once for all.
_JOINT_CHUNKS = 4
# Most prompts of a sweep; 1: each is read alone.
_MOST_PROMPTS = 32
# A prompt that shares more than so many tokens with another one waits until that is read.
_SHARED = 64


class Reading:
    """The prompts of a loop: one sweep may be under way, and one prompt in pieces.

    Every method is called on the engine's thread.
    """

    def __init__(
        self, core: Core, answers: Answers, drafting: Drafting | None, swapping: Swapping
    ) -> None:
        self._passes, self._prefixes, self._runner = core.passes, core.prefixes, core.runner
        self._file, self._n_ubatch = core.file, core.runner.n_ubatch
        self._memory = memory = core.runner.parts[0].sweeps.memory
        self._hidden = core.stage.hidden_states
        self._n_sweep, self._n_chunks = memory.n_rows, memory.inputs.n_chunks
        self._sequences = core.runner.sequences
        self._n_joint = min(self._n_ubatch * _JOINT_CHUNKS, self._n_sweep)
        self._streams = core.stage.device.can.streams
        # a device with streams has graphs for few lengths, and missing experts are sent for parts
        rings = [part.sweeps.ring for part in core.runner.parts]
        self._sweeps_few = not self._streams and not any(rings)
        # each length has graphs of its own, and to build those takes longer than some more rows
        self._rounds = self._streams and core.passes.n_seq > 1
        self._answers, self._tally = answers, answers.tally
        self._tally.costs.is_rounded = self._rounds
        self._drafting, self._swapping = drafting, swapping

    def n_rest(self, answer: Answer) -> int:
        """Return how many tokens of a prompt are left to read; an estimate before it begins."""
        if answer.n_rest is None:
            known = [0]
            if answer.request.reuse:
                idle = set(self._answers.idle_slots()) - self._answers.worthless
                known = [self._n_kept(slot, answer) for slot in idle] or [0]
                known.append(self._prefixes.n_saved(answer.ids, answer.request.owner))
            answer.n_rest = _n_rest(answer, max(known))
        return answer.n_rest

    def _n_kept(self, slot: int, answer: Answer) -> int:
        """Return how many tokens a slot holds, if the prompt goes on after all of them."""
        n_held = len(self._passes.held(slot))
        n_same = self._prefixes.n_common(slot, answer.ids, answer.request.owner)
        return n_held if n_same == n_held < len(answer.ids) else 0

    @property
    def n_left(self) -> int:
        """Return how many rows of the prompts in the sweep are left."""
        return sum(self.n_rest(answer) for answer in self._answers.sweeping)

    def begin(self, answer: Answer, others: Sequence[Answer] = ()) -> None:
        """Give a request a slot and begin its prompt, as a sweep or in pieces.

        others: wait too; the sweep takes along what fits of them. A prompt that is longer than it
        seemed waits, if another sweep is under way.
        """
        group: dict[Answer, SweepBatch] = {}
        is_sweeping = bool(self._answers.sweeping)
        try:
            batch = self._enter(answer, PIECES[-1] if is_sweeping else None)
            if batch is None:
                return
            group[answer] = batch
            if not is_sweeping:
                self._join(group, others)
            is_alone = len(group) == 1 and not batch.pictures
            if is_sweeping or (is_alone and self._is_piece(len(batch.tokens))):
                answer.rest = batch
                return
            with self._answers.cancelling(*group):
                self._answers.sweeping = list(group)
                self._begin_sweep(group)
        except PoolFull as error:
            if not is_sweeping:
                self._answers.sweeping = []
            for one in group or [answer]:
                self._answers.leave_slot(one)
            if self._answers.n_busy:
                raise
            self._answers.failed([answer], error)
        except MoegraphError as error:
            self._answers.failed(list(group) or [answer], error)

    def _is_piece(self, n_rows: int) -> bool:
        """Return whether a prompt is so short that it is read as one pass.

        Unless others wait for that too long, and a sweep costs no more.
        """
        if n_rows > SHORT_PROMPT:
            return False
        costs, n_others = self._tally.costs, self._answers.n_busy - 1
        if not (self._sweeps_few and n_others):
            return True
        piece_s, pass_s = costs.seconds(piece_of(n_rows)), costs.pass_s(n_others)
        return None not in (piece_s, pass_s) and (piece_s or 0.0) <= costs.share * (pass_s or 0.0)

    def _enter(self, answer: Answer, most: int | None) -> SweepBatch | None:
        """Give a request a slot, which holds what is known of its prompt; return the rest of it.

        None: it has more than `most` tokens, and the request has no slot; or nothing is left.
        """
        known, worthless = answer.ids, self._answers.worthless
        if not answer.request.reuse:
            known = known[:0]
        idle = self._answers.idle_slots()
        empty = [slot for slot in idle if slot in worthless][:1]
        for slot in empty:
            self._swapping.empty(slot)
        others = [slot for slot in idle if slot not in worthless]
        slot = self._prefixes.choose(known, [*empty, *others], answer.request.owner)
        self._swapping.make_room(answer, slot)
        batch, marks = self._batch(answer, slot)
        n = len(batch.tokens)
        answer.n_rest = n_rest = _n_rest(answer, len(answer.ids) - n)
        if most is not None and n_rest > most:
            return None
        answer.marks = marks
        self._answers.enter_slot(answer, slot)
        answer.begin(len(self._passes.held(slot)))
        try:
            if self._drafting:
                self._drafting.begin(slot, self._passes.held(slot))
            self._swapping.reserve(answer)
        except PoolFull:
            self._answers.leave_slot(answer)
            raise
        if not n:
            self._was_read(answer, [])
        return batch if n else None

    def _join(self, group: dict[Answer, SweepBatch], others: Sequence[Answer]) -> None:
        """Add others to a group whose prompts one sweep is going to read, as far as they fit."""
        for other in others:
            if len(group) == _MOST_PROMPTS:
                break
            n_left = self._n_joint - sum(len(batch.tokens) for batch in group.values())
            if self.n_rest(other) > n_left or any(self._shares(other, one) for one in group):
                continue
            try:
                batch = self._enter(other, n_left)
            except PoolFull:
                break
            except MoegraphError as error:
                self._answers.failed([other], error)
                continue
            if batch is not None:
                group[other] = batch
        # asked once for all, because each question takes the longer the more prompts there are
        while len(group) > 1 and not may_join(self._memory, list(group.values()), self._sequences):
            self._answers.leave_slot(group.popitem()[0])

    def _shares(self, answer: Answer, other: Answer) -> bool:
        """Return whether a prompt can go on from what is read of another one."""
        if not (answer.request.reuse and other.request.reuse and self._prefixes.store.is_on):
            return False
        if answer.request.owner != other.request.owner:
            return False
        n_cached = len(answer.ids) - self.n_rest(answer)
        return n_common(answer.ids, other.ids) > n_cached + _SHARED

    def _chunk_rows(self, batches: Sequence[SweepBatch]) -> int:
        """Return the rows of a chunk beside other requests: so few that steps take a short time.

        But not so few that the chunks would need one more sweep.
        """
        n_rows = sum(len(batch.tokens) for batch in batches)
        n_chunks = self._n_chunks - sum(len(batch.cuts) + 1 for batch in batches)
        least = _CHUNK_STREAMS if self._streams else _CHUNK
        least = max(least, -(-min(n_rows, self._n_sweep) // max(n_chunks, 1)))
        n_busy = self._answers.n_busy - len(batches)
        n_kv = max(len(self._passes.held(one.slot)) + len(one.tokens) for one in batches)
        most = min(self._n_ubatch, n_rows)
        costs = self._tally.costs
        most_s = costs.prompt_share(len(batches), n_busy) * (costs.pass_s(n_busy) or math.inf)
        return costs.chunk_rows(most, least, n_kv, most_s)

    def _begin_sweep(self, group: dict[Answer, SweepBatch]) -> None:
        """Begin the sweep of some prompts.

        Of a single one it reads as much as one sweep can have; the rest comes after it. A prompt
        that is cancelled leaves its sequence with what earlier sweeps have read.
        """
        batches = list(group.values())
        if self._answers.n_busy > len(group):
            max_rows = self._chunk_rows(batches)
            batches = [replace(batch, max_rows=max_rows) for batch in batches]
        if len(group) == 1:
            (answer,) = group
            batches = [self._first_part(answer, batches[0], self._n_sweep)]
        if self._drafting:
            batches = [self._drafting.with_readers(batch) for batch in batches]
        sweep = self._passes.begin_prompts(batches)
        for answer, swept in zip(group, sweep.prompts):
            answer.sweep, answer.swept = sweep, swept
        self._tally.costs.upcoming = sweep.upcoming

    def _first_part(self, answer: Answer, batch: SweepBatch, n: int) -> SweepBatch:
        """Return at most n tokens of a prompt; `answer.rest` is what comes later."""
        n_past = len(self._passes.held(answer.slot))
        answer.rest = None
        if len(batch.tokens) <= n:
            return batch
        later = tuple(cut for cut in batch.cuts if cut > n_past + n)
        cuts = tuple(cut for cut in batch.cuts if cut < n_past + n)
        answer.rest = replace(batch, tokens=batch.tokens[n:], cuts=later)
        return replace(batch, tokens=batch.tokens[:n], cuts=cuts, greedy=True, draws=None)

    def _batch(self, answer: Answer, slot: int) -> tuple[SweepBatch, list[int]]:
        """Have a slot hold what is known of a prompt; return the rest of it, and its marks."""
        self._file.check_unchanged()
        ids, request, choice = answer.ids, answer.request, answer.choice
        n_cached, marks = 0, list[int]()
        if request.reuse:
            n_cached = self._prefixes.resume(slot, ids, request.owner)
            marks = self._prefixes.begin(ids, request.marks, n_cached, request.owner)
        else:
            self._swapping.empty(slot)
            self._prefixes.own(slot, request.owner)
        last = len(ids) - 1
        is_read = choice.keep_logits or answer.is_drawn or answer.pictures or not last
        answer.decodes_last = not is_read and (last == n_cached or last in marks)
        end = len(ids) - answer.decodes_last
        cuts = tuple(mark for mark in marks if n_cached < mark < end)
        words = None if answer.decodes_last else choice.draw_words()
        draws = None if words is None else words[None]
        rest, greedy = ids[n_cached:end], choice.greedy or answer.decodes_last
        keeps = choice.keep_logits and not answer.asked  # rows of a shift were given before
        pictures = answer.pictures if answer.pictures and answer.pictures.end > n_cached else None
        return SweepBatch(
            rest, slot, keeps, greedy, draws, cuts, is_rounded=self._rounds, pictures=pictures
        ), marks

    def read(self, seconds: float) -> float | None:
        """Run a step of the sweep that is under way, and more if they take so long in all.

        None comes after a step that built graphs: what these take is not in the expected time.
        Return what such steps take; None: not known, so others go first now.
        """
        group, costs = list(self._answers.sweeping), self._tally.costs
        sweep = group[0].sweep if group else None
        if sweep is None:
            raise InternalError("a prompt that is not under way was to be read")
        expected_s, more = costs.step_s, True
        took_s = expected_s or 0.0
        try:
            with self._answers.cancelling(*group):
                while more:
                    n_built = self._runner.n_built
                    more = self._step(sweep, group)
                    costs.upcoming = step = sweep.upcoming
                    next_s = costs.step_s if step else None
                    if n_built != self._runner.n_built:
                        expected_s = None
                        break
                    if next_s is None or took_s + next_s > seconds:
                        break
                    took_s += next_s
                if not (more and self._streams):
                    self._tally.end_round()
                if not more and (rest := group[0].rest):
                    self._keep(group[0], sweep.prompts[0].saved, group[0].marks)
                    self._begin_sweep({group[0]: rest})
                    more = True
            for answer in group:
                self._note(answer, more)
        except MoegraphError as error:
            self._answers.failed(group, error)
        return None if expected_s is None else took_s

    def _step(self, sweep: Sweep, group: Sequence[Answer]) -> bool:
        """Run a step; return whether there are more."""
        step = sweep.upcoming
        more = self._passes.step_prompt(sweep, group[0].cancel if len(group) == 1 else None)
        self._answers.n_failures = 0
        if step:
            self._tally.stepped(step)
        for answer in group:
            output = answer.swept.output if answer.swept and not answer.rest else None
            if output and answer.generated.n_generated == answer.n_before:
                self._pick(answer, output)
        self._answers.tell()  # the device may be computing by now
        return more

    def _pick(self, answer: Answer, output: Output) -> None:
        """Draw the first token, before other results take the place of these."""
        if not (answer.is_drawn or answer.decodes_last):  # otherwise it comes later, or none does
            self._answers.guard(answer, lambda: self._answers.pick(answer, output, -1))
        elif answer.wants_logits and not answer.generated.tokens:
            answer.prompt_logits = output.logits

    def _note(self, answer: Answer, more: bool) -> None:
        """Note how far the sweep of a prompt has come; more: it goes on."""
        sweep, swept = answer.sweep, answer.swept
        if answer.is_over and not more:  # meanwhile
            self._answers.leave(answer)
        elif sweep and swept and more:
            n_read = swept.n_past + len(swept.batch.tokens) * sweep.n_done // sweep.n_steps
            answer.n_read = max(answer.n_read, n_read)  # chunks may have become shorter
            answer.n_rest = len(answer.ids) - answer.n_read
            answer.tell_progress()
        elif swept and swept.error:
            self._answers.end(answer, "error", swept.error)
        elif swept:
            self._was_read(answer, swept.saved)

    def read_piece(self, answer: Answer, n_rows: int) -> float:
        """Read some rows of a prompt as one pass, up to the next mark; return the seconds."""
        batch = answer.rest
        if batch is None:
            raise InternalError("a prompt that is not under way was to be read")
        slot, n_held = answer.slot, len(self._passes.held(answer.slot))
        most = min(self._n_ubatch, self._hidden.n_rows) if self._hidden.layers else self._n_ubatch
        n = min([n_rows, most, *(cut - n_held for cut in batch.cuts)])
        if self._rounds:
            n = 1 << (min(n, len(batch.tokens)).bit_length() - 1)
        piece = replace(self._first_part(answer, batch, n), as_pass=True)
        self._answers.tell()
        try:
            with self._answers.cancelling(answer):
                output, _ = self._passes.read(piece, answer.cancel)
            if self._drafting:
                self._drafting.took(slot, piece.tokens.tolist())
        except MoegraphError as error:
            self._answers.failed([answer], error)
            return 0.0
        answer.n_read, answer.n_rest = n_held + n, len(batch.tokens) - n
        if not answer.rest:
            self._pick(answer, output)
            self._was_read(answer, [])
        else:
            self._keep(answer, [], answer.marks)
            answer.tell_progress()
        return self._tally.end_piece(n)

    def _was_read(self, answer: Answer, saved: list[StatesCopy]) -> None:
        """Note that a prompt is read, and keep beginnings of it."""
        answers = self._answers
        answers.n_failures = 0
        answers.swept(answer)
        answer.n_read = len(answer.ids)
        answer.tell_progress()
        answers.note_drawn(answer)
        self._keep(answer, saved, answer.marks)
        answers.read.append(answer)

    def _keep(self, answer: Answer, saved: list[StatesCopy], marks: Sequence[int]) -> None:
        """Keep the beginnings of a prompt at the marks that its sequence has reached."""
        for states in saved:
            self._prefixes.save(answer.slot, states)
        if len(self._passes.held(answer.slot)) in marks:
            self._prefixes.save(answer.slot)


def _n_rest(answer: Answer, n_known: int) -> int:
    """Return how many tokens are left to read; with pictures among them, too many for pieces."""
    n = len(answer.ids) - n_known
    has_pictures = answer.pictures is not None and answer.pictures.end > n_known
    return max(n, PIECES[-1] + 1) if has_pictures else n
