"""Chooses what each step drafts: the source, how much, and in which shape; nothing if none pays.

A choice is worth the tokens it is expected to give in the seconds it is expected to take
(estimates.py). What is not tried is not known, so some steps try other ways. Two accounts, in
seconds, each earn a small share of all time. One is charged what drafting loses against plain
decoding and credited what it gains: without credit all steps are plain, so drafting cannot cost
more than that share, however wrong the estimates are. The other is charged what trials are expected
to lose against the best way.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ..placement.draftcounts import DraftCounts
from .drafter import Draft, confidence
from .estimates import HOPE, SHARE, Experts, Known, PassTimes, by_law
from .plan import PLAIN, DraftSettings, Growth, Plan, Shape, Source, Step, confident, grow
from .shared import SharedPasses, expected
from .stats import Recorder, SpecStats

# Rows of verify passes; each width has graphs of its own, so there are not too many.
WIDTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
# The first width: a draft of three tokens tells most about a drafter.
FIRST_WIDTH = 4
# Plain steps before the first draft: graphs are built in the first, so two are compared with.
_FIRST_PLAIN = 2
# What both accounts begin with, in plain steps: a few drafts. Four times as much is their limit.
_CREDIT = 4.0
# What drafting may lose, as a share of all time, while it is faster by all that is known: bad luck
# is soon forgotten.
_PAYING_SHARE = 0.02
# Something else must be this much faster to count: estimates vary.
_MARGIN = 1.02
# A step that takes so many times as long as expected, or as short, tells of a pause, of new graphs
# or of another program. After as many in a row as a graph has slow launches, and one, plain steps
# say which.
_ODD, _N_ODD = 1.25, 5
# Drafting steps between two pairs of plain ones, which measure what these take now (the first takes
# longer), where drafts hardly gain; more where they gain much, as the pairs cost more there.
_REFRESH = 32
# Steps between two plans, with drafts and without: a plan takes as long as a few kernels.
_INTERVAL, _IDLE_INTERVAL = 4, 32
# A draft that costs nothing and must be verified is, if its first token is so likely to be right.
_LIKELY = 0.3
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
        widths = sorted({w for w in (*WIDTHS, *longest, most) if 1 < w <= most}) or [2]
        self.passes = PassTimes(widths, experts)
        self._price = settings.graph_price if settings.is_timed else 0.0
        first = [w for w in widths if w <= max(FIRST_WIDTH, widths[0])][-1:]
        self.open = tuple(first if self._price else widths)  # widths that may be used
        self._missed: dict[int, float] = {}  # tokens that other widths would have given
        spec = settings.spec
        wanted = [s for s in sources if spec in ("auto", s.name)]
        known = [Known(source, self._most(source)) for source in wanted]
        self._drafters = {one.source.name: one for one in known if one.most > 0}
        self._ranked = list(self._drafters.values())  # the best first
        self._absent: Collection[str] = ()  # drafters without a draft in this step
        self._credit_s = self._trials_s = 0.0  # of drafting, and of trials
        self._risk_s = 0.0  # what the trial at hand is expected to lose
        self._clock = self._n_plain = 0  # steps; plain ones in a row
        self._since_plain = self._since_plan = 0  # steps
        self._since_plan_s = 0.0
        self._was_trial = False  # the last step
        self._n_odd, self._is_confirmed = 0, False  # odd steps in a row; plain ones came since
        self._recorder = Recorder()
        self._shared = SharedPasses(settings.is_timed)

    def _most(self, source: Source) -> int:
        """Return the most depths that this source may draft."""
        settings = self.settings
        limits = [source.max_draft, settings.draft_max]
        if not settings.ddtree:
            limits.append(settings.most_rows - 1)
        return min(limit for limit in limits if limit is not None)

    def begin(self) -> None:
        """Begin another text: costs stay known, acceptance counts less."""
        for drafter in self._ranked:
            drafter.acceptance.forget(_KEPT_BEGIN)
        self._was_trial = False

    def choose(self, n_left: int, without: Collection[str] = ()) -> Plan:
        """Return what the next step drafts.

        n_left: tokens until the text must end. without: sources that have nothing to draft now;
        call again with those whose draft was empty.
        """
        self._absent = without
        usable = self._usable(without)
        if not usable or n_left <= 1:
            return PLAIN
        is_known = self.passes.plain_s > 0.0 and self._clock >= _FIRST_PLAIN
        if self.settings.is_fixed and (is_known or self._is_length_given):
            plan = self._fixed_plan(usable[0])
        elif not is_known or self._is_doubtful or self._since_plain >= self._refresh(usable[0]):
            return PLAIN
        elif free := [d for d in usable if d.source.is_free]:  # `shape` judges its draft
            plan = Plan(free[0].source.name, free[0].most)
        else:
            plan = self._trial(usable) or PLAIN
            if not plan.source and self._pays and self._credit_s > 0.0:
                plan = usable[0].plan
        return plan if plan.n_draft < n_left else self._last_plan(plan, n_left - 1)

    def _near(self, widths: Sequence[int]) -> list[int]:
        """Return widths that are not far wider than any measured one: the law may be wrong."""
        most = max(2 * self.passes.widest, FIRST_WIDTH)
        return [w for w in widths if w <= most] or list(widths[:1])

    def _usable(self, without: Collection[str]) -> list[Known]:
        return [d for d in self._ranked if d.source.name not in without]

    def _refresh(self, best: Known) -> float:
        """Return the drafting steps until plain ones are measured again."""
        return _REFRESH * max(best.value * self.passes.plain_s, 1.0) ** 4

    def _last_plan(self, plan: Plan, n_draft: int) -> Plan:
        """Return a plan near the end of a text: rows for n_draft tokens, of a width with graphs."""
        if self._price <= _CREDIT:  # another width costs little
            return replace(plan, n_draft=n_draft)
        if self._is_length_given:
            return plan
        lengths = [w - 1 for w in self.open if n_draft < w <= plan.n_draft]
        return replace(plan, n_draft=min(lengths, default=plan.n_draft))

    @property
    def _best(self) -> Known | None:
        """The best drafter that has something to draft in this step, of those that are not free."""
        usable = self._usable(self._absent)
        return next((drafter for drafter in usable if not drafter.source.is_free), None)

    @property
    def _pays(self) -> bool:
        """Whether drafting is faster than plain decoding."""
        best = self._best
        return best is not None and best.value * self.passes.plain_s > 1.0

    def _trial(self, usable: Sequence[Known]) -> Plan | None:
        """Return a trial of another drafter, or of longer drafts, if that may be better.

        What it is expected to lose may be half of the credit.
        """
        if self._was_trial or self._credit_s <= 0.0:
            return None
        best, value = usable[0], max(_MARGIN * usable[0].value, 1.0 / self.passes.plain_s)
        for drafter in sorted(usable, key=lambda drafter: -drafter.hope):
            is_done = self._pays and drafter is best  # up to the length of its plan
            if drafter.hope <= value or (is_done and drafter.hoped <= best.plan.n_draft):
                continue
            # a draft much longer than what seems best would tell little, and cost much
            widths = [w for w in self.open if w <= max(drafter.hoped, 2) + 1] or self.open[:1]
            n_known = sum(w <= drafter.plan.n_draft + 1 for w in widths)
            for width in reversed(widths[: n_known + 1]):
                n_draft = min(width - 1, drafter.most)
                if is_done and n_draft <= best.plan.n_draft:
                    break
                tokens = grow(drafter.acceptance.rates[:n_draft], (), n_draft).tokens[-1]
                loss_s = self._seconds(drafter, n_draft) - tokens / value
                if loss_s <= 0.5 * self._trials_s:
                    self._risk_s = max(loss_s, 0.0)
                    return Plan(drafter.source.name, n_draft, drafter.source.n_top, is_trial=True)
        return None

    def _seconds(self, drafter: Known, n_draft: int) -> float:
        """Return what a step takes that verifies a chain."""
        width = next((w for w in self.passes.widths if w > n_draft), self.passes.widths[-1])
        return drafter.draft_s(n_draft, self.passes) + self.passes.seconds[width]

    def _fixed_plan(self, drafter: Known) -> Plan:
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

    def choose_for(self, n_seqs: int, n_left: int, without: Collection[str] = ()) -> Plan:
        """Return what one of n_seqs sequences drafts that share a pass, as long as all draft so.

        The rows of a pass cost less, the more there are; but a draft costs as much for each.
        """
        usable = self._usable(without)
        if not usable or n_left <= 1 or not self.passes.plain_s:
            return PLAIN
        if self.settings.is_timed and not self._shared.may_draft(n_seqs):
            return PLAIN
        return self._shared.plan(usable[0], self.passes, n_seqs, n_left, _MARGIN)

    def observe_shared(self, n_seqs: int, n_tokens: int, seconds: float, n_rows: int) -> None:
        """Learn from a pass of several sequences. seconds: with its drafts; 0 if not known."""
        like_one_s = seconds / self.passes.by_law(n_seqs, 0)
        usual_s = expected(self._ranked[:1], self.passes, n_seqs, n_rows)
        over = seconds / usual_s if usual_s else 1.0
        self._shared.observe(n_seqs, n_tokens, like_one_s, n_rows, over)
        if not self.passes.plain_s and n_rows == n_seqs and seconds:
            self.passes.observe(1, like_one_s, 0)

    def calibrate(self, plain_s: float, verify_s: Mapping[int, float]) -> None:
        """Learn what passes take before the first text; their graphs exist now.

        verify_s: seconds of verify passes by rows.
        """
        for _ in range(_FIRST_PLAIN):
            self.passes.observe(1, plain_s, 0)
        for n_rows, seconds in verify_s.items():
            for _ in range(3):
                self.passes.observe(n_rows, seconds, 0)
        self.have(verify_s)
        self._clock = _FIRST_PLAIN
        self._credit_s = self._trials_s = _CREDIT * plain_s
        self._plan()

    def have(self, widths: Iterable[int]) -> None:
        """Use widths whose graphs exist."""
        self.open = tuple(sorted({*self.open, *widths} & {*self.passes.widths}))

    def remember(self, known: DraftCounts) -> None:
        """Begin with what drafters of earlier runs were; later calls count for more."""
        for name, (seen, right) in known.items():
            if name in self._drafters and seen and seen[0]:
                self._drafters[name].acceptance.remember(seen, right)
        self._plan()

    def shape(self, plan: Plan, draft: Draft) -> Shape:
        """Return the rows to verify of a draft, of a plan without a DDTree."""
        n_depth, log_p = min(draft.n_depth, plan.n_draft), confidence(draft)
        if log_p and self.settings.p_min > 0.0:
            n_depth = confident(log_p[:n_depth], self.settings.p_min)
        if n_depth == 0:
            return Shape()
        drafter = self._drafters[plan.source]
        is_given = self.settings.is_fixed and self._is_length_given
        if plan.is_whole or plan.is_trial or is_given:
            return Shape(n_depth)
        if drafter.source.is_free:
            return self._free_shape([math.exp(p) for p in log_p[:n_depth]])
        known = drafter.acceptance
        accept = known.rates_of(log_p[:n_depth]) if log_p else known.rates[:n_depth]
        growth = grow(accept, known.leaf if plan.n_top > 1 else (), self.passes.widths[-1] - 1)
        rate = max(1.0 / self.passes.plain_s, drafter.value)
        shape = growth.shape(self._worthwhile(growth, rate, 1.0 - rate * self.passes.plain_s))
        if log_p:
            known.expect(accept, shape.n_spine)
        return shape

    def _free_shape(self, accept: Sequence[float]) -> Shape:
        """Return the rows of a draft that costs nothing, if no other step would give more.

        accept: probability of each token if those before it are right.
        """
        most_s, value = math.inf, 0.0
        if self.settings.is_fixed:
            if accept[0] < _LIKELY:
                return Shape()
        else:
            most_s = self.passes.plain_s + self._credit_s
            value = self._best.value if self._best else 0.0
        rate = _MARGIN * max(1.0 / self.passes.plain_s, value)
        growth = grow(accept, (), self.passes.widths[-1] - 1)
        return growth.shape(self._worthwhile(growth, rate, 0.0, most_s))

    def _worthwhile(
        self, growth: Growth, rate: float, plain: float, most_s: float = math.inf
    ) -> int:
        """Return the rows that gain most, now that the draft is there and paid for.

        rate: tokens a second that other steps would give in the time that a row takes. plain: gain
        of a step without the draft. most_s: what the pass may take.
        """
        n_most, seconds = len(growth.tokens), self.passes.seconds
        widths = [w for w in self._near(self.passes.widths) if w <= n_most and seconds[w] <= most_s]
        gains = {w: growth.tokens[w - 1] - rate * seconds[w] for w in widths}
        found = {2: -math.inf} if self.settings.is_fixed else {1: plain}
        found |= {w: gain for w, gain in gains.items() if w in self.open}
        best, other = (
            max(found, key=found.__getitem__),
            max(gains, key=gains.__getitem__, default=1),
        )
        if gains and math.isfinite(found[best]):
            self._miss(other, gains[other] - found[best])
        return best

    def _miss(self, width: int, tokens: float) -> None:
        """Note that a width would have given so many tokens more than those that are used.

        It is used once it would have given half as many again as its first passes cost: a text may
        end before they are paid for.
        """
        if width not in self.open and tokens > 0.0:
            self._missed[width] = self._missed.get(width, 0.0) + tokens
            if self._missed[width] >= 1.5 * self._price:
                self.open = tuple(sorted((*self.open, width)))
                self._missed.clear()

    def observe(self, step: Step) -> None:
        """Learn from a step, and plan the next ones."""
        drafter, passes = self._drafters.get(step.source), self.passes
        if self.settings.is_timed:
            self._recorder.add(step, passes.plain_s)
        else:
            self._recorder.add(step, 0.0)
            step = by_law(step, drafter, passes)
        if drafter:
            self._learn(step, drafter)
        elif step.seconds:
            self._learn_plain(step)
        self._n_plain = 0 if step.source else self._n_plain + 1
        self._was_trial = step.is_trial
        self._clock += 1
        self._since_plan += 1
        self._since_plan_s += step.seconds
        interval = _INTERVAL if step.source or self._pays else _IDLE_INTERVAL
        if self._clock < 4 * _INTERVAL or self._since_plan >= interval:
            self._plan()

    @property
    def _is_doubtful(self) -> bool:
        """Whether plain steps are to say why steps take longer than expected."""
        return self._n_odd >= _N_ODD and not self._is_confirmed

    def _learn_plain(self, step: Step) -> None:
        """Learn from a plain step: the first after a draft takes longer."""
        passes = self.passes
        self._book(step.seconds, 0.0)
        if self._n_plain or step.seconds < passes.plain_s or not passes.plain_s:
            passes.observe(1, step.seconds, step.n_missing, self._is_doubtful)
            self._since_plain, self._is_confirmed = 0, True

    def _learn(self, step: Step, drafter: Known) -> None:
        """Learn from a step with a draft; its time counts if it is usual, or plain ones are too."""
        passes, seconds = self.passes, step.seconds
        if seconds and passes.plain_s:
            usual_s = drafter.draft_s(step.n_draft, passes) + passes.at(step.n_rows)
            if 1.0 / _ODD < seconds / usual_s < _ODD:
                self._n_odd, self._is_confirmed = 0, False
            else:
                self._n_odd += 1
            counts = not self._n_odd or (self._n_odd >= _N_ODD and self._is_confirmed)
            self._gain(step, seconds if counts else usual_s)
            if counts:
                drafter.observe_draft(step.n_draft, step.drafter_s, passes.plain_s)
                pass_s = seconds - step.drafter_s
                if step.n_rows in passes.widths and pass_s > 0.0:  # else it says nothing
                    passes.observe(step.n_rows, pass_s, step.n_missing)
        self._since_plain += step.n_rows > 1
        if step.n_spine:
            drafter.acceptance.observe(step.ranks, step.log_p)

    def _gain(self, step: Step, seconds: float) -> None:
        """Charge the accounts for what a step with a draft lost, credit what it gained."""
        plain_s = self.passes.plain_s
        gained_s = step.n_tokens * plain_s - seconds
        if step.is_trial:
            self._trials_s -= self._risk_s
            if self._pays:  # the account of trials pays for most of it
                gained_s = min(gained_s + 3.0 * plain_s, 0.0)
        self._book(seconds, gained_s)

    def _book(self, seconds: float, gained_s: float) -> None:
        """Note a step in the accounts, which never get far from nothing."""
        most_s = 4.0 * _CREDIT * self.passes.plain_s
        if not most_s:
            self._credit_s = self._trials_s = _CREDIT * seconds
            return
        share = _PAYING_SHARE if self._pays else SHARE
        self._trials_s = min(self._trials_s + SHARE * seconds, most_s)
        self._credit_s = max(min(self._credit_s + share * seconds + gained_s, most_s), -most_s)

    @property
    def stats(self) -> SpecStats:
        """What was drafted so far."""
        return self._recorder.stats

    def _plan(self) -> None:
        """Work out the best plan of each drafter."""
        passes, most = self.passes, self.passes.widths[-1] - 1
        passes.update()
        self._shared.forget_plans()
        if not passes.plain_s:
            return
        best = self._best
        for drafter in self._ranked:
            known, source = drafter.acceptance, drafter.source
            if drafter is not best:
                known.forget(_KEPT_IDLE**self._since_plan)
            leaf = known.leaf if source.n_top > 1 else ()
            growth = grow(known.rates, leaf, most)
            drafter.value, drafter.plan, _ = drafter.best_of(growth, passes, self._near(self.open))
            value, _, width = drafter.best_of(growth, passes, self._near(passes.widths))
            rate = _MARGIN * max(drafter.value, 1.0 / passes.plain_s)
            if drafter.was_seen and not source.is_free:
                self._miss(width, (value - rate) * self._since_plan_s)
            hopes = grow(known.hopes(HOPE), leaf, most)
            drafter.hope, hoped, _ = drafter.best_of(hopes, passes, self._near(self.open))
            drafter.hoped = hoped.n_draft
        self._since_plan, self._since_plan_s = 0, 0.0
        self._ranked.sort(key=lambda drafter: -drafter.value)
