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

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..errors import QueueFull
from ..kinds import SHORT_PROMPT
from .costs import MOST_SHARE, PIECES, Costs

T = TypeVar("T")

# Seconds of a sweep between two looks at other requests while nothing decodes.
_ALONE_S = 0.02
# What is used of the share of passes that is for prompts, unless a single step needs all: steps and
# passes vary, and hardly any of them together may take twice as long as a pass.
_USED = 0.85
# Even if prompts go first, they have hardly more than so many seconds until the next pass. Requests
# wait behind a prompt that is soon read if so many rows of it are left.
_FIRST_S, _SOON = 0.1, 1024
# A prompt is read in pieces beside a sweep that has this many times as many rows left, and that
# takes so many seconds and so many times as long as the pieces: otherwise it waits, to be read
# together with others.
_MUCH_MORE, _LASTS_S, _LONGER = 2, 0.15, 4
# Seconds that a sweep may be ahead of prompts in pieces that come later.
_AHEAD_S = 0.25
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


class Scheduler(Generic[T]):
    """Requests by what they wait for, and what runs next.

    A request is `add`ed, `next` says when to begin it, `began` or `in_pieces` note what came of
    that, `swept`, `took_piece` and `decoded` what work has run, `is_read` that the prompt is read,
    and `end` removes it, wherever it is. `preempted` notes that it was moved to host memory,
    `is_read` that it is back. `hold` begins no prompt until a request has ended or was preempted.
    """

    def __init__(self, n_slots: int, n_waiting: int) -> None:
        """deadlines: of requests that have one.

        n_waiting: most requests beyond those that slots are for.
        """
        self.costs = Costs()
        self._n_slots, self._n_waiting = n_slots, n_waiting
        self._waiting: dict[T, None] = {}  # in the order of arrival
        self._sweeping: dict[T, None] = {}
        self._n_left = 0  # rows of the sweep
        self._in_pieces: T | None = None
        self._decoding: dict[T, None] = {}
        self._preempted: dict[T, None] = {}
        self.deadlines: dict[T, float] = {}
        self._arrival: dict[T, int] = {}
        self._n_arrived = 0
        self._is_held = False
        self._credit_s = 0.0  # time that decode passes have earned for prompts
        self._lead_s = 0.0  # by which pieces had more time than the sweep beside them
        self._n_beside = 0  # decode passes beside the sweep
        self._is_pass_due = False  # before the first step of the sweep

    @property
    def n_waiting(self) -> int:
        """Return how many requests wait for a slot."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Return how many requests have a slot."""
        n_reading = len(self._sweeping) + (self._in_pieces is not None)
        return len(self._decoding) + n_reading

    @property
    def only_decodes(self) -> bool:
        """Whether requests decode, and nothing else can run before one of them ends."""
        is_full = self.n_running >= self._n_slots
        return len(self._decoding) == self.n_running and (is_full or not self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether there is no request."""
        return not self._arrival

    @property
    def capacity(self) -> int:
        """How many requests there may be, those included that run."""
        return self._n_slots + self._n_waiting

    def require_room(self) -> None:
        """Check that there may be one more request."""
        if len(self._arrival) >= self.capacity:
            seconds = min(max(self.retry_after_s, _SOONEST), _LATEST)
            raise QueueFull(
                f"{len(self._arrival)} requests run or wait already, as many as may; "
                f"try again in {math.ceil(seconds)} s",
                seconds,
            )

    @property
    def retry_after_s(self) -> float:
        """Return after how many seconds a request is likely to leave the queue."""
        return (self.costs.request_s or 0.0) / self._n_slots

    def add(self, key: T, deadline: float | None = None) -> None:
        """Have a request wait; deadline: when `due` returns it, None for never."""
        self.require_room()
        self._waiting[key] = None
        self._arrival[key] = self._n_arrived
        self._n_arrived += 1
        if deadline is not None:
            self.deadlines[key] = deadline

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
        found = [key for key, deadline in self.deadlines.items() if deadline <= now]
        for key in found:
            del self.deadlines[key]
        return found

    def began(self, key: T, n_rows: int, others: Iterable[T] = (), seconds: float = 0.0) -> None:
        """Note that the sweep of a request, and of others, is under way; n_rows rows are left.

        seconds: what that took, while nothing was computed.
        """
        self._sweeping, self._n_left = dict.fromkeys((key, *others)), n_rows
        for one in self._sweeping:
            self._waiting.pop(one, None)
        self._lead_s, self._n_beside = 0.0, 0
        most_s = self._earned_s(self.costs.pass_s(len(self._decoding)) or 0.0)
        self._credit_s = min(self._credit_s, most_s) - min(seconds, most_s)
        # else others would wait for this and the first step together
        is_usual = bool(self._decoding) and self._share <= self.costs.share
        self._is_pass_due = is_usual and self._credit_s > 0.0

    def in_pieces(self, key: T) -> None:
        """Note that the prompt of a request is going to be read in pieces."""
        self._waiting.pop(key, None)
        self._in_pieces = key

    def is_read(self, key: T) -> None:
        """Note that the prompt of a request is read, or is back; it decodes from now on."""
        self._waiting.pop(key, None)
        self._preempted.pop(key, None)
        self._left(key)
        self._decoding[key] = None

    def _left(self, key: T) -> None:
        """Note that the prompt of a request is not under way any more."""
        self._sweeping.pop(key, None)
        if self._in_pieces == key:
            self._in_pieces = None

    def end(self, key: T) -> None:
        """Remove a request; nothing happens if there is no such request."""
        self._waiting.pop(key, None)
        self._decoding.pop(key, None)
        self._preempted.pop(key, None)
        self.deadlines.pop(key, None)
        self._arrival.pop(key, None)
        self._is_held = False
        self._left(key)

    def next(
        self, n_rest: Callable[[T], int], fits: Callable[[T], bool] = lambda key: True
    ) -> Work[T]:
        """Return what runs next.

        n_rest: how many rows of a request's prompt are left to read, as far as is known. fits:
        whether there is memory for a request that has no slot.
        """
        if self._preempted:
            work = self._for_preempted(fits)
            if work:
                return work
        elif (key := self._to_begin(n_rest)) is not None and fits(key):
            return Begin(key, self._may_join(key))
        return self._to_read(n_rest) or self._to_decode()

    def _to_decode(self) -> Work[T]:
        return Decode(tuple(self._decoding)) if self._decoding else Rest()

    def _to_begin(self, n_rest: Callable[[T], int]) -> T | None:
        """Return the request whose prompt begins now, if there is one.

        While a sweep is under way, only a prompt that is read in pieces can begin. It goes before
        longer ones, which could not run now; but one slot stays free for the first of these.
        """
        if self.n_running >= self._n_slots or not self._waiting or self._is_held:
            return None
        if self._in_pieces is not None or (self._decoding and self._credit_s <= 0.0):
            return None
        first = next(iter(self._waiting))
        if not self._sweeping:
            return first
        return self._first_short(n_rest) if self._lead_s <= 0.0 else None

    def _may_join(self, key: T) -> tuple[T, ...]:
        """Return which others may begin with a request; none if a sweep is under way."""
        n = 0 if self._sweeping else self._n_slots - self.n_running - 1
        return tuple(itertools.islice((one for one in self._waiting if one != key), n))

    def _for_preempted(self, fits: Callable[[T], bool]) -> Work[T] | None:
        """Return how the oldest request in host memory comes back; None: not now."""
        first = min(self._preempted, key=lambda key: self._arrival[key])
        youngest = self.youngest
        if self.n_running < self._n_slots and not self._is_held and fits(first):
            return Restore(first)
        if youngest is not None and self._arrival[youngest] > self._arrival[first]:
            return Preempt(youngest)
        return None

    def _first_short(self, n_rest: Callable[[T], int]) -> T | None:
        """Return the first prompt that may be read in pieces beside the sweep.

        None takes the last slot from an older prompt.
        """
        left_s = self._n_left * (self.costs.row_s or 0.0)
        if left_s < _LASTS_S:
            return None
        most = max(SHORT_PROMPT, min(self._n_left // _MUCH_MORE, PIECES[-1]))

        def pays(n_rows: int) -> bool:
            return n_rows <= most and _LONGER * self.costs.pieces_s(n_rows) <= left_s

        found = next((key for key in self._waiting if pays(n_rest(key))), None)
        is_last = self.n_running == self._n_slots - 1
        return None if is_last and found != next(iter(self._waiting)) else found

    def _to_read(self, n_rest: Callable[[T], int]) -> Work[T] | None:
        """Return what is read now of the prompts that are under way; None: nothing."""
        key, is_turn = self._in_pieces, not self._sweeping or self._lead_s <= 0.0
        if key is not None and is_turn:
            most_s = math.inf
            if self._decoding:
                most_s = self._earned_s(self.costs.pass_s(len(self._decoding)) or 0.0)
            if not self._decoding or self._credit_s > 0.0:
                return Piece(key, self.costs.piece_rows(n_rest(key), most_s))
        if self._sweeping and (seconds := self._for_sweep()) is not None:
            return Read(next(iter(self._sweeping)), seconds)
        return None

    def _for_sweep(self) -> float | None:
        """Return for how long the sweep goes on now; None: not now."""
        step_s = self.costs.step_s
        if not self._decoding:
            return _ALONE_S if step_s is not None else 0.0
        is_measure = self._n_beside % _MEASURE_EVERY == _MEASURE_EVERY - 1
        if self._credit_s <= 0.0 or self._is_pass_due or is_measure:
            return None
        if step_s is None:
            return 0.0
        return self._credit_s if _USED * step_s <= self._credit_s else None

    @property
    def _share(self) -> float:
        """What a decode pass earns for prompts, of its own time."""
        n_reading = len(self._sweeping) + (self._in_pieces is not None)
        n_behind = min(len(self._waiting), self._n_slots - self.n_running)
        is_soon = not self._sweeping or self._n_left <= _SOON
        if n_behind and is_soon:
            return MOST_SHARE
        return self.costs.prompt_share(n_reading + n_behind, len(self._decoding))

    def _earned_s(self, pass_s: float) -> float:
        """Return how much time for prompts a decode pass of pass_s seconds earns."""
        usual_s, share = _USED * self.costs.share * pass_s, self._share
        return usual_s if share <= self.costs.share else max(usual_s, min(share * pass_s, _FIRST_S))

    def swept(self, n_left: int, seconds: float | None, host_s: float = 0.0) -> None:
        """Note that steps of the sweep have run, of which n_left rows of the prompt are left.

        seconds: what such steps take; None if that was not known. host_s: what they took the host,
        most of it for graphs that were built.
        """
        if seconds is not None:
            self.costs.note_rows(self._n_left - n_left, seconds)
        self._n_left = n_left
        self._lead_s = max(self._lead_s - max(seconds or 0.0, host_s), -_AHEAD_S)
        if self._decoding:
            self._credit_s = 0.0 if seconds is None else self._credit_s - seconds

    def took_piece(self, seconds: float) -> None:
        """Note that a piece of a prompt was read, in so many seconds."""
        if self._sweeping:
            self._lead_s += seconds
        if self._decoding:
            self._credit_s -= seconds

    def waited(self) -> None:
        """Note that nothing can decode now, because every request waits for its grammar."""
        self._is_pass_due, self._credit_s = False, max(self._credit_s, _ALONE_S)

    def decoded(self, n_rows: int) -> None:
        """Note that a decode pass of so many rows has run; it earns time for prompts."""
        if self._is_pass_due:
            self._is_pass_due = False
            return
        pass_s, step_s = self.costs.pass_s(n_rows) or 0.0, self.costs.step_s or 0.0
        earned_s = self._earned_s(pass_s)
        self._credit_s = min(self._credit_s + earned_s, max(earned_s, step_s))
        self._n_beside += bool(self._sweeping)
