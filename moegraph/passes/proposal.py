"""What a step proposes to the target, and the account of what became of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..draft.drafter import Draft, Race, confidence
from ..draft.plan import PLAIN, Plan, Step
from ..draft.rejection import Odds
from ..draft.tree import DraftTree

# Seconds: the device was still computing if the engine waited longer; so short a call of the
# caller counts as the engine's time.
_WAITED, _SHORT = 20e-6, 100e-6


@dataclass(frozen=True)
class StepSeconds:
    """How long a step took.

    total: since the end of the step before it. verify: from the launch of its pass to the results.
    Both are 0.0 if they are not known, because the caller did other things for longer than the
    device computed. commit: from the results to the end.
    """

    total: float
    verify: float
    commit: float


class StepClock:
    """Measures steps: `launch`, `leave`, `back`, `arrive` and `end`, in this order.

    has_streams: the device computes while the caller runs, between `leave` and `back`.
    """

    def __init__(self, has_streams: bool) -> None:
        self._has_streams = has_streams
        self._began = self._launched = self._left = self._back = self._arrived = 0.0
        self._apart: float | None = 0.0  # time of the caller that does not count; None: not known

    def begin(self) -> None:
        """Begin the first step."""
        self._began = time.perf_counter()

    def launch(self) -> None:
        """Note that the draft is done."""
        self._launched = time.perf_counter()

    def leave(self) -> None:
        """Note that the pass is launched."""
        self._left = time.perf_counter()

    def back(self) -> None:
        """Note that the caller asks for the next token."""
        self._back = time.perf_counter()

    def arrive(self) -> None:
        """Note that the results are there."""
        self._arrived = now = time.perf_counter()
        self._apart = self._back - self._left
        if self._has_streams:
            was_busy = now - self._back > _WAITED or self._apart < _SHORT
            self._apart = 0.0 if was_busy else None

    def end(self) -> StepSeconds:
        """End a step and begin the next one."""
        now = time.perf_counter()
        total = verify = 0.0
        if self._apart is not None:
            total = now - self._began - self._apart
            verify = self._arrived - self._launched - self._apart
        self._began = now
        return StepSeconds(total, verify, now - self._arrived)


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
