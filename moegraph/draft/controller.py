"""Chooses what each step drafts: the source, how much, and in which shape; nothing if none pays.

A choice is worth the tokens it is expected to give in the seconds it is expected to take. Tokens
come from acceptance by depth, seconds from the measured cost of drafts and of verify passes, which
includes the missing experts that further rows would need.

What is not tried is not known: some steps try other ways, for which accounts.py has two accounts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ..placement.draftcounts import DraftCounts
from .accounts import Accounts
from .candidate import KNOWN, Candidate
from .drafter import Draft, confidence
from .firsttimes import Excused
from .missing import Experts
from .plan import PLAIN, DraftSettings, Plan, Shape, Source, Step
from .rates import STEADY, TRIAL, Acceptance
from .shapes import Growth, confident, grow
from .shared import SharedPasses, expected
from .stats import Recorder, SpecStats
from .stepcost import DraftCost, PassCost
from .steptimes import StepTimes, by_law
from .widths import Widths

# Rows of verify passes; each width has graphs of its own, so there are not too many.
WIDTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
# Plain steps before the first draft, so that there is something to compare with. Of two times the
# smaller one counts, because graphs are built in the first.
_FIRST_PLAIN = 2
# Plain steps of texts until statistics rely on their time, if one was measured before them.
_SETTLED = 6
# A step that takes so many times as long as expected was paused; what is above that is not charged.
_PAUSED = 1.5
# What a trial may lose against plain steps at the cost of its own account alone.
_TRIAL_LOSS = 3.0
# How much wider than the widest pass so far a pass may be: the law may be wrong.
_WIDER = 2
# Drafting begins if it is this much faster than plain decoding, and ends if it is slower than that.
_BEGIN, _END = 1.02, 0.99
# While nothing drafts, what trials of a drafter may be expected to lose, as a share of all time.
_TRIAL_SHARE = 0.004
# Depths of a trial, at least.
_TRIAL_DRAFT = 2
# Drafts that were verified before `auto` relies on a drafter.
_ASSURED = 2
# Drafting steps between two pairs of plain ones, which only keep the time of the second up to date
# (the first takes longer): if drafting is this much faster than plain decoding, and otherwise.
_CLEAR, _REFRESH, _OFTEN = 1.3, 192, 40
# Steps between two plans, with drafts and without; the first steps are planned one by one.
_PLAN_INTERVAL, _IDLE_INTERVAL, _FIRST_PLANS = 4, 32, 16
# A free draft of a source that must draft is verified if its first token is so likely to be right.
_LIKELY = 0.3
# A width without graphs must be so many times as fast to count as missed: estimates vary.
_GAIN = 1.03
# Standard deviations by which the rates of a drafter may well be higher than they seem. All rates
# of a draft are that high at once, so this is not a small hope.
_HOPE = 1.5
# What is kept of counts of acceptance when another text begins, and at each step without their
# drafter.
_KEPT_BEGIN, _KEPT_IDLE = 0.75, 0.999


class Controller:
    """Plans the steps of an engine; it lives over all its generations.

    A step calls `choose`, drafts, calls `shape`, verifies, and calls `observe`, which does the
    arithmetic: best while the device computes. Plain steps are observed too.
    """

    def __init__(
        self, sources: Sequence[Source], settings: DraftSettings, experts: Experts | None = None
    ) -> None:
        """experts: None if none can be missing."""
        self.settings = settings
        most, longest = settings.most_rows, [source.max_draft + 1 for source in sources]
        widths = sorted({w for w in (*WIDTHS, *longest, most) if 1 < w <= most})
        self.widths = Widths(widths, settings.graph_price if settings.is_timed else 0.0)
        self.passes = PassCost(widths, experts)
        self._planned_s, self._since_plan = 0.0, 0  # since the last plan
        spec = settings.spec
        wanted = [s for s in sources if spec == "auto" or s.name == spec] if spec != "off" else []
        self._drafters = {s.name: self._drafter(s) for s in wanted if self._most(s) > 0}
        self._ranked = list(self._drafters.values())
        self._absent: Collection[str] = ()  # drafters without a draft in this step
        self._accounts = Accounts()
        self._risk_s = 0.0  # what the trial at hand is expected to lose against the best drafter
        self._is_drafting = False
        self._clock = 0  # steps
        self._was_trial = False  # the last step
        self._since_plain = self._n_plain = 0  # verify passes; plain steps in a row
        self._plain_value = 0.0
        self._n_steps = 0
        self._n_unsure = 0  # plain steps until their time is one of texts, not one before the first
        self._recorder = Recorder()
        self._times = StepTimes(self.passes, self.widths.are_dear)
        self._shared = SharedPasses(settings.is_timed)

    def _most(self, source: Source) -> int:
        """Return the most depths that this source may draft."""
        settings = self.settings
        limits = [source.max_draft, settings.draft_max]
        if not settings.ddtree:
            limits.append(settings.most_rows - 1)
        return min(limit for limit in limits if limit is not None)

    def _drafter(self, source: Source) -> Candidate:
        most = self._most(source)
        acceptance = Acceptance(max(most, 1), source.accept, source.n_top)
        return Candidate(source, acceptance, DraftCost(source.fixed, source.per_token, most), most)

    def begin(self) -> None:
        """Begin another text: costs stay known, acceptance counts less."""
        for drafter in self._ranked:
            drafter.acceptance.forget(_KEPT_BEGIN)
            drafter.n_known = min(drafter.n_known, KNOWN - 1)
        self._was_trial = False
        self._n_steps = min(self._n_steps, _FIRST_PLAIN)

    def choose(self, n_left: int, without: Collection[str] = ()) -> Plan:
        """Return what the next step drafts.

        n_left: tokens until the text must end. without: sources that have nothing to draft now;
        call again with those whose draft was empty.
        """
        self._absent = without
        usable = [d for d in self._ranked if d.source.name not in without]
        if not usable or n_left <= 1:
            return PLAIN
        is_known = self.passes.plain_s > 0.0 and self._n_steps >= _FIRST_PLAIN
        if self.settings.is_fixed and (is_known or self._is_length_given):
            plan = self._fixed_plan(usable[0])
        elif not is_known or self._since_plain >= _REFRESH:
            return PLAIN
        elif free := [d for d in usable if d.source.is_free]:  # `shape` judges its draft
            plan = Plan(free[0].source.name, free[0].most)
        elif self._pays(usable[0]) and usable[0].n_known >= _ASSURED:
            plan = self._other(usable) or self._affordable(usable[0])
            often = _REFRESH if self._pays(usable[0], _CLEAR) else _OFTEN
            if self._since_plain >= often or self._times.pace.is_doubted:
                plan = PLAIN
        else:
            plan = self._trial(usable) or PLAIN
        return plan if plan.n_draft < n_left else self._last_plan(plan, n_left - 1)

    def _last_plan(self, plan: Plan, n_draft: int) -> Plan:
        """Return a plan near the end of a text: rows for n_draft tokens, of a width with graphs."""
        if not self.widths.are_dear:
            return replace(plan, n_draft=n_draft)
        if self._is_length_given:
            return plan
        lengths = [w - 1 for w in self.widths.open if n_draft < w <= plan.n_draft]
        return replace(plan, n_draft=min(lengths, default=plan.n_draft))

    def choose_for(self, n_seqs: int, n_left: int, without: Collection[str] = ()) -> Plan:
        """Return what one of n_seqs sequences drafts that share a pass, as long as all draft so.

        The rows of a pass cost less, the more there are; but a draft costs as much for each.
        """
        usable = [d for d in self._ranked if d.source.name not in without]
        if not usable or n_left <= 1 or not self.passes.plain_s:
            return PLAIN
        if self.settings.is_timed and not self._shared.may_draft(n_seqs):
            return PLAIN
        return self._shared.plan(usable[0], self.passes, n_seqs, n_left, _BEGIN)

    def observe_shared(self, n_seqs: int, n_tokens: int, seconds: float, n_rows: int) -> None:
        """Learn from a pass of several sequences. seconds: with its drafts; 0 if not known."""
        like_one_s = seconds / self.passes.by_law(n_seqs, 0)
        over = seconds / (expected(self._ranked[:1], self.passes, n_seqs, n_rows) or 1.0)
        self._shared.observe(n_seqs, n_tokens, like_one_s, n_rows, over)
        if not self.passes.plain_s and n_rows == n_seqs and seconds:
            self.passes.observe_plain(like_one_s, 0)

    def calibrate(self, plain_s: float, verify_s: Mapping[int, float]) -> None:
        """Learn what passes take before the first text; their graphs exist now.

        verify_s: seconds of verify passes by rows.
        """
        for _ in range(_FIRST_PLAIN):
            self.passes.observe_plain(plain_s, 0)
        self.passes.update()
        for n_rows, seconds in verify_s.items():
            self.passes.calibrate(n_rows, seconds)
            self._times.graphs.know(n_rows)
        self.widths.have(verify_s)
        self._n_steps, self._n_unsure = _FIRST_PLAIN, _SETTLED
        self._accounts.open(plain_s)
        self._plan()

    def remember(self, known: DraftCounts) -> None:
        """Begin with what drafters of earlier runs were; later calls count for more."""
        for name, (seen, right) in known.items():
            drafter = self._drafters.get(name)
            if drafter and seen and seen[0]:
                n = drafter.acceptance.remember(seen, right)
                drafter.n_known = min(max(drafter.n_known, int(n)), KNOWN)
        self._plan()

    @property
    def _best(self) -> Candidate | None:
        """The best drafter that has something to draft in this step, of those that are not free."""
        for drafter in self._ranked:
            if not (drafter.source.is_free or drafter.source.name in self._absent):
                return drafter
        return None

    def _pays(self, best: Candidate, limit: float | None = None) -> bool:
        """Return whether drafting is faster than plain decoding, `limit` times as fast if given."""
        limit = limit or (_END if self._is_drafting else _BEGIN)
        return best.plan.n_draft > 0 and best.value > limit * self._plain_value

    def _affordable(self, drafter: Candidate) -> Plan:
        """Return the best plan of a drafter that pays, or a shorter one that the account covers.

        At worst a step gives one token, as a plain step does in less time.
        """
        plan, plain_s = drafter.plan, self.passes.plain_s
        most_s = plain_s + self._accounts.drafting_s
        lengths = [w - 1 for w in self.widths.open if w <= plan.n_draft]
        lengths = [n for n in (*lengths, plan.n_draft) if self._seconds(drafter, n) <= most_s]
        n = max(lengths, default=0)
        if n == plan.n_draft:
            return plan
        tokens = grow(drafter.acceptance.rates[:n], (), n).tokens[-1]
        pays = n > 0 and tokens * plain_s > self._seconds(drafter, n)
        return replace(plan, n_draft=n, n_nodes=0) if pays else PLAIN

    def _fixed_plan(self, drafter: Candidate) -> Plan:
        """Return the plan of a source that must draft."""
        settings, source = self.settings, drafter.source
        if settings.ddtree:
            n_top = settings.ddtree.n_top(drafter.most)
            return Plan(source.name, drafter.most, n_top, settings.ddtree)
        if self._is_length_given:
            n_nodes = settings.budget - 1 if settings.budget and source.has_tree else 0
            return Plan(source.name, drafter.most, 1, n_nodes=n_nodes)
        n_draft = drafter.most if source.is_free else max(drafter.plan.n_draft, 1)
        return replace(drafter.plan, source=source.name, n_draft=n_draft)

    @property
    def _is_length_given(self) -> bool:
        settings = self.settings
        return bool(settings.draft_max or settings.budget or settings.ddtree)

    def _trial(self, usable: Sequence[Candidate]) -> Plan | None:
        """Return a trial of the drafter that was tried least, if one is due and there is credit."""
        if self._was_trial:
            return None
        hopeful = [d for d in usable if d.hope > self._plain_value]
        for drafter in sorted(hopeful, key=lambda d: (not d.is_new, d.n_steps)):
            n, credit_s = drafter.plan.n_draft, self._accounts.drafting_s
            plan = self._trial_of(drafter, n, self._plain_value, credit_s)
            if plan is None:
                continue
            loss_s = self._loss_s(drafter, plan.n_draft, self._plain_value)
            earned_s = _TRIAL_SHARE * (self._clock - drafter.tried_at) * self.passes.plain_s
            if drafter.is_new or earned_s >= loss_s:
                return plan
        return None

    def _other(self, usable: Sequence[Candidate]) -> Plan | None:
        """Return a trial of another drafter, or of longer drafts, if that may be better."""
        if self._was_trial or self._accounts.drafting_s < 0.0:
            return None
        best = usable[0]
        others = [d for d in usable if d is not best or d.hoped > d.plan.n_draft]
        other = max(others, key=lambda d: d.hope, default=best)
        plan = self._trial_of(other, other.hoped, _BEGIN * best.value, self._accounts.trials_s)
        if plan is None or (other is best and plan.n_draft <= best.plan.n_draft):
            return None  # the latter is what is done anyway
        self._risk_s = max(self._loss_s(other, plan.n_draft, best.value), 0.0)
        return plan

    def _trial_of(self, drafter: Candidate, n: int, value: float, credit_s: float) -> Plan | None:
        """Return a trial of n tokens of a drafter that may be better than `value`, or of fewer.

        What it is expected to lose may be half of the credit.
        """
        if drafter.hope <= value:
            return None
        # a draft much longer than what seems best would tell little, and cost much
        widths = self.widths.open
        wider = next((w for w in widths if w > drafter.plan.n_draft + 1), widths[-1])
        most = min(drafter.most, wider - 1)
        n = min(max(n, _TRIAL_DRAFT), most)
        least = min(max(n // 2, _TRIAL_DRAFT), n)  # a shorter one would tell little
        while n >= least and self._loss_s(drafter, n, value) > 0.5 * credit_s:
            n -= 1
        if n < least:
            return None
        if self.widths.are_dear:
            n = max((w - 1 for w in self.widths.open if w <= n + 1), default=0)
            if not n:
                return None
        return Plan(drafter.source.name, n, drafter.source.n_top, is_trial=True)

    def _loss_s(self, drafter: Candidate, n_draft: int, value: float) -> float:
        """Return what a chain is expected to lose, in seconds, against `value` tokens a second."""
        tokens = grow(drafter.acceptance.rates[:n_draft], (), n_draft).tokens[-1]
        return self._seconds(drafter, n_draft) - tokens / value

    @property
    def _widest(self) -> int:
        """The most rows that the next pass may have."""
        return max(_WIDER * self.passes.widest, 2 * _TRIAL_DRAFT)

    def _usable(self, widths: Sequence[int]) -> list[int]:
        return [width for width in widths if width <= self._widest]

    def _seconds(self, drafter: Candidate, n_draft: int) -> float:
        """Return what a step takes that verifies a chain."""
        width = next((w for w in self.widths.every if w > n_draft), self.widths.every[-1])
        return drafter.draft_s(n_draft, self.passes) + self.passes.seconds[width]

    def shape(self, plan: Plan, draft: Draft) -> Shape:
        """Return the rows to verify of a draft, of a plan without a DDTree."""
        n_depth, log_p = min(draft.n_depth, plan.n_draft), confidence(draft)
        if log_p and self.settings.p_min > 0.0:
            n_depth = confident(log_p[:n_depth], self.settings.p_min)
        if n_depth == 0:
            return Shape()
        drafter = self._drafters[plan.source]
        is_given = self.settings.is_fixed and self._is_length_given
        is_free = drafter.source.is_free
        if plan.is_whole or plan.is_trial or is_given or (drafter.is_new and not is_free):
            return Shape(n_depth)
        if is_free:
            return self._free_shape([math.exp(p) for p in log_p[:n_depth]])
        known = drafter.acceptance
        accept = known.rates_of(log_p[:n_depth]) if log_p else known.rates[:n_depth]
        growth = grow(accept, known.leaf if plan.n_top > 1 else (), self.widths.every[-1] - 1)
        # a plan cut short for want of credit competes with plain steps
        is_best = plan.n_draft >= drafter.plan.n_draft
        rate = max(self._plain_value, drafter.value if is_best else 0.0)
        plain = 1, 1.0 - rate * self.passes.plain_s
        shape = growth.shape(self._worthwhile(growth, rate, plain))
        if log_p:
            known.expect(accept, shape.n_spine)
        return shape

    def _free_shape(self, accept: Sequence[float]) -> Shape:
        """Return the rows of a draft that costs nothing, if no other step would give more.

        accept: probability of each token if those before it are right.
        """
        rate, most_s = self._plain_value, math.inf
        if self.settings.is_fixed:
            if accept[0] < _LIKELY:
                return Shape()
        else:
            best, most_s = self._best, self.passes.plain_s + self._accounts.drafting_s
            rate = _BEGIN * max(rate, best.value if best and self._is_drafting else 0.0)
        growth = grow(accept, (), self.widths.every[-1] - 1)
        return growth.shape(self._worthwhile(growth, rate, (1, 0.0), most_s))

    def _worthwhile(
        self, growth: Growth, rate: float, plain: tuple[int, float], most_s: float = math.inf
    ) -> int:
        """Return the rows that gain most, now that the draft is there and paid for.

        rate: tokens a second that other steps would give in the time that a row takes. plain: rows
        and gain of a step without the draft. most_s: what the pass may take.
        """
        if self.settings.is_fixed:
            plain = 2, -math.inf
        widths = [w for w in self.widths.every if w <= min(len(growth.tokens), self._widest)]
        widths = [w for w in widths if self.passes.seconds[w] <= most_s]
        gains = [growth.tokens[w - 1] - rate * self.passes.seconds[w] for w in widths]
        (best, most), (other, more) = plain, plain
        for width, gain in zip(widths, gains):
            if gain > more:
                other, more = width, gain
            if gain > most and width in self.widths.open:
                best, most = width, gain
        if most > -math.inf and self._times.graphs.has_credit:
            self.widths.miss(other, more - most - (_GAIN - 1.0) * growth.tokens[other - 1])
        return best

    def observe(self, step: Step) -> None:
        """Learn from a step, and plan the next ones."""
        if self.settings.is_timed:
            self._recorder.add(step, 0.0 if self._n_unsure else self.passes.plain_s)
        else:
            self._recorder.add(step, 0.0)
            step = by_law(step, self._drafters.get(step.source), self.passes)
        plain_s = self.passes.plain_s
        if step.source:
            step = self._learn(step)
        elif step.seconds and (self._n_plain or step.seconds < plain_s or not plain_s):
            self._times.plain(step)
            self.passes.observe_plain(step.seconds, step.n_missing)
            self._since_plain, self._n_unsure = 0, max(self._n_unsure - 1, 0)
        self._n_plain = 0 if step.source else self._n_plain + 1
        self._was_trial = step.is_trial
        if step.seconds:
            self._book(step, plain_s)
        self._n_steps += 1
        self._clock += 1
        self._since_plan += 1
        self._planned_s += step.seconds
        if plain_s:
            self._times.graphs.earn(step.n_tokens - step.seconds / plain_s)
        interval = _PLAN_INTERVAL if step.source or self._is_drafting else _IDLE_INTERVAL
        if self._n_steps < _FIRST_PLANS or self._since_plan >= interval:
            self._plan()

    def _learn(self, step: Step) -> Step:
        """Learn from a step with a draft; return it without what does not count of its times."""
        drafter, excused = self._drafters[step.source], Excused()
        if self.settings.is_timed:
            step, excused = self._times.usual(step, drafter)
        if step.n_rows > 1:
            self._since_plain += 1
            if step.seconds and excused.verify:
                self.passes.note_width(step.n_rows, step.n_missing)
            elif step.seconds:
                seconds = step.seconds - step.drafter_s
                self.passes.observe_verify(step.n_rows, seconds, step.n_missing)
        self._observe_draft(drafter, step, not excused.draft)
        return step

    @property
    def stats(self) -> SpecStats:
        """What was drafted so far."""
        return self._recorder.stats

    def _observe_draft(self, drafter: Candidate, step: Step, is_usual: bool) -> None:
        """Learn from a draft. is_usual: its time is what drafts take."""
        drafter.n_steps += 1
        if step.n_draft and step.seconds and self.passes.plain_s and is_usual:
            drafter.cost.observe(step.n_draft, step.drafter_s, self.passes.base_s)
        if step.n_spine:
            self._count(drafter, step.ranks, step.log_p)
        if step.is_trial:
            drafter.tried_at = self._clock

    def _count(self, drafter: Candidate, ranks: Sequence[int], log_p: Sequence[float]) -> None:
        drafter.n_known += 1
        kept = STEADY
        if not (self._is_drafting or drafter.is_new):  # what was seen before is long ago
            kept = max(math.pow(STEADY, self._clock - drafter.counted_at), TRIAL)
        drafter.counted_at = self._clock
        drafter.acceptance.observe(ranks, log_p, kept)

    def _book(self, step: Step, plain_s: float) -> None:
        """Charge the accounts for what a step lost, credit what it gained."""
        if not plain_s:
            self._accounts.open(self.passes.plain_s)
            return
        best, risk_s = self._best, 0.0
        pays = best is not None and best.n_known >= _ASSURED and self._pays(best)
        spent_s = min(step.seconds, _PAUSED * self._expected(step))
        gained_s = step.n_tokens * plain_s - spent_s if step.source else 0.0
        if self._is_drafting and step.is_trial:
            gained_s, risk_s = min(0.0, gained_s + _TRIAL_LOSS * plain_s), self._risk_s
        self._accounts.book(plain_s, step.seconds, gained_s, risk_s, pays)

    def _expected(self, step: Step) -> float:
        """Return what a step should have taken."""
        drafter = self._drafters.get(step.source)
        draft_s = drafter.draft_s(step.n_draft, self.passes) if drafter else 0.0
        return draft_s + self.passes.at(step.n_rows)

    def _plan(self) -> None:
        """Work out the best plan of each drafter, and whether drafting pays."""
        passes = self.passes
        passes.update()
        self._shared.forget_plans()
        if not passes.plain_s:
            return
        self._plain_value = 1.0 / passes.plain_s
        first = self._best
        for drafter in self._ranked:
            known, source = drafter.acceptance, drafter.source
            if drafter is not first:
                known.forget(math.pow(_KEPT_IDLE, self._since_plan))
            # drafts of a new one are verified whole, without leaves
            leaf = known.leaf if source.n_top > 1 and not drafter.is_new else ()
            most = self.widths.every[-1] - 1
            growth = grow(known.rates, leaf, most)
            value, _, width = drafter.best(growth, passes, self._usable(self.widths.every))
            open_ = self._usable(self.widths.open)
            drafter.value, drafter.plan, _ = drafter.best(growth, passes, open_)
            lost = value / _GAIN - max(drafter.value, self._plain_value)
            if self._times.graphs.has_credit and drafter.n_known and not source.is_free:
                self.widths.miss(width, lost * self._planned_s)
            hopes = grow(known.hopes(_HOPE), leaf, most)
            drafter.hope, hoped, _ = drafter.best(hopes, passes, open_)
            drafter.hoped = hoped.n_draft
        self._planned_s, self._since_plan = 0.0, 0
        self._ranked.sort(key=lambda drafter: -drafter.value)
        best = self._best
        self._is_drafting = best is not None and self._pays(best)
