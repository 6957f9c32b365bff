"""What a step proposes to the target, and the account of what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..draft.drafter import Draft, Race, confidence
from ..draft.plan import PLAIN, Plan, Step
from ..draft.rejection import Odds
from ..draft.tree import DraftTree
from .stepclock import StepSeconds


@dataclass(frozen=True)
class Ask:
    """What a sequence may draft after its last token, the anchor.

    n_left: tokens until the text must end. n_room: positions that the context still has. race: of
    the sampler that will draw; None if it is greedy.
    """

    slot: int
    anchor: int
    n_left: int
    n_room: int
    race: Race | None = None


@dataclass(frozen=True)
class Proposal:
    """Rows for the next pass, the draft and the plan that they come from, and how long it took.

    tree: the anchor alone if nothing of the draft is worth a row. odds: of a draft at random, what
    the token of each depth was drawn from.
    """

    plan: Plan
    draft: Draft
    tree: DraftTree
    drafter_s: float
    odds: tuple[Odds, ...] = ()

    @cached_property
    def spine(self) -> list[int]:
        """The draft's likeliest tokens, as far as they follow one another in the tree."""
        row, tokens = 0, list[int]()
        for token in self.draft.tokens[:, 0].tolist():
            child = self.tree.child(row, token)
            if child is None:
                break
            row = child
            tokens.append(token)
        return tokens

    @property
    def n_spine(self) -> int:
        """Return the length of the spine."""
        return len(self.spine)


def step_of(
    proposal: Proposal | None, drawn: Sequence[int], seconds: StepSeconds, n_missing: int
) -> Step:
    """Return what a step did.

    drawn: the tokens that the text took; the last one was drawn, but not drafted. n_missing: the
    distinct experts that the pass missed.
    """
    if proposal is None:
        return Step(
            PLAIN.source, seconds.total, len(drawn), verify_s=seconds.verify, n_missing=n_missing
        )
    spine = proposal.draft.cut(proposal.n_spine)
    return Step(
        proposal.plan.source,
        seconds.total,
        n_tokens=len(drawn),
        n_rows=proposal.tree.n_rows,
        n_draft=proposal.plan.n_draft,
        n_spine=proposal.n_spine,
        n_accepted=len(drawn) - 1,
        ranks=spine.ranks(drawn),
        log_p=confidence(spine),
        drafter_s=proposal.drafter_s,
        verify_s=seconds.verify,
        commit_s=seconds.commit,
        n_missing=n_missing,
        is_trial=proposal.plan.is_trial,
    )
