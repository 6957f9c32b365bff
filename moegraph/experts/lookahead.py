"""Which experts of the next layer to fetch before its router has chosen.

A layer's router, applied to what the layer before it read, guesses much of its choice: the residual
stream changes little from layer to layer. A guess that is right has its expert on the way long
before it is needed; a wrong one costs a copy that a real miss may have to wait for. So guesses are
judged all the time, also while nobody acts on them, and they act only while enough are right.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

# Guesses taken for a layer, best first: about as many as can arrive in a layer's time.
MAX_GUESSES = 2
# Slots for what is fetched. Layers take turns: one's is computed while the next one's arrives.
N_AHEAD = 2 * MAX_GUESSES
# Acting pays from this share on: a right guess saves most of a copy, a wrong one seldom delays one.
_MIN_SHARE = 0.3
# Guesses before the first verdict, and how many the verdict remembers.
_N_FIRST = 64
_N_MEMORY = 1024.0
# After so many with less than half the share that pays, guessing itself ends.
_N_LAST = 4096


class LookAhead:
    """Judges guesses about experts that are not resident.

    n_guessed, n_right: totals. acts: whether guesses should be fetched now; is_over: whether
    guessing is given up for good.
    """

    def __init__(self) -> None:
        self.n_guessed = 0
        self.n_right = 0
        self.acts = False
        self.is_over = False
        self._recent = [0.0, 0.0]  # guessed, right
        self._open: tuple[int, Sequence[int]] | None = None

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
        right = sum(expert in missing for expert in guessed) if at == il else 0
        self.n_guessed += len(guessed)
        self.n_right += right
        recent = self._recent
        recent[0] += len(guessed)
        recent[1] += right
        if recent[0] > _N_MEMORY:
            recent[:] = recent[0] / 2, recent[1] / 2
        share = recent[1] / recent[0] if recent[0] else 0.0
        self.acts = self.n_guessed >= _N_FIRST and share >= _MIN_SHARE
        self.is_over = self.n_guessed >= _N_LAST and share < _MIN_SHARE / 2
