"""What work takes, as measured while a service runs. It knows no device and no clock."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from ..kinds import SweepStep
from .stepcosts import StepCosts

# How much a measurement counts beside those before it; a pass that took longer than usual counts
# less, because it may have built a graph.
_NEWEST, _LONGER = 0.25, 0.1
# A step of a sweep beside decode passes is to take at most this share of one.
_STEP_SHARE = 0.65
# Each length of a chunk has graphs of its own; so there are few, each this times shorter.
_FEWER = 2
# Rows of a pass over a piece of a prompt.
PIECES = (32, 128, 512)


class Costs:
    """Running means, in seconds; None where nothing was measured.

    upcoming: the next step of the sweep under way; None without one. row_s: a row of a prompt in
    all layers. request_s: a request from the start of its prompt to its end.

    Work is enqueued, so only a *round* can be measured: what ran from one moment when the device
    had nothing to do to the next.
    """

    def __init__(self) -> None:
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

    # sweeps

    @property
    def step_s(self) -> float | None:
        """What the next step of the sweep takes, by what such steps took."""
        return self.of_step(self.upcoming) if self.upcoming else None

    def of_step(self, step: SweepStep) -> float | None:
        """Return what a step of a sweep takes, by what such steps took."""
        return self._steps.seconds(step)

    def chunk_rows(self, most: int, least: int, n_rows: int, n_kv: int) -> int:
        """Return the rows of a chunk, in these limits, for a sweep beside passes of n_rows rows.

        n_kv: positions that the last chunk attends to. Chunks are short if nothing was measured.
        If none is short enough, they are the shortest that is allowed.
        """
        pass_s, rows = self.pass_s(n_rows), most
        while pass_s and rows // _FEWER >= least:
            steps = SweepStep("recurrent", rows), SweepStep("attention", rows, n_kv)
            found = [self.of_step(step) for step in steps]
            if all(seconds is not None and seconds <= _STEP_SHARE * pass_s for seconds in found):
                break
            rows //= _FEWER
        return rows

    def note_round(
        self, steps: Sequence[SweepStep], n_rows: int, seconds: float, has_built: bool = False
    ) -> None:
        """Learn from some steps of a sweep, and a decode pass after them; n_rows 0: no pass.

        has_built: graphs were built meanwhile, so it counts only if nothing else is known.
        """
        pass_s = self.pass_s(n_rows) if n_rows else 0.0
        if steps and pass_s is not None:
            if not has_built or self._steps.seconds(steps[0]) is None:
                self._steps.note(steps, max(0.0, seconds - pass_s))
        elif n_rows and (not has_built or pass_s is None):
            self._pass_s[n_rows] = _mean(self._pass_s.get(n_rows), seconds, _LONGER)

    def note_rows(self, n_rows: int, seconds: float) -> None:
        """Learn from steps that amount to so many rows in all layers."""
        if n_rows > 0:
            self.row_s = _mean(self.row_s, seconds / n_rows, _NEWEST)

    # pieces of prompts

    def piece_s(self, n_rows: int) -> float | None:
        """Return what a pass over so many rows of a prompt takes.

        Other numbers of rows than those measured: a pass over missing experts takes long however
        few its rows are, and otherwise its time grows with them; so it is taken to be in between.
        """
        size = _size(n_rows)
        near = _nearest(self._piece_s, size)
        return None if near is None else float(self._piece_s[near] * (size / near) ** 0.5)

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
        """Learn from a pass over so many rows of a prompt; has_built: as in `note_round`."""
        size = _size(n_rows)
        if has_built and self._piece_s:
            return
        self._piece_s[size] = _mean(self._piece_s.get(size), seconds, _NEWEST)

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
