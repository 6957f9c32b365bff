"""The loop: carries out what the scheduler says, a step at a time, on one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ..errors import InternalError, MoegraphError, PoolFull
from .answer import Answer, Core
from .answers import Answers, Swapping
from .costs import MEASURED_SHARE, Tally
from .decoding import Decoding
from .drafting import Drafting
from .reading import Reading
from .scheduler import At, Begin, Decode, Piece, Preempt, Read, Restore, Scheduler, Work

# What is called with the idle slots, or with None at the end; it returns whether it is done.
Call = Callable[["list[int] | None"], bool]


class Loop:
    """Answers requests with one model: `add` them, then `step` again and again.

    A step takes the results of the pass in flight, has the scheduler say what is next, and starts
    that. So the device computes between two steps. One thread makes the steps; others may call
    `add`, `cancel` and what they need of the scheduler, with the lock.

    answers: the requests that have a slot. tally: what was done, and how long it took.
    """

    def __init__(self, core: Core, n_slots: int, n_waiting: int = 0) -> None:
        """n_slots: sequences for requests, from the first one on. n_waiting: see `Scheduler`."""
        self.lock = threading.Condition()
        self.scheduler = scheduler = Scheduler[Answer](n_slots, n_waiting)
        runner, streams = core.runner, core.stage.device.can.streams
        if not streams:
            scheduler.costs.share = MEASURED_SHARE
        self.tally = Tally(scheduler.costs, runner)
        self.answers = Answers(core.passes, core.devices, n_slots, self.tally)
        self._drafting = Drafting(core.speculation, streams) if core.speculation else None
        self._swapping = Swapping(core, self.answers)
        self._reading = Reading(core, self.answers, self._drafting, self._swapping)
        self._decoding = Decoding(core, self.answers, self._drafting)
        self._to_cancel: list[Answer] = []
        self._calls: list[Call] = []
        self._has_news = False  # a request was added or cancelled
        self._again: Decode[Answer] | None = None  # what is next, unless something happens

    @property
    def has_work(self) -> bool:
        """Whether there are requests; ask with the lock."""
        return bool(self._to_cancel or self._calls or self.scheduler.requests())

    def add(self, answer: Answer) -> None:
        """Accept a request."""
        with self.lock:
            self.scheduler.add(answer)
            self._has_news = True
            self.lock.notify_all()

    def cancel(self, answer: Answer) -> None:
        """End a request soon."""
        with self.lock:
            answer.cancel.set()
            self._to_cancel.append(answer)
            self._has_news = True
            self.lock.notify_all()

    def call(self, call: Call) -> None:
        """Have the thread call something between passes until it returns True."""
        with self.lock:
            self._calls.append(call)
            self._has_news = True
            self.lock.notify_all()

    def step(self) -> bool:
        """Take the results of the pass in flight and start the next; False: there is none."""
        self._decoding.finish_pass()
        again = self._again
        if again and not (self._has_news or self.answers.left or self.answers.full):
            self._decode(again.keys)
            return True
        self.tally.learn()
        if again:
            self.scheduler.decoded(len(again.keys))
        work = self._schedule()
        if isinstance(work, Decode):
            self._decode(work.keys)
            return True
        self._decoding.finish_passes()
        return self._do(work)

    def _schedule(self) -> Work[Answer]:
        """Return what is next."""
        scheduler = self.scheduler
        with self.lock:
            requests = scheduler.requests()
        for answer in requests:  # without the lock, because it may look into files
            self._reading.n_rest(answer)
        late = [answer for answer in requests if answer.is_late and not answer.is_over]
        with self.lock:
            self._has_news = False
            cancelled, self._to_cancel = self._to_cancel, []
            n_calls = len(self._calls)
        if cancelled or late or n_calls or self.answers.full:
            self._decoding.finish_passes()
        for answer in cancelled:
            self.answers.end(answer, "cancelled")
        for answer in late:
            self.answers.end(answer, "deadline")
        for _ in range(n_calls):
            call = self._calls.pop(0)  # if it fails, `end_all` tells the others
            if not call(self.answers.idle_slots()):
                self._calls.append(call)
        full = self._shift()
        with self.lock:
            self.note_done()
            for answer in full:
                scheduler.put(answer, At.WAITS)
            work = scheduler.next(self._reading.n_rest, self._swapping.fits)
            is_same = scheduler.only_decodes and not any(one.request.deadline_s for one in requests)
            self._again = work if isinstance(work, Decode) and is_same else None
        return work

    def _shift(self) -> list[Answer]:
        """Shift the contexts that are full; return their requests, which wait for a slot again."""
        answers = self.answers
        full, answers.full = [answer for answer in answers.full if not answer.is_over], []
        for answer in full:
            answer.shift()
            answers.leave_slot(answer)
            answers.worthless.add(answer.slot)  # nobody goes on after what was dropped
            self._reading.n_rest(answer)
        return full

    def note_done(self) -> None:
        """Tell the scheduler which prompts are read and which requests need no more work."""
        read, left = self.answers.read, self.answers.left
        while read:
            self.scheduler.put(read.pop(0), At.DECODES)
        while left:
            self.scheduler.end(left.pop(0))

    def _do(self, work: Work[Answer]) -> bool:
        """Do work that is not a decode pass; return whether there was any."""
        if isinstance(work, Read):
            self._read(work.seconds)
        elif isinstance(work, Piece):
            seconds = self._reading.read_piece(work.key, work.n_rows)
            self.scheduler.took_piece(seconds)
        elif isinstance(work, Begin):
            self._begin(work.key, work.others)
        elif isinstance(work, Preempt):
            self._preempt(work.key)
        elif isinstance(work, Restore):
            self._restore(work.key)
        else:
            self.answers.tell()
            self.tally.begin_round()
            return bool(self.answers.left)
        return True

    def _begin(self, answer: Answer, others: Sequence[Answer]) -> None:
        self.answers.tell()
        try:
            self._reading.begin(answer, others)
        except PoolFull:
            with self.lock:
                self.scheduler.hold()
        self.tally.pause()  # else a pass would seem to take as long as this
        with self.lock:
            if answer.sweep:
                self.scheduler.began(self._reading.n_left, self.answers.sweeping)
            elif answer.rest:
                self.scheduler.put(answer, At.PIECES)

    def _read(self, seconds: float) -> None:
        start = time.perf_counter()
        took_s = self._reading.read(seconds)
        self.scheduler.swept(self._reading.n_left, took_s, time.perf_counter() - start)

    def _decode(self, keys: Sequence[Answer]) -> None:
        """Start the next pass; if memory is short, the youngest requests are left out of it."""
        decoding, scheduler = self._decoding, self.scheduler
        batch = decoding.ready(keys)
        if not batch:
            scheduler.waited()
            self.tally.begin_round()
        if decoding.groups and batch:
            if scheduler.only_decodes and decoding.decode_groups(batch):
                return
            decoding.finish_passes()
            batch = decoding.ready(batch)
        while batch:
            try:
                decoding.start(batch)
                break
            except PoolFull:
                batch = self._make_room(batch)
        if batch and not self._again:  # else the last one is noted, which earns as much
            scheduler.decoded(len(batch))

    def _make_room(self, batch: list[Answer]) -> list[Answer]:
        """Return those of some requests that can take a row each, once others have made room."""
        self._decoding.finish_pass()
        batch = self._decoding.ready(batch)
        while batch and not self._swapping.has_room(batch):
            youngest = max(batch, key=lambda answer: answer.submitted)
            batch.remove(youngest)
            self._preempt(youngest)
        return batch

    def _preempt(self, answer: Answer) -> None:
        self._again = None
        if self._drafting:
            self._drafting.settle()
        self.answers.tell()
        if self._swapping.swap_out(answer):
            with self.lock:
                self.scheduler.put(answer, At.MOVED)
        self.tally.begin_round()

    def _restore(self, answer: Answer) -> None:
        self.answers.tell()
        try:
            self._swapping.swap_in(answer)
            with self.lock:
                self.scheduler.put(answer, At.DECODES)
        except PoolFull:
            with self.lock:
                self.scheduler.hold()
        self.tally.begin_round()

    def end_all(self, error: MoegraphError) -> None:
        """End every request with an error, whatever has happened."""
        for work in (self._decoding.give_up, self.answers.tell):
            with suppress(Exception):  # what ended the loop may come again
                work()
        for answer in self.scheduler.requests():
            with suppress(Exception):
                self.answers.end(answer, "error", error)
            answer.end("error", error)  # if it was not told
        for call in self._calls:
            call(None)
        with self.lock:
            self.note_done()

    def finish(self, answer: Answer) -> None:
        """Step until a request has ended, which was asked for."""
        while not answer.is_over:
            if not self.step():
                raise InternalError("a request that was to end has not ended")
