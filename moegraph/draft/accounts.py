"""What drafting may lose: two accounts in seconds, each of which earns a small share of all time.

One is charged what drafting loses against plain decoding and credited what it gains; without
credit every step is a plain one, so drafting cannot cost more than that share, however wrong the
estimates are. The other is charged what trials of other drafters are expected to lose against the
best one. Pure.
"""

from __future__ import annotations

# What both begin with, and their limit, in plain steps.
_CREDIT, _MOST = 4.0, 16.0
# Their share of all time, and that of the first while drafting is faster by all that is known, so
# that bad luck is soon forgotten.
_SHARE, _PAYING_SHARE = 0.006, 0.02


class Accounts:
    """drafting_s, trials_s: the credit of each."""

    def __init__(self) -> None:
        self.drafting_s = self.trials_s = 0.0

    def open(self, plain_s: float) -> None:
        """Begin anew. plain_s: of a plain step."""
        self.drafting_s = self.trials_s = _CREDIT * plain_s

    def book(
        self, plain_s: float, seconds: float, gained_s: float, risk_s: float, pays: bool
    ) -> None:
        """Note a step of so many seconds.

        gained_s: against plain steps. risk_s: what a trial was expected to lose against the best
        drafter. pays: drafting is faster by all that is known.
        """
        most_s, share = _MOST * plain_s, _PAYING_SHARE if pays else _SHARE
        self.trials_s = min(self.trials_s + _SHARE * seconds - risk_s, most_s)
        self.drafting_s = min(self.drafting_s + share * seconds + gained_s, most_s)
