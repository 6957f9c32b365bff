"""What drafting may lose, and whether the time of a step counts. Pure."""

from __future__ import annotations

from .estimates import FEW, OUTLIER
from .plan import Step

# What drafts may lose, as a share of all time: less than anyone notices.
SHARE = 0.006
# The same while it is faster by all that is known: bad luck is soon forgotten.
_PAYING_SHARE = 0.02


class Accounts:
    """Credit for drafts and for trials, in seconds; at most four times what they begin with.

    Both earn a small share of all time. That for drafts is charged what drafting loses against
    plain decoding and credited what it gains: without credit all steps are plain, so drafting
    cannot cost more than that share, however wrong the estimates are. That for trials is charged
    what they are expected to lose against the best way.

    credit_s: for drafts. is_confirmed: plain steps came since steps are odd.
    """

    def __init__(self) -> None:
        self.credit_s = self._trials_s = 0.0
        self._risk_s = 0.0  # what the trial at hand is expected to lose
        self._n_odd, self.is_confirmed = 0, False  # odd steps in a row

    def open(self, plain_s: float) -> None:
        """Begin with the time of a few drafts. plain_s: of a plain step."""
        self.credit_s = self._trials_s = FEW * plain_s

    def allows(self, loss_s: float) -> bool:
        """Return whether a trial may lose as much: half of the credit. It is the trial at hand."""
        if loss_s > 0.5 * self._trials_s:
            return False
        self._risk_s = max(loss_s, 0.0)
        return True

    @property
    def is_doubtful(self) -> bool:
        """Whether plain steps are to say why steps take longer than expected."""
        return self._n_odd >= FEW and not self.is_confirmed

    def trusts(self, ratio: float) -> bool:
        """Return whether a step's time counts that took `ratio` times as long as expected.

        An odd one tells of a pause, of new graphs or of another program. After a few in a row plain
        steps say which; from then on times count, odd or not.
        """
        if 1.0 / OUTLIER < ratio < OUTLIER:
            self._n_odd, self.is_confirmed = 0, False
            return True
        self._n_odd += 1
        return self._n_odd >= FEW and self.is_confirmed

    def gain(self, step: Step, seconds: float, plain_s: float, pays: bool) -> None:
        """Charge what a step with a draft lost, credit what it gained."""
        gained_s = step.n_tokens * plain_s - seconds
        if step.is_trial:
            self._trials_s -= self._risk_s
            if pays:  # the account of trials pays for most of it
                gained_s = min(gained_s + 3.0 * plain_s, 0.0)
        self.book(plain_s, seconds, gained_s, pays)

    def book(self, plain_s: float, seconds: float, gained_s: float, pays: bool) -> None:
        """Note a step. pays: drafting is faster by all that is known."""
        if not plain_s:
            self.open(seconds)
            return
        most_s = 4.0 * FEW * plain_s
        share = _PAYING_SHARE if pays else SHARE
        self._trials_s = min(self._trials_s + SHARE * seconds, most_s)
        self.credit_s = max(min(self.credit_s + share * seconds + gained_s, most_s), -most_s)
