"""A service: many threads give it requests, and one thread answers them with one engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import InternalError, MoegraphError, QueueFull, RequestError, ServiceClosed
from ..loop.answer import Answer
from ..loop.building import Building
from ..loop.loop import Loop
from ..loop.requests import Request, ServiceStatus, Step
from ..passes.grouppasses import GroupPasses

if TYPE_CHECKING:
    from .engine import Engine

_CLOSED = "the server is ending; it takes no more requests"
# Requests that may wait for a slot, unless the caller says otherwise.
N_WAITING = 128
# Seconds after which work that has not ended counts as stuck.
_STUCK_S = 300.0
# Seconds between two accounts of what the service is doing.
_STATUS_S = 0.25
# Seconds for which graphs are built between two looks for requests.
_BUILD_S = 0.01


class Ticket:
    """A request that a service has accepted."""

    def __init__(self, loop: Loop, answer: Answer) -> None:
        self._loop, self._answer = loop, answer

    def cancel(self) -> None:
        """End the request soon, with a last step; safe from any thread and more than once."""
        self._loop.cancel(self._answer)


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
        self._engine, self._say = engine, say
        n_seq, streams = engine.config.n_seq, engine.device.can.streams
        self._core = engine.core
        self._loop = Loop(self._core, n_seq, n_waiting)
        # a graph costs much only where a device captures it
        self._building = Building(engine.runner, n_seq) if streams else None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stuck_s = stuck_s
        self._n_refused = 0
        self._is_draining = self._is_closing = self._is_resting = False
        self._failure: str | None = None  # why the thread has ended, if nobody asked for it
        self._busy_since: float | None = None  # when the work under way began
        self._status_at = 0.0
        self._status = self._account()

    def start(self) -> None:
        """Start the engine's thread; the engine belongs to it from now on."""
        self._engine.hand_over()
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Return why requests are not answered any more; None if they are.

        Work that takes longer than `stuck_s` counts as a failure until it ends.
        """
        since = self._busy_since
        if self._failure or since is None or time.perf_counter() - since <= self._stuck_s:
            return self._failure
        return f"the engine has been busy with one piece of work for {self._stuck_s:.0f} s"

    @property
    def capacity(self) -> int:
        """How many requests there may be at a time, those included that wait."""
        return self._loop.scheduler.capacity

    def submit(self, request: Request, deliver: Callable[[Step], None]) -> Ticket:
        """Accept a request; its steps are delivered until the last one.

        deliver: called on the engine's thread; it must return fast.
        """
        vocabulary = self._engine.tokenizer if request.text else None
        answer = Answer(
            request, self._core, vocabulary,
            lambda answer, reason: deliver(answer.next_step(reason)),
        )  # fmt: skip
        with self._loop.lock:
            if self._failure:
                raise ServiceClosed(f"the server has failed: {self._failure}")
            if self._is_draining or self._is_closing or not self._thread.is_alive():
                raise ServiceClosed(_CLOSED)
            try:
                self._loop.add(answer)
            except QueueFull:
                self._n_refused += 1
                raise
        return Ticket(self._loop, answer)

    def act(self, action: str, slot: int, name: str, owner: str) -> Future[tuple[int, int]] | None:
        """Have a slot saved, restored or erased once it has no request; None: without `SlotFiles`.

        action: the name of a method of `SlotFiles`.
        """
        done, files = Future[tuple[int, int]](), self._engine.slot_files
        if files is None:
            return None
        if slot >= self._engine.config.n_seq:
            raise RequestError(f"there is no slot {slot}")
        work = {"save": files.save, "restore": files.restore, "erase": files.erase}[action]

        def call(idle: list[int] | None) -> bool:
            if idle is not None and slot not in idle:
                return False
            if done.set_running_or_notify_cancel():
                try:
                    if idle is None:
                        raise ServiceClosed(_CLOSED)
                    done.set_result(work(slot, name, owner, idle))
                    if action != "save":
                        self._loop.answers.worthless.discard(slot)
                except BaseException as error:
                    done.set_exception(error)
                    if not isinstance(error, (MoegraphError, MemoryError)):
                        raise
            return True

        with self._loop.lock:
            if self._is_closing or not self._thread.is_alive():
                raise ServiceClosed(_CLOSED)
            self._loop.call(call)
        return done

    def status(self) -> ServiceStatus:
        """Return what the service is doing."""
        since, found, scheduler = self._busy_since, self._status, self._loop.scheduler
        return replace(
            found,
            n_running=scheduler.n_running,
            n_waiting=scheduler.n_waiting,
            counts=replace(found.counts, refused=self._n_refused),
            busy_s=0.0 if since is None else time.perf_counter() - since,
            failure=self.failure,
        )

    def drain(self, timeout_s: float | None = None) -> bool:
        """Accept no more requests, and wait until those accepted have ended.

        Return whether they have; False if that takes longer than timeout_s.
        """

        def is_done() -> bool:
            is_idle = self._is_resting and not self._loop.scheduler.requests()
            return is_idle or not self._thread.is_alive()

        with self._loop.lock:
            self._is_draining = True
            return self._loop.lock.wait_for(is_done, timeout_s)

    def close(self) -> None:
        """End all requests and the thread; the engine is free for another thread."""
        with self._loop.lock:
            self._is_draining = self._is_closing = True
            self._loop.lock.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    # the engine's thread

    def _run(self) -> None:
        """Step until the service is closed or fails."""
        error: MoegraphError = ServiceClosed(_CLOSED)
        try:
            self._engine.ownership.enter()
            while not self._is_closing:
                self._busy_since = time.perf_counter()
                if not self._loop.step():
                    self._rest()
                if time.perf_counter() - self._status_at >= _STATUS_S:
                    self._publish()
        except MoegraphError as caught:
            error, self._failure = caught, str(caught)
        except BaseException as caught:  # noqa: BLE001 - no request may wait for ever
            error = InternalError(f"{type(caught).__name__}: {caught}")
            self._failure = str(error)
        finally:
            self._end(error)

    def _end(self, error: MoegraphError) -> None:
        with self._loop.lock:
            self._is_closing = True
        self._loop.end_all(error)
        with self._loop.lock:
            self._loop.lock.notify_all()
        self._busy_since = None
        self._status = self._account()
        if not self._engine.ownership.is_closed:
            self._engine.hand_over()

    def _rest(self) -> None:
        """Build graphs, or wait for a request or the end."""
        self._publish()
        self._busy_since = None
        loop = self._loop
        with loop.lock:
            self._is_resting = not (loop.has_work or self._is_closing)
            if self._is_resting:
                loop.lock.notify_all()
                if not self._building or self._building.is_done:
                    loop.lock.wait()
        if self._is_resting and self._building:
            self._building.run(_BUILD_S)
        with loop.lock:
            self._is_resting = False
        loop.tally.begin_round()

    def _publish(self) -> None:
        """Say what the service is doing, and what the engine has to say."""
        self._status = self._account()
        for line in self._engine.drain_messages():
            self._say(line)

    def _account(self) -> ServiceStatus:
        """Return what the service is doing."""
        engine, loop = self._engine, self._loop
        self._status_at = time.perf_counter()
        passes = self._core.passes
        pipeline = passes.pipeline.counts if isinstance(passes, GroupPasses) else None
        return ServiceStatus(
            loop.answers.slots(),
            n_running=loop.scheduler.n_running,
            n_waiting=loop.scheduler.n_waiting,
            n_ctx=engine.n_ctx,
            counts=loop.tally.counts,
            prefix_bytes=engine.prefixes.store.n_bytes,
            prefix_places=engine.prefixes.store.n_places,
            memory={} if engine.ownership.is_closed else engine.memory(),
            experts=engine.expert_stats(),
            spec=engine.spec_stats(),
            group_passes=pipeline.passes if pipeline else 0,
            stage_idle=pipeline.bubbles if pipeline else 0.0,
        )
