"""Accepted tokens whose K and V a drafter has not computed yet. Bookkeeping only, no bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """Consecutive positions of a sequence from first on: their tokens, and their rows in memory."""

    first: int
    tokens: list[int]
    rows: list[int]

    @property
    def end(self) -> int:
        """Return the position after the last one."""
        return self.first + len(self.tokens)


class Taken:
    """What waits, by sequence, in a memory of n_rows rows."""

    def __init__(self, n_rows: int) -> None:
        self._n_rows = n_rows
        self._n_used = 0
        self._runs: dict[int, Run] = {}

    @property
    def slots(self) -> list[int]:
        """The sequences of which something waits."""
        return list(self._runs)

    def room(self) -> int:
        """Return how many rows are free."""
        return self._n_rows - self._n_used

    def add(self, slot: int, first: int, tokens: list[int]) -> int:
        """Add positions of a sequence, for which there is room; return their first row.

        What waited is forgotten if these do not follow it.
        """
        run, row = self._runs.get(slot), self._n_used
        if run is None or run.end != first:
            run = Run(first, [], [])
        rows = list(range(row, row + len(tokens)))
        self._runs[slot] = Run(run.first, [*run.tokens, *tokens], [*run.rows, *rows])
        self._n_used += len(tokens)
        return row

    def take(self, slot: int, n_past: int) -> Run | None:
        """Return what waits of a sequence of n_past positions, and forget it.

        None if nothing does, or if it does not end where the sequence does.
        """
        run = self._runs.pop(slot, None)
        if not self._runs:
            self._n_used = 0
        return run if run and run.tokens and run.end == n_past else None

    def cut(self, slot: int, n_past: int) -> None:
        """Forget positions of a sequence from n_past on."""
        run = self._runs.pop(slot, None)
        if run and run.first < n_past:
            n = n_past - run.first
            self._runs[slot] = Run(run.first, run.tokens[:n], run.rows[:n])
        if not self._runs:
            self._n_used = 0
