"""Which experts of the next layer to fetch before its router has chosen.

A layer's router, applied to what the layer before it reads, guesses much of its choice: the
residual stream changes little from layer to layer. A guess that is right has its expert on the way
long before it is needed; a wrong one costs a copy that a real miss may have to wait for, and
guessing costs the device some time. Which weighs more depends on the model, the placement and the
machine, so it is tried out: some tokens with guesses, some without, in turns, and what was quicker
is kept for a while.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

# Guesses taken for a layer, best first: about as many as can arrive in a layer's time.
MAX_PREFETCH = 2
# It has to save this share of a token's time.
_MIN_GAIN = 0.01
# A trial: turns of a few tokens without and with guesses, so that what changes meanwhile (context,
# a cache that is warming up) touches both. The first turn of each is not counted: graphs may be
# captured in it.
_N_TURN, _N_TURNS = 8, 16
# Tokens until the next trial.
_N_KEPT = 2048


class PrefetchController:
    """Takes guesses about experts that are not resident, and finds out whether they pay.

    n_predicted, n_right: totals. acts: whether passes should guess now, and fetch.
    """

    def __init__(self, n_predictable: int) -> None:
        """Start; n_predictable: layers of a pass that can be guessed about."""
        self.n_predicted = 0
        self.n_right = 0
        self.enabled = False
        self._is_off = n_predictable == 0
        self._left = _N_TURN  # tokens of this turn, or of what is kept
        self._turn = 0  # _N_TURNS: no trial is under way
        self._times: tuple[list[float], list[float]] = [], []  # without, with
        self._open: tuple[int, Sequence[int]] | None = None

    def end_token(self, seconds: float) -> None:
        """Note what a token took; every so many, decide how to go on."""
        if self._is_off:
            return
        if 2 <= self._turn < _N_TURNS:
            self._times[self.enabled].append(seconds)
        self._left -= 1
        if self._left:
            return
        self._turn = (self._turn + 1) % (_N_TURNS + 1)
        if self._turn < _N_TURNS:
            self.enabled, self._left = self._turn % 2 == 1, _N_TURN
            return
        without, with_guesses = map(statistics.median, self._times)
        self.enabled, self._left = with_guesses < (1.0 - _MIN_GAIN) * without, _N_KEPT
        for times in self._times:
            times.clear()

    def predicted(self, il: int, absent: Sequence[int]) -> Sequence[int]:
        """Take guesses about layer il, best first; return those to fetch."""
        self.discard()
        self._open = il, absent[:MAX_PREFETCH]
        return self._open[1]

    def score(self, il: int, missing: Collection[int]) -> None:
        """Compare the open guess with the experts that layer il lacked."""
        if self._open is None:
            return
        at, predicted = self._open
        self._open = None
        self.n_predicted += len(predicted)
        if at == il:
            self.n_right += sum(expert in missing for expert in predicted)

    def discard(self) -> None:
        """Count an open guess that nobody needed: it was wrong."""
        self.score(-1, ())
