"""Decides which work of many requests runs next. Pure: it knows no device, no clock, no thread.

Requests wait in the order of their arrival until one of a fixed number of slots is free. A prompt
is read layer by layer, as a *sweep* that may be suspended between its steps; only one sweep can be
under way. It takes along the prompts of requests that wait then, as far as they fit. A short prompt
that is alone is read in *pieces* instead, each a pass of its own; so is one of medium length beside
a sweep that has much more left. Sweep and pieces share the time for prompts equally.
Requests whose prompts are read decode together, one pass after another.

Decode passes earn time for prompts, half of what they take themselves (on a CPU two thirds), and
what one has earned is the most that is kept. So while a long prompt is read, others wait less than
twice as long for a token as usual, unless a single step of a sweep takes as long as a pass. But if
more prompts are read than requests decode, or if requests with free slots wait behind a prompt that
is soon read, prompts go first: then all decode together sooner.

If memory for KV rows runs out, the youngest requests are moved to host memory. They come back in
the order of their arrival, and before that no prompt begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from ..errors import QueueFull
from .costs import MOST_SHARE, PIECES, Costs

T = TypeVar("T")

# Seconds of a sweep between two looks at other requests while nothing decodes.
_ALONE_S = 0.02
# What is used of the share of passes that is for prompts, unless a single step needs all: steps and
# passes vary, and hardly any of them together may take twice as long as a pass.
_USED = 0.87
# Even if prompts go first, they have hardly more than so many seconds until the next pass. Requests
# wait behind a prompt that is soon read if so many rows of it are left.
_FIRST_S, _SOON = 0.1, 1024
# A prompt is read in pieces beside a sweep that takes so many seconds more, and so many times as
# long as the pieces: otherwise it waits, to be read together with others.
_LASTS_S, _LONGER = 0.15, 4
# After so many decode passes beside a sweep, one without a step before it is measured.
_MEASURE_EVERY = 32
# Seconds after which a refused client may try again: at least, and at most.
_SOONEST, _LATEST = 1.0, 120.0


@dataclass(frozen=True)
class Begin(Generic[T]):
    """Give a request a slot and begin its prompt.

    others: wait too, in the order of their arrival; their prompts may be read together with it.
    """

    key: T
    others: tuple[T, ...] = ()


@dataclass(frozen=True)
class Read(Generic[T]):
    """Run steps of the sweep that is under way: one, and more if they take so long in all."""

    key: T
    seconds: float


@dataclass(frozen=True)
class Piece(Generic[T]):
    """Read some rows of a prompt as one pass."""

    key: T
    n_rows: int


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


Work = Begin[T] | Read[T] | Piece[T] | Decode[T] | Preempt[T] | Restore[T] | Rest


class At(Enum):
    """Where a request is: it waits for a slot, or has one, or was moved to host memory."""

    WAITS = 0
    SWEEP = 1
    PIECES = 2
    DECODES = 3
    MOVED = 4


class Scheduler(Generic[T]):
    """Requests by what they wait for, and what runs next.

    A request is `add`ed, `next` says what is to be done with it, `began` and `put` note what came
    of that, `swept`, `took_piece` and `decoded` what work has run, and `end` removes the request,
    wherever it is. `hold` begins no prompt until a request has ended or was moved to host memory.

    capacity: requests that there may be, those included that run.
    """

    def __init__(self, n_slots: int, n_waiting: int) -> None:
        """n_waiting: most requests beyond those that slots are for."""
        self.costs = Costs()
        self.capacity, self._n_slots = n_slots + n_waiting, n_slots
        self._requests: dict[T, At] = {}  # in the order of arrival
        self._n_left = 0  # rows of the sweep
        self._is_held = False
        self._credit_s = 0.0  # time that decode passes have earned for prompts
        self._lead_s = 0.0  # by which pieces had more time than the sweep beside them
        self._n_beside = 0  # decode passes beside the sweep

    def _n(self, at: At) -> int:
        return list(self._requests.values()).count(at)

    def _those(self, at: At) -> list[T]:
        return [key for key, where in self._requests.items() if where is at]

    @property
    def n_waiting(self) -> int:
        """Return how many requests wait for a slot."""
        return self._n(At.WAITS)

    @property
    def n_running(self) -> int:
        """Return how many requests have a slot."""
        return len(self._requests) - self._n(At.WAITS) - self._n(At.MOVED)

    @property
    def only_decodes(self) -> bool:
        """Whether requests decode, and nothing else can run before one of them ends."""
        n = self._n(At.DECODES)
        return n == self.n_running and (n >= self._n_slots or not self.n_waiting)

    def requests(self) -> list[T]:
        """Return all requests, in the order of their arrival."""
        return list(self._requests)

    def add(self, key: T) -> None:
        """Have a request wait; QueueFull if there are too many."""
        n = len(self._requests)
        if n >= self.capacity:
            # until a request is likely to leave the queue
            seconds = (self.costs.request_s or 0.0) / self._n_slots
            seconds = min(max(seconds, _SOONEST), _LATEST)
            raise QueueFull(
                f"{n} requests run or wait already, as many as may; "
                f"try again in {math.ceil(seconds)} s",
                seconds,
            )
        self._requests[key] = At.WAITS

    def put(self, key: T, at: At) -> None:
        """Note where a request is now; `began` notes it of a sweep.

        One that waits again, because its context was shifted, has given up its memory. It waits
        behind the others: else they would wait for the end of an answer that perhaps has none.
        """
        if at is At.WAITS:
            self._requests.pop(key, None)
        self._requests[key] = at
        if at in (At.MOVED, At.WAITS):
            self._is_held = False

    def hold(self) -> None:
        """Begin and restore nothing until a request has ended or was moved to host memory."""
        self._is_held = True

    def began(self, n_rows: int, keys: Iterable[T]) -> None:
        """Note that the sweep of some requests is under way; n_rows rows are left.

        Nothing was computed meanwhile: usually, a decode pass comes before the first step.
        """
        for key in keys:
            self._requests[key] = At.SWEEP
        self._n_left, self._lead_s, self._n_beside = n_rows, 0.0, 0
        n_decoding = self._n(At.DECODES)
        usual_s = self.costs.share * (self.costs.pass_s(n_decoding) or 0.0)
        earned_s = self._earned_s(n_decoding)
        self._credit_s = min(self._credit_s, earned_s) if earned_s > usual_s else 0.0

    def end(self, key: T) -> None:
        """Remove a request; nothing happens if there is no such request."""
        self._requests.pop(key, None)
        self._is_held = False

    def next(
        self, n_rest: Callable[[T], int], fits: Callable[[T], bool] = lambda key: True
    ) -> Work[T]:
        """Return what runs next.

        n_rest: how many rows of a request's prompt are left to read, as far as is known. fits:
        whether there is memory for a request that has no slot.
        """
        moved, decoding = self._those(At.MOVED), self._those(At.DECODES)
        if not decoding:
            self._credit_s = 0.0  # nobody waits for a token
        if moved:
            if self.n_running < self._n_slots and not self._is_held and fits(moved[0]):
                return Restore(moved[0])
            order = self.requests()
            if decoding and order.index(decoding[-1]) > order.index(moved[0]):
                return Preempt(decoding[-1])
        elif (begin := self._to_begin(n_rest, bool(decoding))) and fits(begin.key):
            return begin
        work = self._to_read(n_rest, len(decoding))
        return work or (Decode(tuple(decoding)) if decoding else Rest())

    def _to_begin(self, n_rest: Callable[[T], int], is_decoding: bool) -> Begin[T] | None:
        """Return which request begins now, if one does, and which may begin with it.

        While a sweep is under way, only a prompt that is read in pieces can begin. It goes before
        longer ones, which could not run now; but one slot stays free for the first of these.
        """
        waiting, n_free = self._those(At.WAITS), self._n_slots - self.n_running
        if n_free <= 0 or not waiting or self._is_held or self._n(At.PIECES):
            return None
        if is_decoding and self._credit_s <= 0.0:
            return None
        if not self._n(At.SWEEP):
            return Begin(waiting[0], tuple(waiting[1:n_free]))
        left_s = self._n_left * (self.costs.row_s or 0.0)

        def is_short(n_rows: int) -> bool:
            most_s = max(_LASTS_S, _LONGER * self.costs.pieces_s(n_rows))
            return n_rows <= PIECES[-1] and most_s <= left_s

        short = next((key for key in waiting if is_short(n_rest(key))), None)
        if self._lead_s > 0.0 or short is None or (n_free == 1 and short != waiting[0]):
            return None
        return Begin(short)

    def _to_read(self, n_rest: Callable[[T], int], n_decoding: int) -> Work[T] | None:
        """Return what is read now of the prompts that are under way; None: nothing."""
        sweep, pieces = self._those(At.SWEEP), self._those(At.PIECES)
        if n_decoding and self._credit_s <= 0.0:
            return None
        if pieces and not (sweep and self._lead_s > 0.0):
            most_s = self._earned_s(n_decoding) if n_decoding else math.inf
            return Piece(pieces[0], self.costs.piece_rows(n_rest(pieces[0]), most_s))
        step_s = self.costs.step_s
        if not sweep or (n_decoding and self._n_beside % _MEASURE_EVERY == _MEASURE_EVERY - 1):
            return None
        if step_s is None:
            return Read(sweep[0], 0.0)
        if not n_decoding:
            return Read(sweep[0], _ALONE_S)
        return Read(sweep[0], self._credit_s) if _USED * step_s <= self._credit_s else None

    def _earned_s(self, n_decoding: int) -> float:
        """Return how much time for prompts a decode pass of so many rows earns."""
        n_sweep = self._n(At.SWEEP)
        n_behind = min(self.n_waiting, self._n_slots - self.n_running)
        share = self.costs.prompt_share(n_sweep + self._n(At.PIECES) + n_behind, n_decoding)
        if n_behind and not (n_sweep and self._n_left > _SOON):
            share = MOST_SHARE
        pass_s = _USED * (self.costs.pass_s(n_decoding) or 0.0)
        usual_s = self.costs.share * pass_s
        return max(usual_s, min(share * pass_s, _FIRST_S))

    def swept(self, n_left: int, seconds: float | None, host_s: float = 0.0) -> None:
        """Note that steps of the sweep have run, of which n_left rows of the prompt are left.

        seconds: what such steps take; None if that was not known. host_s: what they took the host,
        most of it for graphs that were built.
        """
        if seconds is not None:
            self.costs.note_rows(self._n_left - n_left, seconds)
        self._n_left = n_left
        self._lead_s -= max(seconds or 0.0, host_s)
        self._credit_s = 0.0 if seconds is None else self._credit_s - seconds

    def took_piece(self, seconds: float) -> None:
        """Note that a piece of a prompt was read, in so many seconds."""
        self._lead_s += seconds
        self._credit_s -= seconds

    def waited(self) -> None:
        """Note that nothing can decode now, because every request waits for its grammar."""
        self._credit_s = max(self._credit_s, _ALONE_S, self.costs.step_s or 0.0)
        self._n_beside = 0

    def decoded(self, n_rows: int) -> None:
        """Note that a decode pass of so many rows has run; it earns time for prompts."""
        earned_s = self._earned_s(n_rows)
        self._credit_s = min(self._credit_s + earned_s, max(earned_s, self.costs.step_s or 0.0))
        self._n_beside += bool(self._n(At.SWEEP))
