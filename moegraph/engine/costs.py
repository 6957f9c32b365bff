"""What work takes, as measured while a service runs. It knows no device and no clock."""

from __future__ import annotations

import bisect

# How much a measurement counts beside those before it.
_NEWEST = 0.25
# A step of a sweep beside decode passes is to take at most this share of one.
_STEP_SHARE = 0.4
# Each length of a chunk has graphs of its own; so there are few, each this times shorter.
_FEWER = 4


class Costs:
    """Running means, in seconds; None where nothing was measured.

    step_s: a step of a prompt's sweep. short_s: a short prompt, read as one pass. request_s: a
    request from the start of its prompt to its end.

    Work is enqueued, so only a *round* can be measured: what ran from one moment when the device
    had nothing to do to the next.
    """

    def __init__(self) -> None:
        self.step_s: float | None = None
        self.short_s: float | None = None
        self.request_s: float | None = None
        self._pass_s: dict[int, float] = {}  # by number of rows
        self._row_s: float | None = None  # of a step, for each row of a chunk
        self._chunk = 1

    def pass_s(self, n_rows: int) -> float | None:
        """Return what a decode pass takes: that of so many rows, or of the nearest number known."""
        if n_rows in self._pass_s:
            return self._pass_s[n_rows]
        known = sorted(self._pass_s)
        if not known:
            return None
        at = bisect.bisect_left(known, n_rows)
        near = min(known[max(0, at - 1) : at + 1], key=lambda n: abs(n - n_rows))
        return self._pass_s[near]

    def chunk_rows(self, most: int, least: int, n_rows: int) -> int:
        """Return the rows of a chunk, in these limits, for a sweep beside passes of n_rows rows."""
        pass_s = self.pass_s(n_rows)
        rows = most
        while self._row_s and pass_s and rows // _FEWER >= least:
            if rows * self._row_s <= _STEP_SHARE * pass_s:
                break
            rows //= _FEWER
        return rows

    def begin_sweep(self, n_rows: int) -> None:
        """Note that a sweep begins whose chunks have n_rows rows."""
        self._chunk = n_rows
        self.step_s = self._row_s * n_rows if self._row_s else None

    def note_round(self, n_steps: int, n_rows: int, seconds: float) -> None:
        """Learn from some steps of a sweep, and a decode pass after them; n_rows 0: no pass."""
        pass_s = self.pass_s(n_rows) if n_rows else 0.0
        if n_steps and pass_s is not None:
            self.step_s = _mean(self.step_s, max(0.0, seconds - pass_s) / n_steps)
            self._row_s = self.step_s / self._chunk
        elif n_rows:
            self._pass_s[n_rows] = _mean(self._pass_s.get(n_rows), seconds)

    def note_short(self, seconds: float) -> None:
        """Learn from a short prompt."""
        self.short_s = _mean(self.short_s, seconds)

    def note_request(self, seconds: float) -> None:
        """Learn from a request that has ended by itself."""
        self.request_s = _mean(self.request_s, seconds)


def _mean(before: float | None, seconds: float) -> float:
    return seconds if before is None else before + _NEWEST * (seconds - before)
