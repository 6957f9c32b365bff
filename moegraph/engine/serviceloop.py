"""The loop of a service: carries out what the scheduler says, on the engine's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import InternalError, MoegraphError, PoolFull, ServiceClosed
from ..loop.answer import Answer
from ..loop.answers import Answers
from ..loop.building import Building
from ..loop.costs import MEASURED_SHARE
from ..loop.decoding import Decoding
from ..loop.drafting import Drafting
from ..loop.reading import Reading
from ..loop.scheduler import Begin, Decode, Piece, Preempt, Read, Rest, Restore, Scheduler, Work
from ..loop.status import ServiceStatus
from ..loop.swapping import Swapping
from ..loop.tally import Tally

if TYPE_CHECKING:
    from .engine import Engine

CLOSED = "the server is ending; it takes no more requests"
# Seconds between two accounts of what the service is doing.
_STATUS_S = 0.25
# Seconds for which a pass may build graphs for later: if it is one graph, so that the host has
# nothing else to do meanwhile, and if the host has to answer each layer.
_AHEAD_S, _AHEAD_BUSY_S = 0.002, 0.0002
# Seconds for which graphs are built between two looks for requests.
_BUILD_S = 0.01


class ServiceLoop:
    """The engine's side of a service. `run` is the thread; other threads hold the lock.

    scheduler, to_cancel, is_closing: others may change them, with the lock. is_done: nothing is
    under way, and every caller was told so. failure: why the loop has ended; None if it has not, or
    was asked to. busy_since: when the work under way began; None while there is none.
    """

    def __init__(
        self, engine: Engine, scheduler: Scheduler[Answer], say: Callable[[str], object]
    ) -> None:
        """say: as in `Service`."""
        self._engine, self._say = engine, say
        self.lock = threading.Condition()
        self.scheduler = scheduler
        self.to_cancel: list[Answer] = []
        self.is_closing = self._is_resting = False
        self.failure: str | None = None
        self.busy_since: float | None = None
        if not engine.device.can.streams:
            scheduler.costs.share = MEASURED_SHARE
        self._tally = Tally(scheduler.costs, lambda: engine.runner.n_built)
        self._answers = Answers(
            engine.passes, engine.devices, engine.config.n_seq, self._tally,
            _AHEAD_S if engine.runner.mode == "whole" else _AHEAD_BUSY_S,
        )  # fmt: skip
        drafting = Drafting(engine.speculation, engine.device.can.streams)
        self._swapping = Swapping(engine.core, self._answers)
        self._reading = Reading(engine.core, self._answers, drafting, self._swapping)
        self._decoding = Decoding(engine.passes, engine.prefixes, self._answers, drafting)
        # a graph costs much only where a device captures it
        self._building = Building(engine.runner, engine.config.n_seq, engine.device.can.streams)
        self._status_at = 0.0
        self.status = self._account()

    @property
    def is_done(self) -> bool:
        """Whether every request has ended, and its caller knows; ask with the lock."""
        return self._is_resting and self.scheduler.is_idle

    def run(self) -> None:
        """Work until the service is closed or fails."""
        error: MoegraphError = ServiceClosed(CLOSED)
        try:
            self._engine.ownership.enter()
            if self._engine.prefixes.is_on:
                self._engine.copies.memory.pin_ahead()
            while self._turn():
                pass
        except MoegraphError as caught:
            error, self.failure = caught, str(caught)
        except BaseException as caught:  # noqa: BLE001 - no request may wait for ever
            error = InternalError(f"{type(caught).__name__}: {caught}")
            self.failure = str(error)
        finally:
            self._end_all(error)

    def _end_all(self, error: MoegraphError) -> None:
        with self.lock:
            self.is_closing = True
        for work in (self._decoding.give_up, self._answers.tell):
            with suppress(Exception):  # what ended the loop may come again
                work()
        for answer in self.scheduler.requests():
            with suppress(Exception):
                self._answers.end(answer, "error", error)
            answer.end("error", error)  # if it was not told
        with self.lock:
            self._note_done()
            self.lock.notify_all()
        self.busy_since = None
        self.status = self._account()
        if not self._engine.ownership.is_closed:
            self._engine.hand_over()

    def _turn(self) -> bool:
        """Do what comes next; return whether to go on."""
        with self.lock:
            fresh = [answer for answer in self.scheduler.requests() if answer.n_rest is None]
        for answer in fresh:  # without the lock, because it may look into files
            self._reading.n_rest(answer)
        with self.lock:
            if self.is_closing:
                return False
            ended = self._due()
            work: Work[Answer] = Rest()
            if not ended:
                work = self.scheduler.next(self._reading.n_rest, self._swapping.fits)
        for answer, reason in ended:
            self._answers.end(answer, reason)
        if not ended:
            self._do(work)
        with self.lock:
            self._note_done()
        if time.perf_counter() - self._status_at >= _STATUS_S:
            self._publish()
        return True

    def _publish(self) -> None:
        """Say what the service is doing, and what the engine has to say."""
        self.status = self._account()
        for line in self._engine.drain_messages():
            self._say(line)

    def _due(self) -> list[tuple[Answer, str]]:
        """Return the requests that end now, and why."""
        cancelled, self.to_cancel = self.to_cancel, []
        late = self.scheduler.due(time.perf_counter())
        return [(a, "cancelled") for a in cancelled] + [(a, "deadline") for a in late]

    def _do(self, work: Work[Answer]) -> None:
        self.busy_since = time.perf_counter()
        if isinstance(work, Decode):
            self._decode(work.keys)
            return
        self._decoding.land()
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
            self._rest()

    def _begin(self, answer: Answer, others: Sequence[Answer]) -> None:
        self._answers.tell()
        start = time.perf_counter()
        try:
            self._reading.begin(answer, others)
        except PoolFull:
            with self.lock:
                self.scheduler.hold()
        self._tally.pause()  # else a pass would seem to take as long as this
        with self.lock:
            if answer.sweep:
                n_left, seconds = self._reading.n_left, time.perf_counter() - start
                self.scheduler.began(answer, n_left, self._answers.sweeping, seconds)
            elif answer.rest:
                self.scheduler.in_pieces(answer)

    def _read(self, seconds: float) -> None:
        start = time.perf_counter()
        took_s = self._reading.read(seconds)
        self.scheduler.swept(self._reading.n_left, took_s, time.perf_counter() - start)

    def _decode(self, keys: Sequence[Answer]) -> None:
        """Run the next pass; if memory is short, the youngest requests are left out of it."""
        batch = self._decoding.ready(keys)
        if not batch:
            self.scheduler.waited()
            self._tally.begin_round()
        if self.scheduler.only_decodes and batch:
            if self._decoding.decode_groups(batch):
                self.scheduler.decoded(len(batch))
                return
        else:
            self._decoding.land()
            batch = [answer for answer in batch if not (answer.is_over or answer.is_drawn)]
        while batch and not self._swapping.has_room(batch):
            youngest = max(batch, key=lambda answer: answer.submitted)
            batch.remove(youngest)
            self._preempt(youngest)
        if batch:
            self._decoding.decode(batch)
            self.scheduler.decoded(len(batch))

    def _preempt(self, answer: Answer) -> None:
        self._answers.tell()
        if self._swapping.swap_out(answer):
            with self.lock:
                self.scheduler.preempted(answer)
        self._tally.begin_round()

    def _restore(self, answer: Answer) -> None:
        self._answers.tell()
        try:
            self._swapping.swap_in(answer)
            with self.lock:
                self.scheduler.is_read(answer)
        except PoolFull:
            with self.lock:
                self.scheduler.hold()
        self._tally.begin_round()

    def _rest(self) -> None:
        """Tell what is left to tell, then build graphs, or wait for a request or the end."""
        self._answers.tell()
        self._publish()
        self.busy_since = None
        with self.lock:
            self._note_done()
            has_work = self.to_cancel or self.is_closing or not self.scheduler.is_idle
            self._is_resting = not has_work
            if self._is_resting:
                self.lock.notify_all()
                if self._building.is_done:
                    self.lock.wait()
        if self._is_resting:
            self._building.run(_BUILD_S)
        with self.lock:
            self._is_resting = False
        self._tally.begin_round()

    def _note_done(self) -> None:
        """Tell the scheduler which prompts are read and which requests need no more work."""
        for answer in self._reading.take_read():
            self.scheduler.is_read(answer)
        for answer in self._answers.take_left():
            self.scheduler.end(answer)

    def _account(self) -> ServiceStatus:
        """Return what the service is doing."""
        engine, scheduler = self._engine, self.scheduler
        self._status_at = time.perf_counter()
        flights = self._decoding.flight_counts
        return ServiceStatus(
            self._answers.slots(),
            n_running=scheduler.n_running,
            n_waiting=scheduler.n_waiting,
            n_ctx=engine.n_ctx,
            counts=self._tally.counts,
            prefix_bytes=engine.prefixes.n_bytes,
            prefix_places=engine.prefixes.n_places,
            memory={} if engine.ownership.is_closed else engine.memory(),
            experts=engine.expert_stats(),
            spec=engine.spec_stats(),
            group_passes=flights.passes,
            stage_idle=flights.bubbles,
        )
