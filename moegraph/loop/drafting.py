"""Drafts of a service: which requests draft in the next pass, and what the drafters are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..draft.rejection import Odds
from ..draft.tree import DraftTree
from ..passes.proposal import Ask, Proposal, step_of
from ..passes.speculation import Speculation
from ..passes.stepclock import StepClock, StepSeconds
from ..runner.sweep_batch import SweepBatch
from .answer import Answer

_UNKNOWN = StepSeconds(0.0, 0.0, 0.0)


class Drafting:
    """The drafters of a service; without any, every method does nothing.

    A request that is alone in its passes drafts as in a generation. Several draft if that pays for
    so many; then only how much was accepted is learned, not what it cost.
    """

    def __init__(self, speculation: Speculation | None, has_streams: bool) -> None:
        """has_streams: see `StepClock`."""
        self._speculation = speculation
        self._clock = StepClock(has_streams)
        self._lone: Answer | None = None  # whose steps the clock measures
        self._proposals: dict[int, Proposal] = {}  # by slot, before the pass in flight
        self._n_missing = 0  # until that pass
        # what there is to learn from the last pass, while the device computes
        self._done: list[tuple[Proposal | None, list[int], StepSeconds, int]] = []

    @property
    def is_on(self) -> bool:
        """Whether there are drafters."""
        return self._speculation is not None

    def begin(self, slot: int, held: Sequence[int]) -> None:
        """Have the drafters know what a sequence holds whose prompt begins."""
        if self._speculation:
            self._speculation.begin(slot, held)

    def tapped(self, batch: SweepBatch) -> SweepBatch:
        """Return a prompt with what the drafters want of its sweep."""
        if not self._speculation:
            return batch
        return replace(batch, taps=self._speculation.prompt_taps(batch.slot, batch.tokens))

    def took(self, slot: int, tokens: Sequence[int]) -> None:
        """Note that a sequence took tokens, whose rows the last pass computed."""
        if self._speculation:
            self._speculation.committed(slot, tokens)

    def propose(self, batch: Sequence[Answer]) -> list[DraftTree] | None:
        """Return the rows of each request in the next pass; None if none of them drafts.

        Raises:
            NativeError: the device failed.
        """
        self._proposals = {}
        if not self._speculation:
            return None
        if len(batch) > 1:
            self._lone = None
        elif self._lone is not batch[0]:
            self._lone = batch[0]
            self._clock.begin()
        found, n = list[DraftTree](), len(batch)
        # asked once for all: while drafts rest, a pass must not cost more than without drafters
        if n == 1 or not self._speculation.rests(max(a.sequence.n_left for a in batch), n):
            found = self._trees(self._speculation, batch)
        if n == 1:  # otherwise no step is measured
            self._n_missing = self._speculation.n_missing()
        self._clock.launch()
        return found if any(tree.n_rows > 1 for tree in found) else None

    def _trees(self, speculation: Speculation, batch: Sequence[Answer]) -> list[DraftTree]:
        """Return the rows of each request; several requests draft at once where a drafter can."""
        asks = [_ask(answer) for answer in batch if answer.may_draft]
        if len(batch) == 1:
            proposals = [speculation.propose(ask) for ask in asks]
        else:
            proposals = speculation.propose_all(asks, len(batch))
        by_slot = {ask.slot: proposal for ask, proposal in zip(asks, proposals)}
        return [self._tree(answer, by_slot.get(answer.slot)) for answer in batch]

    def _tree(self, answer: Answer, proposal: Proposal | None) -> DraftTree:
        answer.may_draft = True
        if proposal is None:
            return DraftTree((answer.sequence.tokens[-1],), (-1,))
        tree, ends = answer.drawing.cut(proposal.tree), answer.request.keep_after
        if ends:  # the state there is kept, so nothing may come after it
            tokens, parents = tree.tokens, tree.parents
            tree = tree.only(lambda row: tokens[parents[row]] not in ends)
        if tree is not proposal.tree:
            proposal = replace(proposal, tree=tree)
        self._proposals[answer.slot] = proposal
        return tree

    def odds(self, answer: Answer) -> tuple[Odds, ...]:
        """Return what is known of a request's drafted tokens if these were drawn at random."""
        proposal = self._proposals.get(answer.slot)
        return proposal.odds if proposal else ()

    def give_up(self) -> None:
        """Note that the pass has no drafted rows after all."""
        self._proposals = {}

    def launched(self) -> None:
        """Note that the pass runs: there is time to learn from the last one, and to look ahead.

        Raises:
            NativeError: the device failed.
        """
        if self._speculation:
            done, self._done = self._done, []
            for proposal, drawn, seconds, n_missing in done:
                step = step_of(proposal, drawn, seconds, n_missing)
                self._speculation.controller.observe(step)
            if self._lone and not self._proposals:
                self._speculation.foresee(self._lone.slot, self._lone.sequence.n_left - 1)
            self._clock.leave()

    def waits(self) -> None:
        """Note that all else is done, and the service waits for the pass."""
        self._clock.back()

    def arrived(self) -> None:
        """Note that the results are there."""
        self._clock.arrive()

    def drew(self, answer: Answer, drawn: list[int]) -> None:
        """Note what a request drew after the pass, once its sequence has taken its rows."""
        if not self._speculation:
            return
        if not drawn:  # it waits for its grammar, so the step has no time
            self._lone = None
            return
        proposal = self._proposals.get(answer.slot)
        if self._lone is answer:
            n_missing = self._speculation.n_missing() - self._n_missing
            self._done.append((proposal, drawn, self._clock.end(), n_missing))
        elif proposal:
            self._done.append((proposal, drawn, _UNKNOWN, 0))

    def shared(self, n_seqs: int, n_tokens: int, seconds: float | None, n_rows: int) -> None:
        """Note what a pass of several requests gave, and how long it took with its drafts.

        seconds: None if not known. n_rows: of the pass.
        """
        if self._speculation and n_seqs > 1:
            self._speculation.controller.observe_shared(n_seqs, n_tokens, seconds or 0.0, n_rows)


def _ask(answer: Answer) -> Ask:
    """Return what a request may draft."""
    sequence, race = answer.sequence, answer.drawing.sampler.race
    return Ask(answer.slot, sequence.tokens[-1], sequence.n_left, sequence.n_room, race)
