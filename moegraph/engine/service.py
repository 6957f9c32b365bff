"""A service: many threads give it requests, and one thread answers them with one engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import InternalError, MoegraphError, QueueFull, RequestError, ServiceClosed
from .answer import Answer
from .answers import Answers
from .decoding import Decoding
from .drafting import Drafting
from .drawing import Drawing
from .ids import checked_ids
from .reading import Reading
from .requests import Request, Step
from .scheduler import Begin, Decode, Read, Rest, Scheduler, Work
from .sequence import Sequence
from .servicestatus import ServiceStatus
from .tally import Tally

if TYPE_CHECKING:
    from .engine import Engine

# Requests that may wait for a slot, unless the caller says otherwise.
N_WAITING = 128
# Seconds after which work that has not ended counts as stuck.
_STUCK_S = 300.0
# Seconds between two accounts of what the service is doing.
_STATUS_S = 0.25
_CLOSED = "the server is ending; it takes no more requests"


class Ticket:
    """A request that a service has accepted."""

    def __init__(self, service: Service, answer: Answer) -> None:
        self._service, self._answer = service, answer

    @property
    def name(self) -> str:
        """Return the name of the request."""
        return self._answer.request.name

    def cancel(self) -> None:
        """End the request soon, with a last step; safe from any thread and more than once."""
        self._service.cancel(self._answer)


class Service:
    """Answers requests of several threads with one engine, as many at a time as it has sequences.

    The engine belongs to the service's thread from `start` to `close`.
    """

    def __init__(
        self, engine: Engine, *, n_waiting: int = N_WAITING, stuck_s: float = _STUCK_S
    ) -> None:
        """n_waiting: most requests that wait. stuck_s: see `failure`."""
        self._engine = engine
        self._lock = threading.Condition()
        self._scheduler = Scheduler[Answer](engine.config.n_seq, n_waiting)
        tally = Tally(self._scheduler.costs)
        self._answers = Answers(engine.passes, engine.device, engine.config.n_seq, tally)
        drafting = Drafting(engine.speculation, engine.device.can.streams)
        self._reading = Reading(engine, self._answers, drafting)
        self._decoding = Decoding(engine.passes, self._answers, drafting)
        self._to_cancel: list[Answer] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stuck_s = stuck_s
        self._busy_since: float | None = None
        self._failure: str | None = None
        self._n_refused = 0
        self._is_draining = self._is_closing = self._is_resting = False
        self._status_at = 0.0
        self._publish()

    # any thread

    def start(self) -> None:
        """Start the engine's thread; the engine belongs to it from now on.

        Raises:
            RequestError: the engine is closed, or it belongs to another thread.
        """
        self._engine.hand_over()
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted."""
        return self._thread.is_alive() and not self._is_draining and self.failure is None

    @property
    def failure(self) -> str | None:
        """Return why requests are not answered any more; None if they are.

        Work that takes longer than `stuck_s` counts as a failure until it ends.
        """
        if self._failure:
            return self._failure
        since = self._busy_since
        if since is not None and time.perf_counter() - since > self._stuck_s:
            return f"the engine has been busy with one piece of work for {self._stuck_s:.0f} s"
        return None

    def submit(self, request: Request, deliver: Callable[[Step], None]) -> Ticket:
        """Accept a request; its steps are delivered until the last one.

        deliver: called on the engine's thread; it must return fast.

        Raises:
            RequestError, ContextOverflow: the request is wrong.
            QueueFull: too many requests wait.
            ServiceClosed: the service is ending, or has failed.
        """
        answer = self._answer(request, deliver)
        with self._lock:
            self._require_open()
            try:
                self._scheduler.add(answer, answer.deadline)
            except QueueFull:
                self._n_refused += 1
                raise
            self._lock.notify_all()
        return Ticket(self, answer)

    def _answer(self, request: Request, deliver: Callable[[Step], None]) -> Answer:
        engine, n_vocab = self._engine, self._engine.hparams.n_vocab
        sampling = request.sampling.validate(n_vocab)
        ids = checked_ids(request.prompt, n_vocab).reshape(-1)
        n_top = request.n_logprobs
        if n_top is not None and not 0 <= n_top <= n_vocab:
            raise RequestError(f"{n_top} likeliest tokens; the vocabulary has {n_vocab}")
        vocabulary = engine.tokenizer if request.text else None
        sequence = Sequence(
            ids.tolist(),
            n_ctx=engine.n_ctx,
            max_tokens=request.max_tokens,
            piece=vocabulary.piece if vocabulary else None,
            eog_ids=vocabulary.eog_ids if vocabulary and not request.ignore_eos else frozenset(),
            stop=request.stop,
        )
        drawing = Drawing(engine.passes, sequence, sampling, n_vocab, constraint=request.constraint)
        return Answer(request, ids, drawing, deliver)

    def _require_open(self) -> None:
        if self._failure:
            raise ServiceClosed(f"the server has failed: {self._failure}")
        if self._is_draining or not self._thread.is_alive():
            raise ServiceClosed(_CLOSED)

    def cancel(self, answer: Answer) -> None:
        """End a request soon; see `Ticket.cancel`."""
        with self._lock:
            answer.cancel.set()
            self._to_cancel.append(answer)
            self._lock.notify_all()

    def status(self) -> ServiceStatus:
        """Return what the service is doing."""
        since = self._busy_since
        return replace(
            self._status,
            n_running=self._scheduler.n_running,
            n_waiting=self._scheduler.n_waiting,
            counts=replace(self._status.counts, refused=self._n_refused),
            busy_s=0.0 if since is None else time.perf_counter() - since,
            failure=self.failure,
        )

    def drain(self, timeout_s: float | None = None) -> bool:
        """Accept no more requests, and wait until those accepted have ended.

        Return whether they have; False if that takes longer than timeout_s.
        """
        with self._lock:
            self._is_draining = True
            return self._lock.wait_for(
                lambda: self._is_done() or not self._thread.is_alive(), timeout_s
            )

    def _is_done(self) -> bool:
        return self._is_resting and self._scheduler.is_idle

    def close(self) -> None:
        """End all requests and the thread; the engine is free for another thread."""
        with self._lock:
            self._is_draining = self._is_closing = True
            self._lock.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    # the engine's thread

    def _run(self) -> None:
        error: MoegraphError = ServiceClosed(_CLOSED)
        try:
            self._engine.ownership.enter()
            while self._turn():
                pass
        except MoegraphError as caught:
            error, self._failure = caught, str(caught)
        except BaseException as caught:  # noqa: BLE001 - no request may wait for ever
            error = InternalError(f"{type(caught).__name__}: {caught}")
            self._failure = str(error)
        finally:
            self._end_all(error)

    def _end_all(self, error: MoegraphError) -> None:
        with self._lock:
            self._is_draining = True
        self._answers.tell()
        for answer in self._scheduler.requests():
            self._answers.end(answer, "error", error)
        with self._lock:
            self._note_done()
            self._lock.notify_all()
        self._busy_since = None
        self._publish(True)
        if not self._engine.ownership.is_closed:
            self._engine.hand_over()

    def _turn(self) -> bool:
        """Do what comes next; return whether to go on."""
        with self._lock:
            if self._is_closing:
                return False
            ended = self._due()
            work = Rest() if ended else self._scheduler.next(self._reading.is_short)
        for answer, reason in ended:
            self._answers.end(answer, reason)
        if not ended:
            self._do(work)
        with self._lock:
            self._note_done()
        self._publish()
        return True

    def _due(self) -> list[tuple[Answer, str]]:
        """Return the requests that end now, and why."""
        cancelled, self._to_cancel = self._to_cancel, []
        late = self._scheduler.due(time.perf_counter())
        return [(a, "cancelled") for a in cancelled] + [(a, "deadline") for a in late]

    def _do(self, work: Work[Answer]) -> None:
        self._busy_since = time.perf_counter()
        if isinstance(work, Decode):
            self._decoding.decode(work.keys)
            self._scheduler.decoded(len(work.keys))
        elif isinstance(work, Read):
            self._reading.read(work.key, work.n_steps)
        elif isinstance(work, Begin):
            self._answers.tell()
            if self._reading.begin(work.key):
                with self._lock:
                    self._scheduler.began(work.key)
        else:
            self._wait()

    def _wait(self) -> None:
        """Tell what is left to tell, then wait for a request or the end."""
        self._answers.tell()
        self._publish(True)
        self._busy_since = None
        with self._lock:
            self._note_done()
            if self._scheduler.is_idle and not (self._to_cancel or self._is_closing):
                self._is_resting = True
                self._lock.notify_all()
                self._lock.wait()
                self._is_resting = False
        self._answers.tally.begin_round()

    def _note_done(self) -> None:
        """Tell the scheduler which prompts are read and which requests need no more work."""
        for answer in self._reading.take_read():
            self._scheduler.is_read(answer)
        left = self._answers.take_left()
        for answer in left:
            self._scheduler.end(answer)

    def _publish(self, now: bool = False) -> None:
        """Say what the service is doing, unless that was done a moment ago."""
        at = time.perf_counter()
        if not now and at - self._status_at < _STATUS_S:
            return
        engine, slots = self._engine, self._answers.slots()
        self._status_at = at
        self._status = ServiceStatus(
            slots,
            n_running=self._scheduler.n_running,
            n_waiting=self._scheduler.n_waiting,
            n_ctx=engine.n_ctx,
            counts=self._answers.tally.counts,
            prefix_bytes=engine.prefixes.n_bytes,
            prefix_places=engine.prefixes.n_places,
            memory={} if engine.ownership.is_closed else engine.memory(),
            experts=engine.expert_stats(),
            spec=engine.spec_stats(),
        )
