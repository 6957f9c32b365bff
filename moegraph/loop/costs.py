"""What work takes, as measured while a service runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ..kinds import SweepStep
from ..units import octave
from .requests import ServiceCounts

if TYPE_CHECKING:  # the scheduler's tests need no native library
    from ..runner import AnyRunner
    from .answer import Answer

# How much a measurement counts beside those before it, if it is longer and if it is shorter: a
# decode pass may have been longer by chance, but a step that takes too long must not come again.
_LONGER, _LONGER_PASS, _SHORTER = 0.5, 0.1, 0.4
# A round changes what was measured by this factor at most.
_FACTOR = 8.0
# A pass that took less than this part of what was expected was known wrongly. Steps are measured
# together with a pass, so what is left of a round for them may be too little by chance.
_WRONG = 0.5
# What of the time of a chunk or a pass does not depend on its rows.
_FIXED = 0.5
_CHUNKS = ("recurrent", "attention")
# What a decode pass earns for prompts, of its own time: usually, if each piece of work is measured
# by itself, and at most.
SHARE, MEASURED_SHARE, MOST_SHARE = 0.65, 0.8, 12.0
# What a row of a prompt takes counts as if it were known from so many rows: steps of several kinds
# take turns.
_KNOWN_ROWS = 512
# Rows of a pass over a piece of a prompt.
PIECES = (32, 128, 512)

# A kind, and powers of two that rows and positions do not exceed.
Key = tuple[str, int, int]


class _Known(NamedTuple):
    """What work of one kind takes; n_rows: of the last one; at: its round, as a number."""

    seconds: float
    n_rows: int
    at: int


@cache
def decode_pass(n_rows: int) -> SweepStep:
    """Return a decode pass as a kind of work."""
    return SweepStep("decode", n_rows)


def piece_of(n_rows: int) -> SweepStep:
    """Return a pass over some rows of a prompt as a kind of work."""
    return SweepStep("piece", next((size for size in PIECES if n_rows <= size), PIECES[-1]))


@lru_cache(4096)
def _key(step: SweepStep) -> Key:
    return step.kind, octave(step.n_rows), octave(step.n_kv)


class Costs:
    """Seconds of work, as it was measured; None where nothing was.

    share: what a decode pass usually earns for prompts, of its own time. is_rounded: pieces of
    prompts have as many rows as a power of two.
    upcoming: the next step of the sweep under way; None without one. row_s: a row of a prompt in
    all layers. request_s: a request from the start of its prompt to its end.

    Work is enqueued, so only a *round* can be measured: what ran from one moment when the device
    had nothing to do to the next.
    """

    def __init__(self) -> None:
        self.share = SHARE
        self.is_rounded = True
        self.upcoming: SweepStep | None = None
        self.request_s: float | None = None
        self.row_s: float | None = None
        self._known: dict[Key, _Known] = {}
        self._n_rounds = 0

    def seconds(self, step: SweepStep) -> float | None:
        """Return what a step of a sweep, or a pass, takes; None if no work like it was measured.

        Similar numbers of rows and positions count as equal. Without a measurement of these, the
        most similar one counts. Half of what it took is taken to be the same for any number of
        rows, and the other half to grow with them. But a chunk takes no longer than a later one of
        more rows did, nor, a row, than a later one of fewer: what took too long by chance is tried
        again.
        """
        key = _key(step)
        near = key if key in self._known else self._most_similar(key)
        if near is None:
            return None
        seconds, n_rows, at = self._known[near]
        if step.kind in (*_CHUNKS, "decode", "piece"):
            seconds *= _FIXED + (1.0 - _FIXED) * step.n_rows / n_rows
        for known, one in self._known.items() if step.kind in _CHUNKS else ():
            if known[::2] == key[::2] and one.at > at:
                seconds = min(seconds, one.seconds * max(1.0, step.n_rows / one.n_rows))
        return seconds

    def _most_similar(self, key: Key) -> Key | None:
        """Return a key that was measured, of the same kind or, for a chunk, of another layer."""
        kinds = _CHUNKS if key[0] in _CHUNKS else key[:1]
        found = (known for known in self._known if known[0] in kinds)

        def distance(known: Key) -> tuple[bool, int, int]:
            return known[0] != key[0], abs(known[1] - key[1]), abs(known[2] - key[2])

        return min(found, key=distance, default=None)

    def note(self, steps: Sequence[SweepStep], seconds: float, has_built: bool = False) -> None:
        """Learn from work that took so many seconds together.

        seconds: nothing is learned if there are none. has_built: graphs were built meanwhile, so
        the work itself took less; it is learned only that it takes no longer.
        """
        expected = list(map(self.seconds, steps))
        known = list(filter(None, expected))
        usual = sum(known) / len(known) if known else seconds / len(steps)
        total = sum(known) + usual * (len(steps) - len(known))
        if seconds <= 0.0 or (has_built and (not known or seconds >= total)):
            return
        self._n_rounds += 1
        # never zero: nothing would bring it back, and similar work would seem to cost nothing too
        factor = max(1 / _FACTOR, min(seconds / total, _FACTOR))
        each = dict(zip(map(_key, steps), zip(steps, expected)))  # once for each key
        for key, (step, before) in each.items():
            weight = 1.0
            is_step = step.kind not in ("decode", "piece")
            if key in self._known and (is_step or factor > _WRONG):
                longer = _LONGER_PASS if step.kind == "decode" else _LONGER
                weight = longer if factor > 1.0 else _SHORTER
            now = (usual if before is None else before) * (1.0 + weight * (factor - 1.0))
            self._known[key] = _Known(now, step.n_rows, self._n_rounds)

    def note_round(
        self, steps: Sequence[SweepStep], n_rows: int, seconds: float, has_built: bool = False
    ) -> None:
        """Learn from some steps of a sweep, and a decode pass after them; n_rows 0: no pass."""
        if steps and (pass_s := self.pass_s(n_rows)) is not None:
            self.note(steps, seconds - pass_s, has_built)
        elif n_rows:
            self.note([decode_pass(n_rows)], seconds, has_built)

    def pass_s(self, n_rows: int) -> float | None:
        """Return what a decode pass takes; nothing if it has no rows."""
        return self.seconds(decode_pass(n_rows)) if n_rows else 0.0

    def prompt_share(self, n_reading: int, n_decoding: int) -> float:
        """Return what a decode pass earns for prompts, of its own time.

        n_reading: requests whose prompts are read, or wait for that and have a slot. The more they
        are beside those that decode, the more it is.
        """
        return min(max(1.0, n_reading / max(n_decoding, 1)) * self.share, MOST_SHARE)

    @property
    def step_s(self) -> float | None:
        """What the next step of the sweep takes."""
        return self.seconds(self.upcoming) if self.upcoming else None

    def chunk_rows(self, most: int, least: int, n_kv: int, most_s: float) -> int:
        """Return the rows of a chunk, in these limits: half of most, a quarter and so on.

        n_kv: positions that the last chunk attends to. most_s: what a step may take. Chunks are
        short if nothing was measured. If none is short enough, they are the shortest.
        """
        rows = most
        while rows // 2 >= max(least, 1):
            steps = SweepStep("recurrent", rows), SweepStep("attention", rows, n_kv)
            # a model may have layers of one kind only
            found = [seconds for step in steps if (seconds := self.seconds(step)) is not None]
            if found and max(found) <= most_s:
                break
            rows //= 2
        return rows

    def note_rows(self, n_rows: int, seconds: float) -> None:
        """Learn from steps that amount to so many rows in all layers."""
        if n_rows > 0:
            before = seconds / n_rows if self.row_s is None else self.row_s
            self.row_s = (_KNOWN_ROWS * before + seconds) / (_KNOWN_ROWS + n_rows)

    def pieces_s(self, n_rows: int) -> float:
        """Return what a prompt takes in pieces, see `is_rounded`.

        Where pieces are rounded, each of them reads nearly all weights, so if none was measured,
        one counts as 512 rows of a sweep. Elsewhere, its rows count until its size was measured.
        """
        n, row_s = -(-n_rows // PIECES[-1]), self.row_s or 0.0
        if self.is_rounded:
            n = n_rows // PIECES[-1] + (n_rows % PIECES[-1]).bit_count()
            return n * (self.seconds(piece_of(n_rows // n)) or PIECES[-1] * row_s)
        known = self._known.get(_key(piece_of(n_rows // n)))
        return n * known.seconds if known else n_rows * row_s

    def piece_rows(self, n_left: int, most_s: float) -> int:
        """Return the rows of the next piece of a prompt with n_left rows left.

        As many as take most_s seconds. If none does: as many as need the least time in all.
        """
        costs = {size: self.seconds(piece_of(size)) or 0.0 for size in PIECES}
        fit = [size for size, seconds in costs.items() if seconds <= most_s]
        least = min(PIECES, key=lambda size: -(-n_left // size) * costs[size])
        return min(n_left, max(fit) if fit else least)

    def note_request(self, seconds: float) -> None:
        """Learn from a request that has ended by itself."""
        before = seconds if self.request_s is None else self.request_s
        self.request_s = before + _SHORTER * (seconds - before)


class Tally:
    """Counts what a loop has done, and measures rounds.

    A round lasts from one moment when the device has no work to the next. It has some steps of a
    sweep, a decode pass, or both. One that builds graphs is a poor measure of others.
    """

    def __init__(self, costs: Costs, runner: AnyRunner) -> None:
        """runner: says how many graphs were built."""
        self.costs, self._runner = costs, runner
        self._prompt_s = self._decode_s = 0.0
        self._n_passes = self._n_rows = self._n_preempted = 0
        self._unlearned: tuple[int, float, bool] | None = None
        self.begin_round()

    @property
    def counts(self) -> ServiceCounts:
        """The sums so far."""
        return ServiceCounts(
            prompt_s=self._prompt_s,
            decode_s=self._decode_s,
            passes=self._n_passes,
            pass_rows=self._n_rows,
            preempted=self._n_preempted,
        )

    def begin_round(self) -> None:
        """Note that the device has no work, and that the time until now does not count."""
        self._since, self._steps = time.perf_counter(), list[SweepStep]()
        self._built = self._runner.n_built

    def pause(self) -> None:
        """Note that the time until now does not count, unless steps are under way."""
        if not self._steps:
            self.begin_round()

    def stepped(self, step: SweepStep) -> None:
        """Note that a step of a sweep was enqueued."""
        self._steps.append(step)

    def end_round(self, n_rows: int = 0) -> float | None:
        """Note that the device has done all its work, a pass of n_rows rows last; 0: no pass.

        Return what the pass took in seconds; None: not known. `learn` follows.
        """
        now, n_built, steps = time.perf_counter(), self._runner.n_built, self._steps
        seconds, has_built, prompt_s = now - self._since, n_built != self._built, 0.0
        self.learn()
        if n_rows and not steps:
            self._unlearned = n_rows, seconds, has_built
        elif steps:
            self.costs.note_round(steps, n_rows, seconds, has_built)
            pass_s = min(seconds, self.costs.pass_s(n_rows) or 0.0) if n_rows else 0.0
            prompt_s = seconds - pass_s
            self._steps = []
        self._prompt_s += prompt_s
        self._decode_s += seconds - prompt_s
        if n_rows:
            self._n_passes += 1
            self._n_rows += n_rows
        self._since, self._built = now, n_built
        return None if steps or has_built else seconds

    def learn(self) -> None:
        """Learn what the pass that `end_round` ended took; best while the device computes."""
        ended, self._unlearned = self._unlearned, None
        if ended:
            self.costs.note_round((), *ended)

    def end_piece(self, n_rows: int) -> float:
        """Note that the device has read a piece of a prompt; return what it took in seconds."""
        seconds = time.perf_counter() - self._since
        if not self._steps:
            self.costs.note([piece_of(n_rows)], seconds, self._built != self._runner.n_built)
        self._prompt_s += seconds
        self.begin_round()
        return seconds

    def ended(self, answer: Answer, reason: str) -> None:
        """Note what a request took that has ended."""
        if reason in ("stop", "length"):
            usage = answer.usage()
            self.costs.note_request(usage.prefill_s + usage.decode_s)

    def preempted(self) -> None:
        """Count a sequence that went to host memory for others."""
        self._n_preempted += 1
