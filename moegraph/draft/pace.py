"""How fast the machine is now: other programs may slow it down for a while. Pure.

A draft and a verify pass that take longer than usual by the same factor say so, and then plain
steps take longer too. What drafts cost beside plain steps has not changed.
"""

from __future__ import annotations

# Smaller deviations are noise, and what counts as slow.
_NOISE, _SLOW = 1.1, 1.25
# Slow steps in a row until a plain step is to confirm that the machine is slow.
_N_SLOW = 4
# How much of the slowdown a plain step must show. Steps for which the pace is not believed if it
# shows less: then it is drafts that became dear.
_SHARE, _DISTRUST = 0.4, 256


class Pace:
    """Tells what of a step's time is the machine's pace. is_doubted: a plain step is to tell."""

    def __init__(self) -> None:
        self._n_slow = 0  # in a row
        self._factor = 1.0  # of the last of them
        self._is_confirmed = False
        self._n_distrusted = 0  # steps to come

    @property
    def is_doubted(self) -> bool:
        """Whether drafting steps have been slow for a while, and no plain step has shown it."""
        return self._n_slow >= _N_SLOW and not self._is_confirmed

    def of(self, draft: float, verify: float) -> float:
        """Return by which factor the machine is slower than usual in a step with a draft.

        draft, verify: the times of the draft and of its pass, over what they usually take.
        """
        factor, least, most = 1.0, min(draft, verify), max(draft, verify)
        if least > _NOISE:
            factor = least
        elif most < 1.0 / _NOISE:
            factor = most
        if self._n_distrusted:
            self._n_distrusted -= 1
            return 1.0
        self._n_slow = self._n_slow + 1 if factor > _SLOW else 0
        self._factor = factor
        self._is_confirmed &= self._n_slow > 0
        return factor

    def plain(self, ratio: float) -> None:
        """Note the time of a plain step, over what it usually takes."""
        if self.is_doubted:
            self._is_confirmed = ratio - 1.0 > _SHARE * (self._factor - 1.0)
            if not self._is_confirmed:
                self._n_slow, self._n_distrusted = 0, _DISTRUST
