"""Whether sequences decode in one pass or in several groups, one in each stage: by what it takes.

Two groups of half the rows keep two devices at work, but each pass then reads its weights for half
as many rows. Which is faster depends on model, devices and experts; so both are measured. Pure.
"""

from __future__ import annotations

from ..units import octave

# Rounds of a trial that count, and those before them: a pipeline fills, graphs are built.
_TRIED, _FIRST = 12, 6
# Rounds until the other way is tried again; twice as many each time that it does not pay.
_STAY, _LONGEST = 512, 2048


class _Size:
    """What was measured for passes of about as many rows. n_groups: the way that is used now."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._last: tuple[float, int] | None = None  # of the other way: seconds of a row, groups
        self._stay, self._left = _STAY, 0
        self._begin(1)

    def _begin(self, n_groups: int) -> None:
        self.n_groups, self._n_rounds, self._n_rows, self._seconds = n_groups, 0, 0, 0.0

    def note(self, n_rows: int, seconds: float) -> None:
        if self._left > 0:
            self._left -= 1
            if self._left == 0:
                self._begin(self.n_groups)  # measured again, right before the other way
            return
        self._n_rounds += 1
        if _FIRST < self._n_rounds < _FIRST + _TRIED:
            self._n_rows += n_rows
            self._seconds += seconds
        if self._n_rounds < _FIRST + _TRIED:
            return
        mine, last = (self._seconds / max(self._n_rows, 1), self.n_groups), self._last
        if last is None:
            self._last = mine
            self._begin(self._most if self.n_groups == 1 else 1)
            return
        self.n_groups = min(mine, last)[1]
        # mine is the way that was tried last
        self._stay = _STAY if self.n_groups == mine[1] else min(2 * self._stay, _LONGEST)
        self._last, self._left = None, self._stay


class GroupChoice:
    """Says in how many groups sequences decode, and learns from rounds.

    A round is the time in which each sequence gets one token.
    """

    def __init__(self, most: int) -> None:
        """most: groups that can be in flight."""
        self._most = most
        self._sizes: dict[int, _Size] = {}

    def n_groups(self, n_rows: int) -> int:
        """Return in how many groups n_rows sequences decode now."""
        return self._of(n_rows).n_groups if n_rows >= self._most else 1

    def note(self, n_rows: int, n_groups: int, seconds: float) -> None:
        """Learn from a round."""
        size = self._of(n_rows)
        if n_groups == size.n_groups and n_rows >= self._most:
            size.note(n_rows, seconds)

    def _of(self, n_rows: int) -> _Size:
        return self._sizes.setdefault(octave(n_rows), _Size(self._most))
