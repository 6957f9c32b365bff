"""Passes of several groups of sequences in flight at once, each in another stage.

One pass after another enters the first stage and goes through all of them. While the results of one
are read, the passes behind it compute. A stage has one pass at a time. The host serves all stages:
where it would wait for one device, it looks at the others.

    stage 0:  A . | B . | A' | B' |
    stage 1:      | A . | B  | A' |
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from ..errors import InternalError, RequestError
from .base import Runner
from .batch import Batch, Callback, Predicate
from .results import Output

# Seconds without results after which the host waits for one device at a time, as it does for a
# single pass: that finds out about a device that has stopped.
_PATIENCE_S = 1.0


@dataclass
class _Flight:
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
class FlightCounts:
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


class Flights:
    """The passes in flight: `submit` starts one, `collect` returns the results of the oldest.

    All sequences of passes in flight differ. An error in one pass leaves the others as they are:
    whoever collects it gets the error.
    """

    def __init__(
        self,
        parts: Sequence[Runner],
        hand_over: Callable[[int, int], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """hand_over: enqueues the copy of so many rows to a stage from the one before it."""
        self._parts, self._hand_over, self._clock = tuple(parts), hand_over, clock
        self._flights: deque[_Flight] = deque()  # the oldest first
        self._began: list[float | None] = [None for _ in parts]  # of what a stage computes
        self._since = 0.0
        self._may_pause = True
        self._was_kept = False  # the logits of the pass that was collected last may be read
        self.counts = FlightCounts(busy_s=[0.0 for _ in parts])

    @property
    def is_empty(self) -> bool:
        """Whether no pass is in flight."""
        return not self._flights

    def require_idle(self) -> None:
        """Check that one more pass may start."""
        if len(self._flights) >= len(self._parts):
            raise RequestError("each stage has a pass in flight; collect the oldest one first")

    def submit(
        self,
        batch: Batch,
        cancelled: Predicate = lambda: False,
        begins: Callback = lambda: None,
        keeps_logits: bool = False,
    ) -> None:
        """Start a pass in the first stage, and have earlier ones go on.

        Errors as in `Runner.submit`, of this pass. keeps_logits: after `collect`, `Runner.logits`
        has its rows until the next call here: they are copied before a pass enters the last stage,
        or if there is no memory for that, none enters before.
        """
        self.require_idle()
        self._release()
        for part in self._parts:
            part.watch_results()
        if not self._flights:
            self._since = self._clock()
        self._clear_first()
        flight = _Flight(batch, keeps_logits)
        self._enter(flight, 0, cancelled, begins)
        self._flights.append(flight)
        self._step(flight)
        if flight.error:
            self._flights.pop()
            raise flight.error

    def _clear_first(self) -> None:
        """Have the pass in the first stage go on to the next one."""
        end = self._clock() + _PATIENCE_S
        while any(flight.at == 0 and not flight.is_done for flight in self._flights):
            self._turn()
            self._may_pause = self._clock() < end
        self._may_pause = True

    def _enter(self, flight: _Flight, i: int, cancelled: Predicate, begins: Callback) -> None:
        """Begin a pass in a stage; the one before it has left."""
        part = self._parts[i]
        self._leave(i)
        try:
            shape = part.prepare(flight.batch)
            part.fill(flight.batch, shape)
            if i:
                self._hand_over(i, flight.batch.tokens.size)
        except BaseException:
            part.give_up()
            part.recover()
            raise
        flight.at, self._began[i] = i, self._clock()
        flight.work = part.launch(flight.batch, shape, cancelled, begins, lambda: self._may_pause)

    def _leave(self, i: int) -> None:
        """Wait until a stage has computed what it was given, unless its results were read."""
        if not self._parts[i].is_idle:
            self._parts[i].collect()
        self._ended(i)

    def _ended(self, i: int) -> None:
        """Note that a stage was seen to have ended its work."""
        began, self._began[i] = self._began[i], None
        if began is not None:
            self.counts.busy_s[i] += self._clock() - began

    def _turn(self, wanted: _Flight | None = None) -> None:
        """Have each pass go on as far as it can without waiting, the oldest first.

        wanted: whose results are waited for, if there is nothing else to do.
        """
        for flight in self._flights:
            if flight.is_done:
                continue
            if flight.work:
                self._step(flight)
            if flight.work is None and not flight.is_done:
                self._go_on(flight, wanted)

    def _step(self, flight: _Flight) -> None:
        """Launch more of a pass, up to the next pause."""
        try:
            if flight.work and next(flight.work, self) is self:  # at its end
                flight.work = None
                part = self._parts[flight.at]
                if part.mode == "layered" and flight.at < len(self._parts) - 1:
                    self._ended(flight.at)  # it has read what the last layer chose
        except Exception as error:  # noqa: BLE001 - whoever collects the pass gets it
            self._fail(flight, error)

    def _fail(self, flight: _Flight, error: Exception) -> None:
        if flight.work:
            flight.work.close()
        flight.work, flight.error = None, error
        part = self._parts[flight.at]
        part.give_up()
        part.recover()
        self._ended(flight.at)

    def _go_on(self, flight: _Flight, wanted: _Flight | None) -> None:
        """Have a pass that is launched in its stage enter the next one, or end."""
        i, last = flight.at + 1, len(self._parts) - 1
        if flight.at == last:
            is_last_work = not (self._may_pause and any(other.work for other in self._flights))
            if (flight is wanted and is_last_work) or self._parts[last].has_results():
                self._end(flight)
            return
        is_taken = any(other.at == i and not other.is_done for other in self._flights)
        if is_taken or (i == last and not self._may_enter_last()):
            return
        try:
            self._enter(flight, i, lambda: False, lambda: None)
        except Exception as error:  # noqa: BLE001
            self._fail(flight, error)
        else:
            self._step(flight)

    def _may_enter_last(self) -> bool:
        """Whether the logits of the pass before are not wanted, or a copy of them is kept."""
        if any(flight.is_done and flight.keeps_logits for flight in self._flights):
            return False  # they will be wanted
        if self._was_kept and self._parts[-1].keep_logits():
            self._was_kept = False
        return not self._was_kept

    def _release(self) -> None:
        """Note that the logits of the pass that was collected last are not wanted any more."""
        self._was_kept = False
        self._parts[-1].release_logits()

    def _end(self, flight: _Flight) -> None:
        """Read the results of a pass that is launched in the last stage."""
        try:
            flight.output = self._parts[-1].collect()
        except Exception as error:  # noqa: BLE001
            flight.error = error
        self._ended(flight.at)

    def collect(self) -> Output:
        """Wait for the oldest pass, return its results, and have the others go on.

        Errors are those of this pass; it is not in flight any more.
        """
        if not self._flights:
            raise RequestError("no pass is in flight; submit one first")
        self._release()
        oldest = self._flights[0]
        self._run(oldest)
        self._flights.popleft()
        self._was_kept = oldest.keeps_logits
        self.counts.passes += 1
        if self._flights:
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

    def _run(self, flight: _Flight) -> None:
        end = self._clock() + _PATIENCE_S
        while not flight.is_done:
            is_alone = all(other.is_done for other in self._flights if other is not flight)
            self._may_pause = not is_alone and self._clock() < end
            self._turn(flight)
        self._may_pause = True

    def drop(self, slot: int) -> None:
        """Have a sequence not be in flight; the results of all passes are kept, logits are not."""
        if any(slot in flight.batch.slots for flight in self._flights):
            self._release()
            for flight in self._flights:
                flight.keeps_logits = False
            for flight in self._flights:
                self._run(flight)

    def give_up(self) -> None:
        """Wait for all passes, and forget them."""
        while self._flights:
            flight = self._flights.pop()
            self._fail(flight, RequestError("the pass was given up"))
        for i in range(len(self._parts)):
            self._parts[i].give_up()
            self._ended(i)
