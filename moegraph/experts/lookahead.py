"""Which experts of the next layer to fetch before its router has chosen.

A layer's router, applied to what the layer before it read, guesses much of its choice: the residual
stream changes little from layer to layer. A guess that is right has its expert on the way long
before it is needed; a wrong one costs a copy that a real miss may have to wait for, and guessing at
all costs the device some time in every layer. So guesses are judged as long as they are made, they
act only while enough are right, and where what they save is less than what they cost, as where
little is missing, no more are made for a while.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

# Guesses taken for a layer, best first: about as many as can arrive in a layer's time.
MAX_GUESSES = 2
# Acting pays from this share of right ones on: a wrong one seldom delays a miss.
_MIN_SHARE = 0.3
# Guesses before the first verdict, and how many the verdict remembers.
_N_FIRST = 64
_N_MEMORY = 1024.0
# Seconds that guessing costs a layer, measured on an H200; slower devices hide it behind experts.
_COST_S = 5e-6
# Of the copy, what a right guess saves.
_SAVED = 0.7
# Tokens after which it is decided whether to go on guessing, and tokens of a break.
_N_TRIAL, _N_BREAK = 64, 1024


class LookAhead:
    """Judges guesses about experts that are not resident.

    n_guessed, n_right: totals. guesses: whether guesses should be made now; acts: whether what they
    name should be fetched.
    """

    def __init__(self, n_layers: int, copy_s: float) -> None:
        """Start guessing for passes with n_layers foreseen layers; copy_s: one expert's copy."""
        self.n_guessed = 0
        self.n_right = 0
        self.guesses = n_layers > 0
        self.acts = False
        self._n_worth = n_layers * _COST_S / (_SAVED * copy_s)  # right ones a token that pay
        self._left = _N_TRIAL if n_layers else 0  # tokens to the next decision
        self._right_before = 0
        self._recent = [0.0, 0.0]  # guessed, right
        self._open: tuple[int, Sequence[int]] | None = None

    def begin_token(self) -> None:
        """Start a token; every so many, decide whether to make guesses."""
        if self._left == 0:
            return
        self._left -= 1
        if self._left:
            return
        if self.guesses:
            self.guesses = self.n_right - self._right_before >= self._n_worth * _N_TRIAL
        else:
            self.guesses = True
        self._left = _N_TRIAL if self.guesses else _N_BREAK
        self._right_before = self.n_right

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
