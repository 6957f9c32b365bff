"""Whether sequences decode in one pass or in several groups, one in each stage: by what it takes.

Two groups of half the rows keep two devices at work, but each pass then reads its weights for half
as many rows. Which is faster depends on model, devices and experts; so both are measured. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..units import octave

# Rounds of a trial that count, and those before them: a pipeline fills, graphs are built.
_TRIED, _FIRST = 12, 6
# Rounds until the other way is tried again; twice as many each time that it does not pay.
_STAY, _LONGEST = 512, 2048


@dataclass
class _Trial:
    """Rounds of one way, for passes of about as many rows."""

    n_groups: int
    n_rounds: int = 0
    n_rows: int = 0
    seconds: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.n_rounds >= _FIRST + _TRIED

    @property
    def row_s(self) -> float:
        return self.seconds / max(self.n_rows, 1)

    def note(self, n_rows: int, seconds: float) -> None:
        self.n_rounds += 1
        if self.n_rounds > _FIRST and not self.is_known:
            self.n_rows += n_rows
            self.seconds += seconds


class _Size:
    """What was measured for passes of about as many rows."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.trial = _Trial(1)
        self._last: _Trial | None = None  # of the other way
        self._stay, self._left = _STAY, 0

    def note(self, n_rows: int, seconds: float) -> None:
        trial = self.trial
        trial.note(n_rows, seconds)
        if not trial.is_known:
            return
        if self._left > 0:
            self._left -= 1
            if self._left == 0:
                self.trial = _Trial(trial.n_groups)  # measured again, right before the other way
            return
        if self._last is None:
            n = self._most if trial.n_groups == 1 else 1
            self._last, self.trial = trial, _Trial(n)
            return
        one, several = sorted((trial, self._last), key=lambda found: found.n_groups)
        best = several if several.row_s < one.row_s else one
        # trial is of the way that was tried last
        self._stay = _STAY if best is trial else min(2 * self._stay, _LONGEST)
        self.trial, self._last, self._left = best, None, self._stay


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
        return self._of(n_rows).trial.n_groups if n_rows >= self._most else 1

    def note(self, n_rows: int, n_groups: int, seconds: float) -> None:
        """Learn from a round."""
        size = self._of(n_rows)
        if n_groups == size.trial.n_groups and n_rows >= self._most:
            size.note(n_rows, seconds)

    def _of(self, n_rows: int) -> _Size:
        return self._sizes.setdefault(octave(n_rows), _Size(self._most))
