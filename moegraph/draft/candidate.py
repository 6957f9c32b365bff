"""What a controller knows of one drafter: how often it is right, what it costs, its best plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .plan import PLAIN, Plan, Source
from .rates import Acceptance
from .shapes import Growth
from .stepcost import DraftCost, PassCost

# A drafter is new until so many of its drafts were verified.
KNOWN = 10
# What each further sequence adds to a draft for several at once, as a share of one for a sequence.
_FURTHER = 0.2


@dataclass
class Candidate:
    """What is known of one source, and its best plan; value: its tokens a second.

    hope, hoped: value and depth of its best plan if it is as good as it may well be.
    """

    source: Source
    acceptance: Acceptance
    cost: DraftCost
    most: int  # depths
    value: float = 0.0
    plan: Plan = PLAIN
    hope: float = 0.0
    hoped: int = 0
    n_steps: int = 0
    n_known: int = 0
    tried_at: int = 0  # the step of the last trial
    counted_at: int = 0  # the step at which a draft was last found right or wrong

    @property
    def is_new(self) -> bool:
        """Whether too little of it is known to judge single drafts."""
        return self.n_known < KNOWN

    def draft_s(self, n_draft: int, passes: PassCost) -> float:
        """Return the seconds of a draft of so many tokens."""
        return self.cost(n_draft, passes.base_s)

    def drafts_s(self, n_draft: int, n_seqs: int, passes: PassCost) -> float:
        """Return the seconds of drafts of so many tokens for each of n_seqs sequences."""
        n = 1.0 + _FURTHER * (n_seqs - 1) if self.source.joins else n_seqs
        return n * self.draft_s(n_draft, passes)

    def best(
        self, growth: Growth, passes: PassCost, widths: Sequence[int]
    ) -> tuple[float, Plan, int]:
        """Return the best value of rows added in this order, the plan that drafts them, its rows.

        widths: of which it takes one, in order.
        """
        source, fixed_s = self.source, self.draft_s(1, passes)
        token_s = self.draft_s(2, passes) - fixed_s
        value, plan_depth, best_width, depth, done = 0.0, 0, 1, 0, 0
        for width in widths:
            if width > len(growth.tokens):
                break
            for at in growth.depths[done : width - 1]:
                depth = max(depth, at)
            done = width - 1
            seconds = fixed_s + (depth - 1) * token_s + passes.seconds[width]
            if growth.tokens[width - 1] > value * seconds:
                value = growth.tokens[width - 1] / seconds
                plan_depth, best_width = depth, width
        # where leaves are worth their rows, a drafter that knows what follows them does better
        has_leaves = best_width > plan_depth + 1
        n_nodes = best_width - 1 if has_leaves and source.has_tree else 0
        return value, Plan(source.name, plan_depth, source.n_top, n_nodes=n_nodes), best_width
