"""Which experts of the next layer to fetch before its router has chosen.

A layer's router, applied to what the layer before it reads, guesses much of its choice: the
residual stream changes little from layer to layer. A guess that is right has its expert on the way
long before it is needed; a wrong one costs a copy that a real miss may have to wait for. Which
weighs more depends on the model, the placement and the machine, so it is tried out: tokens with
guesses that are only judged, tokens with guesses that act, and what was quicker is kept for a
while.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

# Guesses taken for a layer, best first: about as many as can arrive in a layer's time.
MAX_GUESSES = 2
# Acting is tried where at least this share of the guesses is right.
_MIN_SHARE = 0.2
# It has to save this share of a token's time.
_MIN_GAIN = 0.01
# Tokens of each of the two ways that are compared, the first of them not counted (graphs may have
# been captured anew), and tokens until the next comparison.
_N_TRIAL, _N_SKIPPED, _N_KEPT = 64, 8, 2048


class LookAhead:
    """Judges guesses about experts that are not resident, and whether they pay.

    n_guessed, n_right: totals. guesses: whether guesses should be made now; acts: whether what they
    name should be fetched.
    """

    def __init__(self, n_foreseen: int) -> None:
        """Start; n_foreseen: layers of a pass that can be guessed about."""
        self.n_guessed = 0
        self.n_right = 0
        self.guesses = n_foreseen > 0
        self.acts = False
        self._left = _N_TRIAL  # tokens of what is tried, or kept, now
        self._is_trial = True
        self._judged_s = 0.0  # a token's time without acting
        self._times: list[float] = []
        self._before = (0, 0)  # n_guessed, n_right when the trial began
        self._open: tuple[int, Sequence[int]] | None = None
        self._is_off = not self.guesses

    def end_token(self, seconds: float) -> None:
        """Note what a token took; every so many, decide how to go on."""
        if self._is_off:
            return
        self._left -= 1
        if self._is_trial:
            self._times.append(seconds)
        if self._left:
            return
        if not self._is_trial:
            self._before = self.n_guessed, self.n_right
            self._start(_N_TRIAL, guesses=True, acts=False)
            return
        took = statistics.median(self._times[_N_SKIPPED:])
        if self.acts:
            pays = took < (1.0 - _MIN_GAIN) * self._judged_s
            self._start(_N_KEPT, guesses=pays, acts=pays)
            return
        self._judged_s = took
        guessed, right = self.n_guessed - self._before[0], self.n_right - self._before[1]
        if guessed and right >= _MIN_SHARE * guessed:
            self._start(_N_TRIAL, guesses=True, acts=True)
        else:
            self._start(_N_KEPT, guesses=False, acts=False)

    def _start(self, n_tokens: int, guesses: bool, acts: bool) -> None:
        self._left, self._is_trial = n_tokens, n_tokens == _N_TRIAL
        self.guesses, self.acts = guesses, acts
        self._times.clear()

    def guess(self, il: int, cold: Sequence[int]) -> Sequence[int]:
        """Take guesses about layer il, best first; return those to fetch."""
        self.judge(-1, ())  # one that nobody judged was wrong
        self._open = il, cold[:MAX_GUESSES]
        return self._open[1] if self.acts else ()

    def judge(self, il: int, missing: Collection[int]) -> None:
        """Compare the open guess with the experts that layer il lacked."""
        if self._open is None:
            return
        at, guessed = self._open
        self._open = None
        self.n_guessed += len(guessed)
        if at == il:
            self.n_right += sum(expert in missing for expert in guessed)
