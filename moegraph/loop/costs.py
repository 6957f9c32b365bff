"""What work takes, as measured while a service runs. It knows no device and no clock."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from ..kinds import SweepStep
from ..units import octave

# How much a measurement counts beside those before it, if it is longer and if it is shorter: a
# step that takes too long is what must not happen again.
_STEP_LONGER, _STEP_SHORTER = 0.5, 0.4
# A round changes what was measured of a step by this factor at most.
_FACTOR = 8.0
# What of a chunk's time does not depend on its rows, unless more is known.
_FIXED = 0.5
_CHUNKS = ("recurrent", "attention")

# A kind, and powers of two that rows and positions do not exceed.
Key = tuple[str, int, int]


class _Known(NamedTuple):
    """What steps like one another take; n_rows: of the last one; at: its round, as a number."""

    seconds: float
    n_rows: int
    at: int


def _key(step: SweepStep) -> Key:
    return step.kind, octave(step.n_rows), octave(step.n_kv)


class StepCosts:
    """Seconds of steps: by kind, rows and positions, of which similar numbers count as equal."""

    def __init__(self) -> None:
        self._known: dict[Key, _Known] = {}
        self._n_rounds = 0

    def seconds(self, step: SweepStep) -> float | None:
        """Return what a step takes; None if no step like it was measured.

        A chunk takes what lies between similar chunks of fewer and of more rows. Without these,
        half of what the most similar chunk takes is taken to be the same for any number of rows,
        and the other half to grow with them. But it takes no longer than a later one of more rows
        did, nor, a row, than a later one of fewer: what took too long by chance is tried again.
        """
        key = _key(step)
        near = key if key in self._known else self._most_similar(key)
        if near is None:
            return None
        if step.kind not in _CHUNKS:
            return self._known[near].seconds
        limits = (
            one.seconds * max(1.0, step.n_rows / one.n_rows)
            for known, one in self._known.items()
            if known[::2] == key[::2] and one.at > self._known[near].at
        )
        return min((self._between(near, step.n_rows), *limits))

    def _between(self, near: Key, n_rows: int) -> float:
        """Return what a chunk of n_rows rows takes that is like the chunk `near`."""
        seconds, n, _ = self._known[near]
        others = [
            (abs(key[1] - near[1]), one)
            for key, one in self._known.items()
            if key[::2] == near[::2] and (n_rows - n) * (one.n_rows - n_rows) >= 0 != n - one.n_rows
        ]
        if n_rows == n or not others:
            return seconds * (_FIXED + (1.0 - _FIXED) * n_rows / n)
        other = min(others)[1]
        return seconds + (n_rows - n) / (other.n_rows - n) * (other.seconds - seconds)

    def _most_similar(self, key: Key) -> Key | None:
        """Return a key that was measured, of the same kind or, for a chunk, of another layer."""
        kinds = _CHUNKS if key[0] in _CHUNKS else key[:1]
        found = (known for known in self._known if known[0] in kinds)

        def distance(known: Key) -> tuple[bool, int, int]:
            return known[0] != key[0], abs(known[1] - key[1]), abs(known[2] - key[2])

        return min(found, key=distance, default=None)

    def note(self, steps: Sequence[SweepStep], seconds: float, at_most: bool = False) -> None:
        """Learn from some steps that took so many seconds together.

        seconds: nothing is learned if there are none. at_most: something else took part of the
        time, so what is known only can be too much.
        """
        if seconds <= 0.0:
            return
        self._n_rounds += 1
        expected = [self.seconds(step) for step in steps]
        known = [one for one in expected if one is not None]
        if not known:
            n_rows = sum(step.n_rows for step in steps)
            for step in steps:
                self._note(step, seconds * step.n_rows / n_rows)
            return
        usual = sum(known) / len(known)
        total = sum(known) + usual * (len(expected) - len(known))
        if at_most and seconds >= total:
            return
        # never zero: nothing would bring it back, and similar steps would seem to cost nothing too
        factor = max(1 / _FACTOR**2, min(seconds / total, _FACTOR))
        change = max(factor, 1 / _FACTOR) - 1.0
        change *= _STEP_LONGER if change > 0.0 else _STEP_SHORTER
        for step, before in zip(steps, expected):
            now = usual if before is None else before
            self._note(step, now * (1.0 + change if _key(step) in self._known else factor))

    def _note(self, step: SweepStep, seconds: float) -> None:
        self._known[_key(step)] = _Known(seconds, step.n_rows, self._n_rounds)


# How much a measurement counts beside those before it; a pass that took longer than usual counts
# less, because it may have built a graph.
_NEWEST, _LONGER = 0.25, 0.1
# The least that is left of a round for its steps, beside what they are known to take.
_TOO_LITTLE = 0.25
# What a decode pass earns for prompts, of its own time: usually, if each piece of work is measured
# by itself, and at most.
SHARE, MEASURED_SHARE, MOST_SHARE = 0.65, 0.8, 12.0
# What a row of a prompt takes counts as if it were known from so many rows: steps of several kinds
# take turns.
_KNOWN_ROWS = 512
# Rows of a pass over a piece of a prompt.
PIECES = (32, 128, 512)


class Costs:
    """Running means, in seconds; None where nothing was measured.

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
        self._steps = StepCosts()
        self._pass_s: dict[int, float] = {}  # by number of rows
        self._piece_s: dict[int, float] = {}

    # decode passes

    def pass_s(self, n_rows: int) -> float | None:
        """Return what a decode pass takes: that of so many rows, or of the nearest number known."""
        near = _nearest(self._pass_s, n_rows)
        return None if near is None else self._pass_s[near]

    def prompt_share(self, n_reading: int, n_decoding: int) -> float:
        """Return what a decode pass earns for prompts, of its own time.

        n_reading: requests whose prompts are read, or wait for that and have a slot. The more they
        are beside those that decode, the more it is.
        """
        return min(max(1.0, n_reading / max(n_decoding, 1)) * self.share, MOST_SHARE)

    # sweeps

    @property
    def step_s(self) -> float | None:
        """What the next step of the sweep takes, by what such steps took."""
        return self.of_step(self.upcoming) if self.upcoming else None

    def of_step(self, step: SweepStep) -> float | None:
        """Return what a step of a sweep takes, by what such steps took."""
        return self._steps.seconds(step)

    def chunk_rows(
        self, most: int, least: int, n_rows: int, n_kv: int, share: float | None = None
    ) -> int:
        """Return the rows of a chunk, in these limits, for a sweep beside passes of n_rows rows.

        n_kv: positions that the last chunk attends to. share: what a step may take of a pass, if
        not the usual share. Chunks are short if nothing was measured. If none is short enough, they
        are the shortest that is allowed. There are few lengths, because each has graphs of its own.
        """
        pass_s = self.pass_s(n_rows) if n_rows else None
        if not pass_s:
            return most
        rows, most_s = most, pass_s * (self.share if share is None else share)
        while rows // 2 >= max(least, 1):
            steps = SweepStep("recurrent", rows), SweepStep("attention", rows, n_kv)
            # a model may have layers of one kind only
            found = [seconds for step in steps if (seconds := self.of_step(step)) is not None]
            if found and max(found) <= most_s:
                break
            rows //= 2
        return rows

    def note_round(
        self, steps: Sequence[SweepStep], n_rows: int, seconds: float, has_built: bool = False
    ) -> None:
        """Learn from some steps of a sweep, and a decode pass after them; n_rows 0: no pass.

        has_built: graphs were built meanwhile, so the work itself took less. Each layer has graphs
        of its own, so the first sweep of a kind has hardly any other rounds: all that they tell is
        that the steps took no longer than the round.
        """
        pass_s = self.pass_s(n_rows) if n_rows else 0.0
        if steps and pass_s is not None:
            is_known = self._steps.seconds(steps[0]) is not None
            if has_built and is_known:
                self._steps.note(steps, seconds, at_most=True)
            else:
                self._steps.note(steps, seconds - self._of_pass(steps, n_rows, seconds))
        elif n_rows:
            self.note_pass(n_rows, seconds, has_built)

    def note_pass(self, n_rows: int, seconds: float, has_built: bool) -> None:
        """Learn from a decode pass of n_rows rows; has_built: as in `note_round`."""
        before = self._pass_s.get(n_rows)
        if has_built and before is not None and seconds >= before:
            return
        if before is None or seconds < before / 2:  # a graph was built then
            self._pass_s[n_rows] = seconds
        else:
            longer = _LONGER if seconds > before else _NEWEST
            self._pass_s[n_rows] = before + longer * (seconds - before)

    def _of_pass(self, steps: Sequence[SweepStep], n_rows: int, seconds: float) -> float:
        """Return what of a round with steps was its pass of n_rows rows; 0: no pass.

        If too little is left for the steps, the pass was taken to be longer than it is, such as
        after a single one that had to wait: then it is corrected, and not the steps alone. They
        would soon seem to take no time, and all of them would run at once.
        """
        near = _nearest(self._pass_s, n_rows) if n_rows else None
        if near is None:
            return 0.0
        pass_s = self._pass_s[near]
        known = [self.of_step(step) for step in steps]
        steps_s = sum(one or 0.0 for one in known) if None not in known else self.share * pass_s
        if seconds - pass_s < _TOO_LITTLE * steps_s:
            pass_s = self._pass_s[near] = seconds * pass_s / (pass_s + steps_s)
        return pass_s

    def note_rows(self, n_rows: int, seconds: float) -> None:
        """Learn from steps that amount to so many rows in all layers."""
        if n_rows > 0:
            before = seconds / n_rows if self.row_s is None else self.row_s
            self.row_s = (_KNOWN_ROWS * before + seconds) / (_KNOWN_ROWS + n_rows)

    # pieces of prompts

    def piece_s(self, n_rows: int) -> float | None:
        """Return what a pass over so many rows of a prompt takes.

        Other numbers of rows than those measured: a pass over missing experts takes long however
        few its rows are, and otherwise its time grows with them; so it is taken to be in between.
        """
        size = _size(n_rows)
        if size in self._piece_s:
            return self._piece_s[size]
        near = _nearest(self._piece_s, size)
        return None if near is None else float(self._piece_s[near] * (n_rows / near) ** 0.5)

    def pieces_s(self, n_rows: int) -> float:
        """Return what a prompt takes in pieces of 512 rows and of what is left, see `is_rounded`.

        Each of them reads nearly all weights, so if none was measured, one counts as 512 rows of a
        sweep; 0 if nothing was measured at all.
        """
        guess_s = PIECES[-1] * (self.row_s or 0.0)
        sizes = [PIECES[-1]] * (n_rows // PIECES[-1])
        rest = n_rows % PIECES[-1]
        if self.is_rounded:
            sizes += [1 << bit for bit in range(rest.bit_length()) if rest >> bit & 1]
        elif rest:
            sizes.append(rest)
        return sum(self.piece_s(size) or guess_s for size in sizes)

    def piece_rows(self, n_left: int, most_s: float) -> int:
        """Return the rows of the next piece of a prompt with n_left rows left.

        As many as take most_s seconds. If none does: as many as need the least time in all.
        """
        if not self._piece_s:
            return min(n_left, PIECES[-1])
        costs = {size: self.piece_s(size) or 0.0 for size in PIECES}
        fit = [size for size, seconds in costs.items() if seconds <= most_s]
        least = min(PIECES, key=lambda size: -(-n_left // size) * costs[size])
        return min(n_left, max(fit) if fit else least)

    def note_piece(self, n_rows: int, seconds: float, has_built: bool = False) -> None:
        """Learn from a pass over so many rows of a prompt; has_built: as in `note_round`.

        One that has built graphs tells only that such passes take no longer.
        """
        size = _size(n_rows)
        before = self._piece_s.get(size)
        if has_built and (before is None or seconds > before):
            return
        self._piece_s[size] = _mean(before, seconds, _NEWEST)

    def note_request(self, seconds: float) -> None:
        """Learn from a request that has ended by itself."""
        self.request_s = _mean(self.request_s, seconds, _NEWEST)


def _size(n_rows: int) -> int:
    return next((size for size in PIECES if n_rows <= size), PIECES[-1])


def _nearest(known: dict[int, float], n: int) -> int | None:
    """Return the number nearest to n of those with a measurement; None without any."""
    ordered = sorted(known)
    at = bisect.bisect_left(ordered, n)
    return min(ordered[max(0, at - 1) : at + 1], key=lambda one: abs(one - n), default=None)


def _mean(before: float | None, seconds: float, longer: float) -> float:
    """Return a running mean; longer: how much a measurement above it counts."""
    if before is None:
        return seconds
    return before + (longer if seconds > before else _NEWEST) * (seconds - before)
