"""A service: many threads give it requests, and one thread answers them with one engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import QueueFull, RequestError, ServiceClosed
from ..loop.answer import Answer
from ..loop.drawing import Drawing
from ..loop.requests import Request, Step
from ..loop.scheduler import Scheduler
from ..loop.sequence import Sequence
from ..loop.status import ServiceStatus
from ..passes.ids import prompt_ids
from .serviceloop import CLOSED, ServiceLoop

if TYPE_CHECKING:
    from .engine import Engine

# Requests that may wait for a slot, unless the caller says otherwise.
N_WAITING = 128
# Seconds after which work that has not ended counts as stuck.
_STUCK_S = 300.0


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
        self,
        engine: Engine,
        *,
        n_waiting: int = N_WAITING,
        stuck_s: float = _STUCK_S,
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        """Take an engine over.

        n_waiting: most requests beyond those that run. stuck_s: see `failure`. say: called on the
        engine's thread with each of `Engine.drain_messages`.
        """
        self._engine = engine
        scheduler = Scheduler[Answer](engine.config.n_seq, n_waiting)
        self._loop = ServiceLoop(engine, scheduler, say)
        self._thread = threading.Thread(target=self._loop.run, name="engine", daemon=True)
        self._stuck_s = stuck_s
        self._n_refused = 0
        self._is_draining = False

    def start(self) -> None:
        """Start the engine's thread; the engine belongs to it from now on.

        Raises:
            RequestError: the engine is closed, or it belongs to another thread.
        """
        self._engine.hand_over()
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Return why requests are not answered any more; None if they are.

        Work that takes longer than `stuck_s` counts as a failure until it ends.
        """
        if self._loop.failure:
            return self._loop.failure
        since = self._loop.busy_since
        if since is not None and time.perf_counter() - since > self._stuck_s:
            return f"the engine has been busy with one piece of work for {self._stuck_s:.0f} s"
        return None

    @property
    def capacity(self) -> int:
        """How many requests there may be at a time, those included that wait."""
        return self._loop.scheduler.capacity

    def submit(self, request: Request, deliver: Callable[[Step], None]) -> Ticket:
        """Accept a request; its steps are delivered until the last one.

        deliver: called on the engine's thread; it must return fast.

        Raises:
            RequestError, ContextOverflow: the request is wrong.
            QueueFull: too many requests wait.
            ServiceClosed: the service is ending, or has failed.
        """
        answer = self._answer(request, deliver)
        with self._loop.lock:
            self._require_open()
            try:
                self._loop.scheduler.add(answer, answer.deadline)
            except QueueFull:
                self._n_refused += 1
                raise
            self._loop.lock.notify_all()
        return Ticket(self, answer)

    def _answer(self, request: Request, deliver: Callable[[Step], None]) -> Answer:
        engine, n_vocab = self._engine, self._engine.hparams.n_vocab
        sampling = request.sampling.validate(n_vocab)
        ids = prompt_ids(request.prompt, n_vocab)
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
        if self._loop.failure:
            raise ServiceClosed(f"the server has failed: {self._loop.failure}")
        if self._is_draining or self._loop.is_closing or not self._thread.is_alive():
            raise ServiceClosed(CLOSED)

    def cancel(self, answer: Answer) -> None:
        """End a request soon; see `Ticket.cancel`."""
        with self._loop.lock:
            answer.cancel.set()
            self._loop.to_cancel.append(answer)
            self._loop.lock.notify_all()

    def status(self) -> ServiceStatus:
        """Return what the service is doing."""
        since, found = self._loop.busy_since, self._loop.status
        return replace(
            found,
            n_running=self._loop.scheduler.n_running,
            n_waiting=self._loop.scheduler.n_waiting,
            counts=replace(found.counts, refused=self._n_refused),
            busy_s=0.0 if since is None else time.perf_counter() - since,
            failure=self.failure,
        )

    def drain(self, timeout_s: float | None = None) -> bool:
        """Accept no more requests, and wait until those accepted have ended.

        Return whether they have; False if that takes longer than timeout_s.
        """
        with self._loop.lock:
            self._is_draining = True
            return self._loop.lock.wait_for(
                lambda: self._loop.is_done or not self._thread.is_alive(), timeout_s
            )

    def close(self) -> None:
        """End all requests and the thread; the engine is free for another thread."""
        with self._loop.lock:
            self._is_draining = self._loop.is_closing = True
            self._loop.lock.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
