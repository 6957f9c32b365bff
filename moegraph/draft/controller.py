"""Chooses what each step drafts: the source, and how much; nothing if none pays.

A choice is worth the tokens it is expected to give in the seconds it is expected to take
(estimates.py). What is not tried is not known, so some steps try other ways (`Accounts`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..config import EngineConfig
from ..experts.cost import Experts
from ..placement.draftcounts import DraftCounts
from ..placement.drafters import PRIORS
from ..resident.layout import MAX_PAGED_ROWS, USUAL_MTP_DRAFT
from ..units import octave
from .drafter import Draft, Drafter, confidence
from .estimates import FEW, HOPE, MEMORY, OUTLIER, SHARE, Accounts, Known, PassTimes
from .plan import PLAIN, DraftSettings, Plan, Source, SpecStats, Step, expected_tokens
from .tree import DDTree

# What each further sequence adds to a draft for several at once, as a share of one for a sequence:
# the weights are read once.
_FURTHER = 0.2
# Most passes with drafts between those that measure what passes without take now.
_REFRESH = 128


@dataclass
class _Account:
    """What is known of passes of about as many sequences; seconds are as if of one row."""

    plain_s: float = 0.0
    n_plain: int = 0  # in a row, as far as they count
    n_drafted: int = 0  # since the last without
    refresh: float = 2.0 * FEW  # of these, until the next without
    credit: float = 2.0 * FEW
    # times over those expected, by powers of two of rows with drafts; 0: without
    ratios: dict[int, float] = field(default_factory=dict)

    def ratio(self, n_rows: int) -> float:
        """Return how many times as long as expected a pass of n_rows takes; 0 rows: no drafts.

        Passes with drafts that were not measured are taken to be like those without.
        """
        return self.ratios.get(octave(n_rows) if n_rows else 0, self.ratios.get(0, 1.0))


class SharedPasses:
    """Learns from passes of several sequences whether they draft, by what passes gave.

    An account, in passes without drafts, is charged what passes with drafts lose and credited what
    they gain, and earns a small share of all passes. Without credit drafts rest.

    Numbers of sequences within a factor of two count as one, so times are given as what a pass of
    one row would take by the law.
    """

    def __init__(self, is_timed: bool = True) -> None:
        """is_timed: what is drafted may follow from what passes took."""
        self._is_timed = is_timed
        self._known: dict[int, _Account] = defaultdict(_Account)
        self.plans: dict[tuple[str, int, int], Plan] = {}

    def may_draft(self, n_seqs: int) -> bool:
        """Return whether drafts are worth trying in the next pass of n_seqs sequences."""
        known = self._known[n_seqs.bit_length()]
        return known.credit > 0.0 and known.n_plain >= FEW

    def plan(
        self, drafter: Known, passes: PassTimes, n_seqs: int, n_left: int, least: float
    ) -> Plan:
        """Return what each of n_seqs sequences drafts, as `best_for`.

        Each of the sequences asks, while the device waits, so it is worked out once.
        """
        key = drafter.source.name, n_seqs, min(n_left, MAX_PAGED_ROWS)
        if key not in self.plans:
            ratio = self._known[n_seqs.bit_length()].ratio
            self.plans[key] = best_for(drafter, passes, n_seqs, n_left, least, ratio)
        return self.plans[key]

    def observe(
        self, n_seqs: int, n_tokens: int, seconds: float, n_rows: int, ratio: float = 1.0
    ) -> None:
        """Count a pass that gave n_tokens.

        seconds: as if of one row; 0 if not known. n_rows: of the pass; with drafts there are more
        than sequences. ratio: its time, that of the drafts included, over what was expected.
        """
        known, has_drafts = self._known[n_seqs.bit_length()], n_rows > n_seqs
        if seconds and self._is_timed:
            key = octave(n_rows) if has_drafts else 0
            known.ratios[key] = ratio + (known.ratios.get(key, ratio) - ratio) * (1 - 1 / FEW)
        if has_drafts:
            known.n_drafted += 1
            if seconds and known.plain_s:
                gained = n_tokens / n_seqs - min(seconds / known.plain_s, 3 * OUTLIER)
                known.credit = min(known.credit + gained + SHARE, 2.0 * FEW)
            if known.n_drafted >= known.refresh:
                known.n_plain, known.refresh = 0, min(2 * known.refresh, _REFRESH)
            return
        known.n_plain, known.n_drafted = known.n_plain + 1, 0
        known.credit = min(known.credit + SHARE, 2.0 * FEW)
        if seconds:
            seconds = min(seconds, OUTLIER * (known.plain_s or seconds))
            weight = min(known.n_plain, MEMORY)
            known.plain_s += (seconds - known.plain_s) / (weight if known.plain_s else 1)


def expected(drafters: Sequence[Known], passes: PassTimes, n_seqs: int, n_rows: int) -> float:
    """Return the seconds of a pass of n_seqs sequences, and of the drafts if it has more rows.

    drafters: the one that drafts; empty if there is none.
    """
    n_draft, total = n_rows // n_seqs - 1, passes.at(n_rows)
    for one in drafters if n_draft else ():
        n = 1.0 + _FURTHER * (n_seqs - 1) if one.source.joins else n_seqs
        total += n * one.draft_s(n_draft, passes)
    return total


def best_for(
    drafter: Known, passes: PassTimes, n_seqs: int, n_left: int, least: float,
    ratio: Callable[[int], float],
) -> Plan:  # fmt: skip
    """Return what each of n_seqs sequences drafts: what is best by what is known, if it may pay.

    n_left: tokens until a text must end. least: how many times as fast as without drafts it must
    be. ratio: how many times as long as expected a pass takes, by its rows; 0 rows: without drafts.
    """
    longest = min(drafter.most, n_left - 1, MAX_PAGED_ROWS // n_seqs - 1)

    def value(n: int, rates: Sequence[float]) -> float:
        tokens, n_rows = expected_tokens(rates, n)[-1], n_seqs * (n + 1)
        return n_seqs * tokens / expected([drafter], passes, n_seqs, n_rows) / ratio(n_rows)

    hopes = drafter.acceptance.hopes(HOPE)
    best = max(range(1, longest + 1), key=lambda n: value(n, hopes), default=0)
    if not best or value(best, hopes) <= least * n_seqs / passes.at(n_seqs) / ratio(0):
        return PLAIN
    return Plan(drafter.source.name, best, is_whole=True)


# Rows of verify passes; each width has graphs of its own, so there are not too many.
WIDTHS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
# The first width: a draft of three tokens tells most about a drafter.
FIRST_WIDTH = 4
# Something else must be this much faster to count: estimates vary.
_MARGIN = 1.02


class Controller:
    """Plans the steps of an engine; it lives over all its generations.

    A step calls `choose`, drafts, calls `n_spine`, verifies, and calls `observe`, which does the
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
        first = [w for w in widths if w <= max(FIRST_WIDTH, widths[0])][-1:]
        # widths that may be used
        self.open = tuple(first if settings.graph_price > FEW else widths)
        self._missed: dict[int, float] = {}  # tokens that other widths would have given
        wanted = [s for s in sources if settings.spec in ("auto", s.name)]
        known = [Known(source, settings.most_depths(source)) for source in wanted]
        self._drafters = {one.source.name: one for one in known if one.most > 0}
        self._ranked = list(self._drafters.values())  # the best first
        self._absent: Collection[str] = ()  # drafters without a draft in this step
        self._accounts = Accounts()
        self._n_steps = 0
        self._since_plan = 0  # steps
        self._was_trial = False  # the last step
        self._stats = SpecStats()
        self._shared = SharedPasses(settings.is_timed)

    def choose(self, n_left: int, without: Collection[str] = ()) -> Plan:
        """Return what the next step drafts.

        n_left: tokens until the text must end. without: sources that have nothing to draft now;
        call again with those whose draft was empty.
        """
        self._absent = without
        usable = _without(self._ranked, without)
        if not usable or n_left <= 1:
            return PLAIN
        best, is_known = usable[0], self.passes.is_known
        if self.settings.is_fixed and (is_known or self.settings.gives_length):
            plan = self._fixed_plan(best)
        elif not is_known or self._accounts.is_doubtful:
            return PLAIN
        elif free := [d for d in usable if d.source.is_free]:  # `n_spine` judges its draft
            plan = Plan(free[0].source.name, free[0].most)
        else:
            plan = self._trial(usable) or PLAIN
            if not plan.source and self._pays and self._accounts.credit_s > 0.0:
                plan = best.plan
        if plan.n_draft < n_left:
            return plan
        if self.settings.graph_price <= FEW:  # another width costs little
            return replace(plan, n_draft=n_left - 1)
        # near the end of a text: of the widths that have graphs
        lengths = [w - 1 for w in self.open if n_left <= w <= plan.n_draft]
        is_given = self.settings.gives_length
        return plan if is_given else replace(plan, n_draft=min(lengths, default=plan.n_draft))

    def _near(self, widths: Sequence[int]) -> list[int]:
        """Return widths that are not far wider than any measured one: the law may be wrong."""
        most = max(2 * self.passes.widest, FIRST_WIDTH)
        return [w for w in widths if w <= most] or list(widths[:1])

    @property
    def _best(self) -> Known | None:
        """The best drafter that has something to draft in this step, of those that are not free."""
        usable = _without(self._ranked, self._absent)
        return next((drafter for drafter in usable if not drafter.source.is_free), None)

    @property
    def _pays(self) -> bool:
        """Whether drafting is faster than plain decoding."""
        best = self._best
        return best is not None and best.value * self.passes.plain_s > 1.0

    def _trial(self, usable: Sequence[Known]) -> Plan | None:
        """Return a trial of another drafter, or of longer drafts, if that may be better."""
        if self._was_trial or self._accounts.credit_s <= 0.0:
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
                tokens = expected_tokens(drafter.acceptance.rates, n_draft)[-1]
                step_s = drafter.draft_s(n_draft, self.passes) + self.passes.seconds[width]
                if self._accounts.allows(step_s - tokens / value):
                    return Plan(drafter.source.name, n_draft, is_trial=True)
        return None

    def _fixed_plan(self, drafter: Known) -> Plan:
        """Return the plan of a source that must draft."""
        settings, source = self.settings, drafter.source
        if settings.ddtree:
            n_top = settings.ddtree.n_top(drafter.most)
            return Plan(source.name, drafter.most, n_top, settings.ddtree)
        if settings.gives_length:
            n_nodes = settings.budget - 1 if settings.budget and source.has_tree else 0
            return Plan(source.name, drafter.most, 1, n_nodes=n_nodes)
        n_draft = drafter.most if source.is_free else max(drafter.plan.n_draft, 1)
        return replace(drafter.plan, source=source.name, n_draft=n_draft)

    def choose_for(self, n_seqs: int, n_left: int, without: Collection[str] = ()) -> Plan:
        """Return what one of n_seqs sequences drafts that share a pass, as long as all draft so.

        The rows of a pass cost less, the more there are; but a draft costs as much for each.
        """
        usable = _without(self._ranked, without)
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
        for _ in range(2):
            self.passes.observe(1, plain_s, 0)
        for n_rows, seconds in verify_s.items():
            for _ in range(3):
                self.passes.observe(n_rows, seconds, 0)
        self.have(verify_s)
        self._accounts.open(plain_s)
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

    def n_spine(self, plan: Plan, draft: Draft) -> int:
        """Return how many tokens of a draft to verify, of a plan without a DDTree."""
        n_depth, log_p = min(draft.n_depth, plan.n_draft), confidence(draft)
        if log_p and self.settings.p_min > 0.0:
            limit = math.log(self.settings.p_min)
            n_depth = next((at for at, p in enumerate(log_p[:n_depth]) if p < limit), n_depth)
        if n_depth == 0:
            return 0
        settings, drafter = self.settings, self._drafters[plan.source]
        if plan.is_whole or plan.is_trial or (settings.is_fixed and settings.gives_length):
            return n_depth
        known, plain_s = drafter.acceptance, self.passes.plain_s
        if drafter.source.is_free:
            sure = [math.exp(p) for p in log_p[:n_depth]]
            return self._worthwhile(sure, self.least_tokens(plan.source), 0.0)
        accept = known.rates_of(log_p[:n_depth]) if log_p else known.rates[:n_depth]
        rate = max(1.0 / plain_s, drafter.value)
        plain = -math.inf if settings.is_fixed else 1.0 - rate * plain_s
        least = {width: rate * seconds for width, seconds in self.passes.seconds.items()}
        n_spine = self._worthwhile(accept, least, plain)
        if log_p:
            known.expect(accept, n_spine)
        return n_spine

    def least_tokens(self, source: str) -> dict[int, float]:
        """Return how many tokens a pass with a free draft must give to be worth it, by its rows."""
        settings, passes, drafter = self.settings, self.passes, self._drafters[source]
        if settings.is_fixed and settings.gives_length:
            return {2: 0.0}  # any draft is verified
        # what other steps would give in that time
        rate = _MARGIN * max(1.0 / passes.plain_s, self._best.value if self._best else 0.0)
        most_s = math.inf if settings.is_fixed else passes.plain_s + self._accounts.credit_s
        return {
            width: rate * seconds for width, seconds in passes.seconds.items()
            if width <= drafter.most + 1 and seconds <= most_s
        }  # fmt: skip

    def _worthwhile(self, accept: Sequence[float], least: Mapping[int, float], plain: float) -> int:
        """Return the length that gains most, now that the draft is there and paid for.

        accept: how likely each token is right if those before it are. least: tokens that other
        steps would give in the time of a pass, by its rows. plain: gain of a step without the
        draft; -inf if there must be one.
        """
        tokens = expected_tokens(accept, self.passes.widths[-1] - 1)
        widths = [w for w in self._near(self.passes.widths) if w <= len(tokens) and w in least]
        gains = {w: tokens[w - 1] - least[w] for w in widths}
        found = {1 if math.isfinite(plain) else 2: plain}
        found |= {w: gain for w, gain in gains.items() if w in self.open}
        best = max(found, key=found.__getitem__)
        other = max(gains, key=gains.__getitem__, default=1)
        if gains and math.isfinite(found[best]):
            self._miss(other, gains[other] - found[best])
        return best - 1

    def _miss(self, width: int, tokens: float) -> None:
        """Note that a width would have given more tokens than those that are used.

        It is used once it would have given half as many again as its first passes cost: a text may
        end before they are paid for.
        """
        if width not in self.open and tokens > 0.0:
            self._missed[width] = self._missed.get(width, 0.0) + tokens
            if self._missed[width] >= 1.5 * self.settings.graph_price:
                self.open = tuple(sorted((*self.open, width)))
                self._missed.clear()

    def observe(self, step: Step) -> None:
        """Learn from a step, and plan the next ones."""
        drafter, passes = self._drafters.get(step.source), self.passes
        self._stats.add(step, passes.plain_s if self.settings.is_timed else 0.0)
        if not self.settings.is_timed:  # times are those of the laws
            draft_s = drafter.law(step.n_draft) if drafter else 0.0
            seconds = draft_s + passes.by_law(step.n_rows, step.n_missing)
            step = replace(step, seconds=seconds, drafter_s=draft_s)
        if drafter:
            if step.seconds and passes.plain_s:
                self._learn_times(step, drafter)
            if step.n_spine:
                drafter.acceptance.observe(step.ranks, step.log_p)
        elif step.seconds:
            self._accounts.book(passes.plain_s, step.seconds, 0.0, self._pays)
            passes.observe(1, step.seconds, step.n_missing, self._accounts.is_doubtful)
            self._accounts.is_confirmed = True
        self._was_trial = step.is_trial
        self._n_steps += 1
        self._since_plan += 1
        # a plan takes as long as a few kernels, but the first steps tell most
        if self._since_plan >= FEW or self._n_steps < 4 * FEW:
            self._plan()

    def _learn_times(self, step: Step, drafter: Known) -> None:
        """Learn from the time of a step with a draft, if it is usual, or plain ones are too."""
        passes, seconds = self.passes, step.seconds
        usual_s = drafter.draft_s(step.n_draft, passes) + passes.at(step.n_rows)
        counts = self._accounts.trusts(seconds / usual_s)
        self._accounts.gain(step, seconds if counts else usual_s, passes.plain_s, self._pays)
        if counts:
            drafter.observe_draft(step.n_draft, step.drafter_s, passes.plain_s)
            pass_s = seconds - step.drafter_s
            if step.n_rows in passes.widths and pass_s > 0.0:  # else it says nothing
                passes.observe(step.n_rows, pass_s, step.n_missing)

    @property
    def stats(self) -> SpecStats:
        """What was drafted so far."""
        return self._stats.copy()

    def _plan(self) -> None:
        """Work out the best plan of each drafter."""
        passes, most = self.passes, self.passes.widths[-1] - 1
        passes.update()
        self._shared.plans.clear()
        if not passes.plain_s:
            return
        widths = self._near(self.open)
        for drafter in self._ranked:
            known = drafter.acceptance
            tokens = expected_tokens(known.rates, most)
            drafter.value, drafter.plan = drafter.best_of(tokens, passes, widths)
            hopes = expected_tokens(known.hopes(HOPE), most)
            drafter.hope, hoped = drafter.best_of(hopes, passes, widths)
            drafter.hoped = hoped.n_draft
        self._since_plan = 0
        self._ranked.sort(key=lambda drafter: -drafter.value)


def _without(drafters: Sequence[Known], names: Collection[str]) -> list[Known]:
    return [drafter for drafter in drafters if drafter.source.name not in names]


def open_controller(
    drafters: Sequence[Drafter], config: EngineConfig, max_rows: int,
    experts: Experts | None = None, captures: bool = True,
) -> Controller:  # fmt: skip
    """Return the controller of an engine with these drafters.

    max_rows: rows of a verify pass that there is memory for. experts: None if none can be missing.
    captures: the device captures graphs. Settings that name dflash mean a DSpark drafter too.
    """
    spec, names = config.spec, {drafter.name for drafter in drafters}
    if config.budget == 1:
        spec = "off"
    elif spec == "dflash" and "dspark" in names:
        spec = "dspark"
    sources = []
    for drafter in drafters:
        prior, most = PRIORS[drafter.name], drafter.max_draft
        if spec == "auto" and drafter.name == "mtp":  # longer ones hardly pay, and have no graphs
            most = min(most, config.draft_max or USUAL_MTP_DRAFT)
        sources.append(Source(
            drafter.name, most, prior.fixed, prior.per_token, prior.accept,
            drafter.has_tree, drafter.joins, drafter.is_free,
        ))  # fmt: skip
    tree = DDTree(config.ddtree_budget, config.ddtree_temp, not config.ddtree_no_chain_seed)
    settings = DraftSettings(
        spec, config.draft_max, config.draft_p_min, config.budget,
        ddtree=tree if config.ddtree else None, max_rows=max_rows,
        is_timed=not config.deterministic, captures=captures,
    )  # fmt: skip
    return Controller(sources, settings, experts)
