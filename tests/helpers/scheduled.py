"""A model of an engine that does what a scheduler says; its times are made up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from moegraph.kinds import SweepStep
from moegraph.loop.costs import piece_of
from moegraph.loop.scheduler import (
    At,
    Begin,
    Decode,
    Piece,
    Preempt,
    Read,
    Rest,
    Restore,
    Scheduler,
    Work,
)

SHORT = 32
LAYERS = 4


class Machine:
    """A device without streams that does what a scheduler says; times are made up.

    Requests are names; their prompts have so many rows, their answers so many tokens. pass_s: a
    decode pass; pass_of: by its rows. step_s: a step of a sweep, of 40 rows; step_of: of other
    kinds. piece_s: a pass over a piece of a prompt, by its rows. most_joint: rows of prompts that
    one sweep takes together. lacks: each layer of a sweep has a step for missing experts. begin_s:
    what it takes to begin a prompt. has_streams: steps of a sweep are only enqueued, so they are
    measured together with the pass behind them. noise: how many times as long as usual work takes.
    """

    def __init__(
        self, n_slots: int = 4, n_waiting: int = 100, pass_s: float = 0.01, step_s: float = 0.003
    ) -> None:
        self.scheduler = Scheduler[str](n_slots, n_waiting)
        self.pass_s = pass_s
        self.pass_of: Callable[[int], float] = lambda n_rows: self.pass_s
        self.step_of: Callable[[SweepStep], float] = lambda step: step_s * step.n_rows / 40
        self.piece_s: Callable[[int], float] = lambda n_rows: 2 * pass_s
        self.now = 0.0
        self.n_rows: int | None = None  # of KV memory in all; None: enough for everything
        self.rows: dict[str, int] = {}  # of requests with a slot
        self.swapped: dict[str, int] = {}
        self.prompts: dict[str, int] = {}
        self.n_rest: dict[str, int] = {}  # rows of prompts that are not read
        self.left: dict[str, int] = {}  # tokens of the answer
        self.steps: list[SweepStep] = []  # of the sweep under way
        self.swept: list[str] = []  # whose prompts it reads
        self.most_joint, self.lacks, self.is_rounded = 0, False, False
        self.most_rows, self.least_rows = 40, 8  # of a chunk
        self.n_layers, self.begin_s = LAYERS, 0.0
        self.has_streams = False
        self.noise: Callable[[], float] = lambda: 1.0
        self.enqueued: list[SweepStep] = []
        self.enqueued_s = 0.0
        self.log: list[tuple[float, str, tuple[str, ...]]] = []
        self.tokens: dict[str, list[float]] = {}

    def add(self, name: str, n_prompt: int, n_tokens: int) -> None:
        self.scheduler.add(name)
        self.prompts[name] = self.n_rest[name] = n_prompt
        self.left[name], self.tokens[name] = n_tokens, []

    def turn(self) -> Work[str]:
        """Do one piece of work."""
        scheduler = self.scheduler
        work = scheduler.next(lambda name: self.n_rest[name], self.fits)
        if isinstance(work, Begin):
            self.begin(work.key, work.others)
        elif isinstance(work, Preempt):
            self.preempt(work.key)
        elif isinstance(work, Restore):
            self.spend("restore", work.key, seconds=0.001)
            self.rows[work.key] = self.swapped.pop(work.key)
            scheduler.put(work.key, At.DECODES)
        elif isinstance(work, Read):
            self.read(work.key, work.seconds)
        elif isinstance(work, Piece):
            self.piece(work.key, work.n_rows)
        elif isinstance(work, Decode):
            self.decode(list(work.keys))
        return work

    def read(self, name: str, seconds: float) -> None:
        """Run steps as `Reading.read` does."""
        costs, steps, done = self.scheduler.costs, self.steps, []
        expected_s, n_before = costs.step_s, len(self.steps)
        took_s = expected_s or 0.0
        while steps:
            done.append(steps.pop(0))
            costs.upcoming = steps[0] if steps else None
            if costs.step_s is None or took_s + costs.step_s > seconds:
                break
            took_s += costs.step_s
        really_s = self.noise() * sum(self.step_of(step) for step in done)
        self.spend("read", name, seconds=really_s)
        self.enqueued, self.enqueued_s = self.enqueued + done, self.enqueued_s + really_s
        if not (steps and self.has_streams):
            self.end_round(0)
        for one in self.swept:
            self.n_rest[one] = self.n_rest[one] * len(steps) // n_before
        n_left = sum(self.n_rest[one] for one in self.swept)
        if not steps:
            swept, self.swept = self.swept, []
            for one in swept:
                self.draw(one)
        self.scheduler.swept(n_left, None if expected_s is None else took_s)

    def end_round(self, n_rows: int, seconds: float = 0.0) -> None:
        """Note what was enqueued, and a pass of n_rows rows behind it that took so long."""
        done, done_s = self.enqueued, self.enqueued_s
        self.enqueued, self.enqueued_s = [], 0.0
        self.scheduler.costs.note_round(done, n_rows, done_s + seconds)

    def piece(self, name: str, n_rows: int) -> None:
        n_rows = min(n_rows, self.n_rest[name])
        if self.is_rounded:
            n_rows = 1 << (n_rows.bit_length() - 1)
        seconds = self.noise() * self.piece_s(n_rows)
        self.spend("piece", name, seconds=seconds)
        if not self.enqueued:
            self.scheduler.costs.note([piece_of(n_rows)], seconds)
        self.enqueued, self.enqueued_s = [], 0.0  # as `Tally.end_piece`
        self.n_rest[name] -= n_rows
        if not self.n_rest[name]:
            self.draw(name)
        self.scheduler.took_piece(seconds)

    def decode(self, names: list[str]) -> None:
        while names and self.n_rows is not None and self.n_used + len(names) > self.n_rows:
            name = names[-1]  # came last
            self.preempt(name)
            names.remove(name)
        if not names:
            return
        seconds = self.noise() * self.pass_of(len(names))
        self.spend("decode", *names, seconds=seconds)
        self.end_round(len(names), seconds)
        self.scheduler.decoded(len(names))
        for name in names:
            self.rows[name] += 1
            self.draw(name)

    @property
    def n_used(self) -> int:
        return sum(self.rows.values())

    def fits(self, name: str) -> bool:
        n = self.swapped.get(name, self.prompts[name])
        return self.n_rows is None or self.n_used + n + 1 + len(self.rows) <= self.n_rows

    def preempt(self, name: str) -> None:
        self.spend("preempt", name, seconds=0.001)
        self.swapped[name] = self.rows.pop(name)
        self.scheduler.put(name, At.MOVED)

    def begin(self, name: str, others: Sequence[str] = ()) -> None:
        """Begin a prompt, and with it the others that fit."""
        group, n = [name], self.prompts[name]
        for other in () if self.steps else others:
            if n + self.prompts[other] <= self.most_joint:
                group.append(other)
                n += self.prompts[other]
        self.rows.update((one, self.prompts[one]) for one in group)
        self.spend("begin", *group, seconds=self.begin_s)
        if self.steps or (len(group) == 1 and n <= SHORT):
            self.scheduler.put(name, At.PIECES)
            return
        costs, n_busy = self.scheduler.costs, len(self.rows) - len(group)
        n_rows, longest = min(self.most_rows, n), max(self.prompts[one] for one in group)
        if n_busy:
            share = costs.prompt_share(len(group), n_busy)
            most_s = share * (costs.pass_s(n_busy) or math.inf)
            n_rows = costs.chunk_rows(n_rows, self.least_rows, longest, most_s)
        chunks = [min(n_rows, n - at) for at in range(0, n, n_rows)]
        self.steps, self.swept = [], group
        for il in range(self.n_layers):
            n_kv = longest if len(group) > 1 else 0
            self.steps += [self.step(il, at, rows, n_kv) for at, rows in enumerate(chunks)]
            self.steps += [SweepStep("experts", n)] if self.lacks else []
        costs.upcoming = self.steps[0]
        self.scheduler.began(n, group)

    def step(self, il: int, at: int, n_rows: int, n_kv: int = 0) -> SweepStep:
        if il % 2:
            return SweepStep("attention", n_rows, n_kv or (at + 1) * n_rows)
        return SweepStep("recurrent", n_rows)

    def draw(self, name: str) -> None:
        """Draw a token; the first one ends the prompt."""
        if not self.tokens[name]:
            self.scheduler.put(name, At.DECODES)
        self.tokens[name].append(self.now)
        self.left[name] -= 1
        if not self.left[name]:
            self.end(name)

    def end(self, name: str) -> None:
        self.scheduler.end(name)
        for books in (self.rows, self.swapped):
            books.pop(name, None)
        if name in self.swept:
            self.swept.remove(name)
            self.steps = self.steps if self.swept else []

    def spend(self, what: str, *names: str, seconds: float) -> None:
        self.now += seconds
        self.log.append((self.now, what, names))

    def run(self, n: int = 100_000) -> None:
        """Work until nothing is left."""
        for _ in range(n):
            if isinstance(self.turn(), Rest):
                return
        raise AssertionError("the work never ends")

    def longest_gap(self, name: str) -> float:
        """Return the longest time between two tokens of a request."""
        at = self.tokens[name]
        return max(b - a for a, b in zip(at, at[1:]))
