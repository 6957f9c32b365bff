"""What drafts are expected to bring and to cost. Pure.

Laws say what drafts bring (acceptance by depth) and cost (seconds by width) before anything is
measured; what is measured corrects them. Accounts limit what drafting may lose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..experts.cost import Experts, pass_time
from .plan import PLAIN, Plan, Source, Step

# A few: the weight of a belief against what was observed, in observations, and the first credit of
# drafts, in plain steps. A drafter that is believed to be right and never is shows it in a few.
FEW = 4.0
# What is kept of older counts at each observation: about 100 drafts tell of a text.
STEADY = 0.99
# Weight of what is known of a time against a new one, at most: times follow the machine. As many
# drafts those of earlier runs count for: the text at hand soon counts for more.
MEMORY = 12.0
# A single time may be off by this factor: the process may have been paused, or a graph built.
OUTLIER = 1.5
# Standard deviations by which the rates of a drafter may well be higher than they seem. All rates
# of a draft are that high at once, so this is not a small hope.
HOPE = 1.5


class Acceptance:
    """How often one drafter is right.

    A depth is observed only if the target accepted every token before it. So each depth has counts
    of its own, and what is not observed is inferred from the depth before it.

    rates: by depth, the probability of acceptance if all before it were accepted.
    seen: by depth, drafts that count.
    """

    def __init__(self, max_draft: int, prior: float) -> None:
        self._prior = prior
        self.seen = [0.0] * max_draft
        self._hits = [0.0] * max_draft
        # of classes of confidence: how often tokens were right, and how often by their depth alone
        self._classes: dict[int, tuple[float, float]] = {}
        self.rates = self.hopes(0.0)

    def remember(self, seen: Sequence[int], right: Sequence[int]) -> None:
        """Begin with counts of earlier runs, by depth."""
        scale = min(1.0, MEMORY / seen[0])
        for depth, (n, hits) in enumerate(zip(seen[: len(self.seen)], right)):
            self.seen[depth], self._hits[depth] = scale * n, scale * hits
        self.rates = self.hopes(0.0)

    def observe(self, ranks: Sequence[int], log_p: Sequence[float] = ()) -> None:
        """Count a verified draft; ranks, log_p: as in `Step`."""
        for depth, rank in enumerate(ranks):
            hit = float(rank == 0)
            if depth < len(log_p):
                right, expected = self._classes.get(at := _class_of(log_p[depth]), (0.0, 0.0))
                self._classes[at] = STEADY * right + hit, STEADY * expected + self.rates[depth]
            self._count(depth, 1.0, hit)
        self.rates = self.hopes(0.0)

    def expect(self, accept: Sequence[float], first: int) -> None:
        """Count the depths from `first` on of a draft that will not be verified so far.

        accept: their rates by the drafter's confidence. Without them, only drafts of which the
        drafter is sure would count, and the rates would be too high.
        """
        reach = math.prod(accept[:first])
        for depth in range(first, len(accept)):
            self._count(depth, reach, reach * accept[depth])
            reach *= accept[depth]

    def _count(self, depth: int, weight: float, hits: float) -> None:
        kept = 1.0 - (1.0 - STEADY) * weight
        self.seen[depth] = kept * self.seen[depth] + weight
        self._hits[depth] = kept * self._hits[depth] + hits

    def hopes(self, deviations: float) -> list[float]:
        """Return the rates as high as they may well be, by how often each was observed.

        deviations: standard deviations by which each rate may be higher than it seems.
        """
        found: list[float] = []
        inferred = self._prior
        for hits, seen in zip(self._hits, self.seen):
            rate = (hits + FEW * inferred) / (seen + FEW)
            # a depth that was not observed is inferred from what is hoped of the one before it
            known = seen / (seen + 1.0) if found else 1.0
            rate += deviations * known * math.sqrt(rate * (1.0 - rate) / (seen + FEW))
            inferred = min(rate, 1.0)
            found.append(inferred)
        return found

    def rates_of(self, log_p: Sequence[float]) -> list[float]:
        """Return the rates of one draft, by the drafter's confidence in each of its tokens.

        Each is the depth's rate, times how much oftener than expected tokens of its class of
        confidence were accepted.
        """
        found = []
        for rate, one in zip(self.rates, log_p):
            right, expected = self._classes.get(_class_of(one), (0.0, 0.0))
            found.append(min(rate * (right + FEW) / (expected + FEW), 1.0))
        return found


def _class_of(log_p: float) -> int:
    """Return the class of a log probability: each power of two of percents below 1 is one."""
    percents = -100.0 * log_p
    return min(int(percents), 1 << 10).bit_length() if math.isfinite(percents) else -1


class Ratios:
    """Measured over expected times by size, such as rows, as logarithms; sizes near tell too."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float, float]] = {}  # logarithm, weight, limit

    def at(self, size: int) -> float:
        """Return the logarithm of a size; 0 if nothing was measured near it."""
        total, weight = 0.0, 0.5  # of what other sizes and the law say: one observation
        for other, (log, n, _) in self._known.items():
            if other != size:
                near = n * (other / size if size > other else (size / other) ** 3)
                total, weight = total + near * log, weight + near
        log, n, _ = self._known.get(size, (0.0, 0.0, 0.0))
        return (total / weight + n * log) / (1.0 + n)

    def observe(self, size: int, log: float) -> None:
        """Count what was measured; one outlier changes little, several in a row are believed."""
        usual = math.log(OUTLIER)
        before, n, limit = self._known.get(size, (0.0, 0.0, usual))
        over, n = log - self.at(size), min(n + 1.0, MEMORY)
        log -= max(over - limit, 0.0) + min(over + limit, 0.0)
        is_odd = abs(over) > limit
        n, limit = (max(n / 2, 1.0), 2.0 * limit) if is_odd else (n, usual)
        self._known[size] = before + (log - before) / n, n, limit


class PassTimes:
    """Seconds of passes by rows, plain steps being of one.

    A pass takes `base * (law + lacking) * ratio`. base: a plain step without its missing experts.
    law: of a pass with every expert resident, lacking: what missing experts take, in these. ratio:
    measured over expected.

    plain_s: a plain step; 0 if none has been measured. seconds: by width, of verify passes; empty
    as long as plain_s is 0. widest: most rows of a pass so far.
    """

    def __init__(self, widths: Sequence[int], experts: Experts | None = None) -> None:
        """widths: rows that a verify pass may have, in order."""
        self.widths = tuple(widths)
        self._experts = experts
        self._miss_s = experts.miss_s if experts else 0.0
        self._base_s = self._one = 0.0  # the missing experts of a plain step
        self._n_plain, self._miss = 0, 0.0
        self._ratios, self._lacking = Ratios(), Ratios()
        self.plain_s, self.widest = 0.0, 1
        self.seconds: dict[int, float] = {}

    @property
    def is_known(self) -> bool:
        """Whether plain steps can be compared with: graphs are built in the first."""
        return self._n_plain >= 2

    def by_law(self, n_rows: int, n_missing: int) -> float:
        """Return what a pass takes by the law, if a plain step without missing experts takes 1."""
        return pass_time(n_rows) + self._miss_s * n_missing

    def at(self, n_rows: int) -> float:
        """Return the seconds of a pass, also of widths that are not planned; 0 if not known."""
        if n_rows == 1:
            return self.plain_s
        law = pass_time(n_rows)
        if self._experts:
            law += self._miss * self._missing(n_rows, self._experts)
        return self._base_s * law * math.exp(self._ratios.at(n_rows))

    def _missing(self, n_rows: int, experts: Experts) -> float:
        more = experts.distinct(n_rows) / experts.distinct(1)
        return self._one * more * math.exp(self._lacking.at(n_rows))

    def observe(self, n_rows: int, seconds: float, n_missing: int, is_new: bool = False) -> None:
        """Count a pass and what surrounds it, but for the draft.

        is_new: the machine is faster or slower than before, so older plain steps do not count.
        """
        if n_rows > 1:
            self._observe_verify(n_rows, seconds, n_missing)
            return
        if self._n_plain < 2:  # the first may have built graphs
            base = max(seconds - self._miss_s * n_missing, seconds / 8)
            self._base_s = min(base, self._base_s or base)
            self._miss = self._miss_s / self._base_s
        elif is_new:
            self._base_s = seconds / (1.0 + self._miss * n_missing)
        else:
            base = min(seconds / (1.0 + self._miss * n_missing), OUTLIER * self._base_s)
            self._base_s += (base - self._base_s) / min(self._n_plain, MEMORY)
        self._n_plain += 1
        self._one += (n_missing - self._one) / min(self._n_plain, MEMORY)
        self.plain_s = self._base_s * (1.0 + self._miss * self._one)

    def _observe_verify(self, n_rows: int, seconds: float, n_missing: int) -> None:
        if not self._base_s:
            return
        if self._experts and (expected := self._missing(n_rows, self._experts)):
            found = math.log(max(n_missing, 1.0) / expected)
            self._lacking.observe(n_rows, found + self._lacking.at(n_rows))
            self._one *= 1.0 + 0.3 * (n_missing / expected - 1.0) / MEMORY
        self.widest = max(n_rows, self.widest)
        law = pass_time(n_rows) + self._miss * n_missing
        self._ratios.observe(n_rows, math.log(seconds / (self._base_s * law)))

    def update(self) -> None:
        """Have plain_s and seconds follow from all that was counted."""
        if self._base_s:
            self.plain_s = self._base_s * (1.0 + self._miss * self._one)
            self.seconds = {width: self.at(width) for width in self.widths}


class Known:
    """What is known of a drafter: how often it is right, what it costs, what is best to draft.

    value: tokens a second of `plan`, the best one of the open widths. hope, hoped: value and depth
    of the best plan if it is as good as it may well be.
    """

    def __init__(self, source: Source, most: int) -> None:
        """most: depths of a draft."""
        self.source, self.most = source, most
        self.acceptance = Acceptance(max(most, 1), source.accept)
        self._ratios = Ratios()
        self.value = self.hope = 0.0
        self.plan, self.hoped = PLAIN, 0

    def draft_s(self, n_draft: int, passes: PassTimes) -> float:
        """Return the seconds of a draft of n_draft tokens."""
        return self.law(n_draft) * math.exp(self._ratios.at(n_draft)) * passes.plain_s

    def law(self, n_draft: int) -> float:
        """Return what a draft of n_draft tokens is expected to take, in plain steps."""
        return self.source.fixed + self.source.per_token * n_draft if n_draft else 0.0

    def observe_draft(self, n_draft: int, seconds: float, plain_s: float) -> None:
        """Count a draft; plain_s: of a plain step."""
        law_s = plain_s * self.law(n_draft)
        if law_s and seconds:
            self._ratios.observe(n_draft, math.log(seconds / law_s))

    def best_of(
        self, tokens: Sequence[float], passes: PassTimes, widths: Sequence[int]
    ) -> tuple[float, Plan]:
        """Return the best value of drafts, and its plan.

        tokens: that drafts are expected to give, by their length. widths: of which it takes one.
        """
        found = {
            width - 1: tokens[width - 1] / (self.draft_s(width - 1, passes) + passes.seconds[width])
            for width in widths
            if width <= len(tokens)
        }
        best = max(found, key=found.__getitem__, default=0)
        return found.get(best, 0.0), Plan(self.source.name, best)


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
