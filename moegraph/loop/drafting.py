"""Drafts of a service: which requests draft in the next pass, and what the drafters are told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ..draft.drafter import DraftTree
from ..draft.race import Odds
from ..passes.speculation import Ask, Proposal, Speculation, StepSeconds, step_of
from ..runner.sweep_batch import SweepBatch
from .answer import Answer

# Seconds: the device was still computing if the engine waited longer; so short a call of the
# caller counts as the engine's time.
_WAITED, _SHORT = 20e-6, 100e-6


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


class Drafting:
    """The drafters: which requests draft in the next pass, and what is learned from it.

    A request that is alone in its passes drafts as in a generation. Several draft if that pays for
    so many; then only how much was accepted is learned, not what it cost.

    clock: measures the steps of a lone request. taken: tokens that sequences took and of which the
    drafters were not told, each with its slot.
    """

    def __init__(self, speculation: Speculation, has_streams: bool) -> None:
        """has_streams: see `StepClock`."""
        self._speculation = speculation
        self.clock = StepClock(has_streams)
        self._lone: Answer | None = None  # whose steps the clock measures
        self._proposals: dict[int, Proposal] = {}  # by slot, before the pass in flight
        self._n_missing = 0  # until that pass
        self._rests = False  # the lone request drafts nothing next
        self.taken: list[tuple[int, int]] = []
        # what there is to learn from the last pass, while the device computes
        self._done: list[tuple[Proposal | None, list[int], StepSeconds, int]] = []

    def begin(self, slot: int, held: Sequence[int]) -> None:
        """Have the drafters know what a sequence holds whose prompt begins."""
        self._lone = None  # perhaps it is this one, which goes on after a context shift
        self._speculation.begin(slot, held)

    def with_readers(self, batch: SweepBatch) -> SweepBatch:
        """Return a prompt with what the drafters want of its sweep."""
        return replace(batch, readers=self._speculation.prompt_readers(batch.slot, batch.tokens))

    def took(self, slot: int, tokens: Sequence[int]) -> None:
        """Tell the drafters that a sequence took tokens, whose rows the last pass computed."""
        self._note_taken()
        self._speculation.committed(slot, tokens)

    def _note_taken(self) -> None:
        taken, self.taken = self.taken, []
        for slot, token in taken:
            self._speculation.committed(slot, [token])

    def propose(self, batch: Sequence[Answer]) -> list[DraftTree] | None:
        """Return the rows of each request in the next pass; None if none of them drafts.

        Whether a lone request drafts was found out while the last pass ran, if it could be.
        """
        speculation, self._proposals = self._speculation, {}
        found, n, rests = list[DraftTree](), len(batch), False
        if n > 1:
            # asked once for all: while drafts rest, a pass must not cost more than without drafters
            self._lone = None
            rests = speculation.rests(max(a.generated.n_left for a in batch), n)
        elif self._lone is not batch[0]:
            self._lone = batch[0]
            self.clock.begin()
        else:
            lone = batch[0].generated
            rests = self._rests or speculation.finds_nothing(
                batch[0].slot, lone.anchor, lone.n_left
            )
        if not rests:
            self._note_taken()
            found = self._trees(speculation, batch)
        if n == 1:  # otherwise no step is measured
            self._n_missing = speculation.n_missing()
        self.clock.launch()
        for tree in found:
            if tree.n_rows > 1:
                return found
        return None

    def _trees(self, speculation: Speculation, batch: Sequence[Answer]) -> list[DraftTree]:
        """Return the rows of each request; several requests draft at once where a drafter can."""
        if len(batch) == 1:  # the device waits: nothing is done for the sake of others
            answer = batch[0]
            proposal = speculation.propose(_ask(answer)) if answer.may_draft else None
            return [self._tree(answer, proposal)]
        asks = [_ask(answer) for answer in batch if answer.may_draft]
        proposals = speculation.propose_all(asks, len(batch))
        by_slot = {ask.slot: proposal for ask, proposal in zip(asks, proposals)}
        return [self._tree(answer, by_slot.get(answer.slot)) for answer in batch]

    def _tree(self, answer: Answer, proposal: Proposal | None) -> DraftTree:
        answer.may_draft = True
        if proposal is None:
            return DraftTree((answer.generated.anchor,), (-1,))
        tree, ends = proposal.tree, answer.request.keep_after
        if answer.choice.constraint:
            tree = answer.choice.cut(tree)
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

    def forced(self, answer: Answer) -> list[int] | None:
        """Return the drafted tokens that a request takes whatever is drawn; see `Speculation`."""
        proposal = self._proposals.get(answer.slot)
        accept = self._speculation.accept
        if accept is None:
            return None
        spine = proposal.spine if proposal else []
        return spine[: accept(len(spine))]

    def give_up(self) -> None:
        """Note that the pass has no drafted rows after all."""
        self._proposals = {}

    def launched(self) -> None:
        """Note that the pass runs: there is time to learn from the last one, and to look ahead."""
        self.settle()
        self._rests = False
        if self._lone and not self._proposals:
            lone, generated = self._lone, self._lone.generated
            n_left = generated.n_left - 1
            self._rests = self._speculation.foresee(lone.slot, n_left, generated.anchor)
        self.clock.leave()

    def settle(self) -> None:
        """Tell the drafters and the controller what they were not told yet."""
        self._note_taken()
        done, self._done = self._done, []
        for proposal, drawn, seconds, n_missing in done:
            step = step_of(proposal, drawn, seconds, n_missing)
            self._speculation.controller.observe(step)

    def drew(self, answer: Answer, drawn: list[int]) -> None:
        """Note what a request drew after the pass, once its sequence has taken its rows."""
        if not drawn:  # it waits for its grammar, so the step has no time
            self._lone = None
            return
        proposal = self._proposals.get(answer.slot)
        if self._lone is answer:
            n_missing = self._speculation.n_missing() - self._n_missing
            self._done.append((proposal, drawn, self.clock.end(), n_missing))
        elif proposal:
            self._done.append((proposal, drawn, StepSeconds(), 0))

    def shared(self, n_seqs: int, n_tokens: int, seconds: float | None, n_rows: int) -> None:
        """Note what a pass of several requests gave, and how long it took with its drafts.

        seconds: None if not known. n_rows: of the pass.
        """
        self._speculation.controller.observe_shared(n_seqs, n_tokens, seconds or 0.0, n_rows)


def _ask(answer: Answer) -> Ask:
    """Return what a request may draft."""
    generated, choice = answer.generated, answer.choice
    race = None if choice.greedy else choice.sampler.race
    return Ask(answer.slot, generated.anchor, generated.n_left, generated.n_room, race)
