"""Decides which work of many requests runs next. Pure: it knows no device, no clock, no thread.

Requests wait in the order of their arrival until one of a fixed number of slots is free. A prompt
is read layer by layer, as a *sweep* that may be suspended between its steps; only one sweep can be
under way. A short prompt is read as one pass instead. Requests whose prompts are read decode
together, one pass after another.

Decode passes earn time for prompts, three quarters of what they take themselves, and no more is
kept than one pass or one step takes. So while a long prompt is read, others wait less than twice
as long for a token as usual, unless a single step of a sweep takes longer than a pass.

If memory for KV rows runs out, the youngest requests are moved to host memory. They come back in
the order of their arrival, and before that no prompt begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..errors import QueueFull
from .costs import Costs

T = TypeVar("T")

# Seconds of a sweep between two looks at other requests while nothing decodes, and most steps.
_ALONE_S, _MOST_STEPS = 0.02, 64
# What a decode pass earns for prompts, of its own time.
_SHARE = 0.75
# After so many decode passes beside a sweep, one without a step before it is measured.
_MEASURE_EVERY = 32
# Seconds after which a refused client may try again: at least, and at most.
_SOONEST, _LATEST = 1.0, 120.0


@dataclass(frozen=True)
class Begin(Generic[T]):
    """Give a request a slot and begin its prompt; read it all if it is short."""

    key: T


@dataclass(frozen=True)
class Read(Generic[T]):
    """Run some steps of the sweep that is under way."""

    key: T
    n_steps: int


@dataclass(frozen=True)
class Decode(Generic[T]):
    """Run the next pass of these requests."""

    keys: tuple[T, ...]


@dataclass(frozen=True)
class Preempt(Generic[T]):
    """Move a request to host memory, for one that came before it."""

    key: T


@dataclass(frozen=True)
class Restore(Generic[T]):
    """Give a request that was moved to host memory a slot again."""

    key: T


@dataclass(frozen=True)
class Rest:
    """There is nothing to do before a request arrives."""


Work = Begin[T] | Read[T] | Decode[T] | Preempt[T] | Restore[T] | Rest


class Scheduler(Generic[T]):
    """Requests by what they wait for, and what runs next.

    A request is `add`ed, `next` says when to begin it, `began` or `is_read` note what came of that,
    and `end` removes it, wherever it is. `preempted` notes that it was moved to host memory,
    `is_read` that it is back. `hold` begins no prompt until a request has ended or was preempted.
    """

    def __init__(self, n_slots: int, n_waiting: int) -> None:
        """n_waiting: most requests that wait for a slot."""
        self.costs = Costs()
        self._n_slots, self._n_waiting = n_slots, n_waiting
        self._waiting: dict[T, None] = {}  # in the order of arrival
        self._sweeping: T | None = None
        self._decoding: dict[T, None] = {}
        self._preempted: dict[T, None] = {}
        self._deadlines: dict[T, float] = {}
        self._arrival: dict[T, int] = {}
        self._n_arrived = 0
        self._is_held = False
        self._credit_s = 0.0  # time that decode passes have earned for prompts
        self._n_beside = 0  # decode passes beside the sweep
        self._is_new = False  # no step of the sweep has run beside them

    @property
    def n_waiting(self) -> int:
        """Return how many requests wait for a slot."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Return how many requests have a slot."""
        return len(self._decoding) + (self._sweeping is not None)

    @property
    def is_idle(self) -> bool:
        """Whether there is no request."""
        return not self._arrival

    def require_room(self) -> None:
        """Check that one more request may wait.

        Raises:
            QueueFull: as many requests wait as are allowed.
        """
        if len(self._waiting) >= self._n_waiting and not self.is_idle:
            seconds = min(max(self.retry_after_s, _SOONEST), _LATEST)
            raise QueueFull(
                f"{len(self._waiting)} requests wait already, as many as may; "
                f"try again in {math.ceil(seconds)} s",
                seconds,
            )

    @property
    def retry_after_s(self) -> float:
        """Return after how many seconds a request is likely to leave the queue."""
        return (self.costs.request_s or 0.0) / self._n_slots

    def add(self, key: T, deadline: float | None = None) -> None:
        """Have a request wait; deadline: when `due` returns it, None for never.

        Raises:
            QueueFull: as many requests wait as are allowed.
        """
        self.require_room()
        self._waiting[key] = None
        self._arrival[key] = self._n_arrived
        self._n_arrived += 1
        if deadline is not None:
            self._deadlines[key] = deadline

    def requests(self) -> list[T]:
        """Return all requests, in the order of their arrival."""
        return list(self._arrival)

    @property
    def youngest(self) -> T | None:
        """The request that arrived last of those that decode."""
        return max(self._decoding, key=lambda key: self._arrival[key], default=None)

    def preempted(self, key: T) -> None:
        """Note that a request was moved to host memory."""
        del self._decoding[key]
        self._preempted[key] = None
        self._is_held = False

    def hold(self) -> None:
        """Begin and restore nothing until a request has ended or was preempted."""
        self._is_held = True

    def due(self, now: float) -> list[T]:
        """Return the requests whose deadline is over; each is returned once."""
        found = [key for key, deadline in self._deadlines.items() if deadline <= now]
        for key in found:
            del self._deadlines[key]
        return found

    def began(self, key: T) -> None:
        """Note that the sweep of a request is under way."""
        self._waiting.pop(key, None)
        self._sweeping, self._n_beside, self._is_new = key, 0, True

    def is_read(self, key: T) -> None:
        """Note that the prompt of a request is read, or is back; it decodes from now on."""
        self._waiting.pop(key, None)
        self._preempted.pop(key, None)
        if self._sweeping == key:
            self._sweeping = None
        self._decoding[key] = None

    def end(self, key: T) -> None:
        """Remove a request; nothing happens if there is no such request."""
        self._waiting.pop(key, None)
        self._decoding.pop(key, None)
        self._preempted.pop(key, None)
        self._deadlines.pop(key, None)
        self._arrival.pop(key, None)
        self._is_held = False
        if self._sweeping == key:
            self._sweeping = None

    def next(
        self, is_short: Callable[[T], bool], fits: Callable[[T], bool] = lambda key: True
    ) -> Work[T]:
        """Return what runs next.

        is_short: whether so little of a request's prompt is left to read that it needs no sweep.
        fits: whether there is memory for a request that has no slot.
        """
        if self._preempted:
            work = self._for_preempted(fits)
            if work:
                return work
        elif (key := self._to_begin(is_short)) is not None and fits(key):
            if self._decoding and is_short(key):
                self._credit_s -= self.costs.short_s or self._credit_s
            return Begin(key)
        if self._sweeping is not None and (n_steps := self._n_steps()):
            return Read(self._sweeping, n_steps)
        if self._decoding:
            return Decode(tuple(self._decoding))
        return Rest()

    def _to_begin(self, is_short: Callable[[T], bool]) -> T | None:
        """Return the request whose prompt begins now, if there is one.

        While a sweep is under way, only a short prompt can begin. It goes before longer ones, which
        could not run now; but one slot stays free for the first of these.
        """
        if self.n_running >= self._n_slots or not self._waiting or self._is_held:
            return None
        first = next(iter(self._waiting))
        if not self._decoding:
            return first if self._sweeping is None else self._first_short(is_short)
        if self._credit_s <= 0.0:
            return None
        if self._sweeping is None and not is_short(first):
            return first  # this costs nothing yet
        return self._first_short(is_short)

    def _for_preempted(self, fits: Callable[[T], bool]) -> Work[T] | None:
        """Return how the oldest request in host memory comes back; None: not now."""
        first = min(self._preempted, key=lambda key: self._arrival[key])
        youngest = self.youngest
        if self.n_running < self._n_slots and not self._is_held and fits(first):
            return Restore(first)
        if youngest is not None and self._arrival[youngest] > self._arrival[first]:
            return Preempt(youngest)
        return None

    def _first_short(self, is_short: Callable[[T], bool]) -> T | None:
        """Return the first short prompt; none takes the last slot from an older prompt."""
        found = next((key for key in self._waiting if is_short(key)), None)
        is_last = self.n_running == self._n_slots - 1
        return None if is_last and found != next(iter(self._waiting)) else found

    def _n_steps(self) -> int:
        """Return how many steps of the sweep run now."""
        step_s = self.costs.step_s
        if not self._decoding:
            return min(int(_ALONE_S / step_s) + 1, _MOST_STEPS) if step_s else 1
        if self._credit_s <= 0.0 or self._n_beside % _MEASURE_EVERY == _MEASURE_EVERY - 1:
            return 0
        if not step_s or self._is_new:  # it may build graphs
            self._credit_s, self._is_new = 0.0, False
            return 1
        n_steps = int(self._credit_s / step_s)
        self._credit_s -= n_steps * step_s
        return n_steps

    def decoded(self, n_rows: int) -> None:
        """Note that a decode pass of so many rows has run; it earns time for prompts."""
        pass_s, step_s = self.costs.pass_s(n_rows) or 0.0, self.costs.step_s or 0.0
        earned = _SHARE * pass_s
        most = max(min(earned + step_s, pass_s), step_s)
        self._credit_s = min(self._credit_s + earned, most)
        self._n_beside += self._sweeping is not None
