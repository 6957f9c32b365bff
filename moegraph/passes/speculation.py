"""What drafts for the sequences of an engine: the drafters, and who decides about them.

Drafters follow what each sequence holds. A generation says what its prompt is, and which tokens its
sequence takes. A drafter is told of these tokens before it drafts, or when there are many, because
it computes many at once nearly as fast as one. If that fails, it does not know what the sequence
holds: nothing drafts for it until `begin` has the drafters start anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from ..draft.drafter import Draft, Drafter, JointDrafter, Parts, Race, RowKeeper, Taken, as_joint
from ..draft.lookup import LookUp
from ..draft.plan import Plan, Shape, Step
from ..draft.race import N_RUNNERS, raced
from ..draft.rejection import Odds, offer, offered_race
from ..draft.stats import SpecStats
from ..draft.tree import DraftTree, TreeDrafter, spine_tree
from ..errors import InternalError
from ..kinds import MOST_BEHIND
from .prefixtree import n_common
from .proposal import Ask, Proposal

if TYPE_CHECKING:  # these need the native libraries, decisions about drafts do not
    from ..ggml.ops import Tensor
    from ..resident.hostcopies import RowsCopy
    from ..runner.sweep_batch import Tap

Ids = npt.NDArray[np.int32]
_Drafted = tuple[Draft, DraftTree, tuple[Odds, ...]]


class Controller(Protocol):
    """Decides what each step drafts, and learns from what became of it."""

    @property
    def stats(self) -> SpecStats:
        """What was drafted so far."""

    def begin(self) -> None:
        """Begin another text."""

    def choose(self, n_left: int, without: Collection[str] = ()) -> Plan:
        """Return what the next step drafts.

        n_left: tokens until the text must end. without: drafters that have nothing to draft now.
        """

    def choose_for(self, n_seqs: int, n_left: int, without: Collection[str] = ()) -> Plan:
        """Return what one of several sequences drafts, all of which share the next pass."""

    def shape(self, plan: Plan, draft: Draft) -> Shape:
        """Return which tokens of a draft are worth a row."""

    def observe(self, step: Step) -> None:
        """Learn from a step; the device computes meanwhile."""

    def observe_shared(self, n_seqs: int, n_tokens: int, seconds: float, n_rows: int) -> None:
        """Learn from a pass of several sequences. seconds: with its drafts; 0 if not known."""


@dataclass
class _Followed:
    """What a sequence holds, as far as drafters may know, and how much of it each was told.

    A look-up may have been told of one more token, which the pass in flight reads.
    """

    ids: list[int]
    known: dict[str, int]

    @property
    def least(self) -> int:
        """Return how much every drafter was told."""
        return min(self.known.values(), default=len(self.ids))


class Speculation:
    """The drafters of an engine.

    max_rows: most rows of a verify pass that there is memory for. accept: for measuring; if set, a
    step accepts as many tokens of the spine as this returns for a spine's length, whatever the
    target draws. messages: why drafters are not used any more, one line each. n_missing: returns
    the distinct experts that passes missed so far. rejects: sampled text is drafted at random and
    accepted by rejection (draft/rejection.py); p_min: as of `offer`.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        controller: Controller,
        n_vocab: int,
        max_rows: int,
        n_missing: Callable[[], int] = int,
    ) -> None:
        self.drafters = {drafter.name: drafter for drafter in drafters}
        self.controller = controller
        self.max_rows = max_rows
        self.accept: Callable[[int], int] | None = None
        self.rejects, self.p_min = False, 0.0
        self.messages: list[str] = []
        self.n_missing = n_missing
        self._n_vocab = n_vocab
        self._failed: set[str] = set()
        self._said: set[str] = set()
        self._followed: dict[int, _Followed] = {}
        self._lookups = {d.name: d for d in drafters if isinstance(d, LookUp)}
        # of `foresee`: slot, n_left, and without a draft of which of the look-ups nothing drafts
        self._foreseen: tuple[int, int, Sequence[str]] | None = None

    def begin(self, slot: int, held: Sequence[int]) -> None:
        """Begin another text: have the drafters know what a sequence holds."""
        self.controller.begin()
        self._foreseen = None
        before, n = self._followed.pop(slot, None), len(held)
        ids, known = np.asarray(held, dtype=np.int32), dict.fromkeys(self.drafters, n)
        if before and n_common(np.asarray(before.ids, dtype=np.int32), ids) == n:
            for name, drafter in self.drafters.items():
                known[name] = min(before.known[name], n)
                drafter.truncate(slot, known[name])
        else:
            for drafter in self.drafters.values():
                drafter.restart(slot, ids)
        self._followed[slot] = _Followed(list(held), known)

    def prompt_taps(self, slot: int, ids: Ids) -> dict[int, Tap]:
        """Return the taps of a sweep that has a sequence hold these ids too."""
        self.settle(slot)
        if slot not in self._followed:
            return {}
        before = self._followed.pop(slot).ids
        found: dict[int, list[Tap]] = {}
        for drafter in self.drafters.values():
            for il, tap in drafter.prompt_taps(slot, ids, len(before)).items():
                found.setdefault(il, []).append(tap)
        held = [*before, *ids.tolist()]
        self._followed[slot] = _Followed(held, dict.fromkeys(self.drafters, len(held)))
        return {il: _all_of(taps) for il, taps in found.items()}

    def committed(self, slot: int, tokens: Sequence[int]) -> None:
        """Note that a sequence took tokens, whose rows the last pass computed."""
        followed = self._followed.get(slot)
        if followed is None:
            return
        followed.ids.extend(tokens)
        if len(followed.ids) > followed.least + MOST_BEHIND:
            self.settle(slot)

    def settle(self, slot: int) -> None:
        """Tell the drafters all of a sequence, such as before its state is copied."""
        if slot in self._followed:
            self._tell(slot, self.drafters)

    def _tell(self, slot: int, names: Collection[str]) -> None:
        """Tell some drafters what a sequence took since they were told."""
        followed = self._followed.pop(slot)
        for name in names:
            first, n = followed.known[name], len(followed.ids)
            if first < n:
                self.drafters[name].committed([(slot, first, followed.ids[first:])])
                followed.known[name] = n
        self._followed[slot] = followed

    def _tell_all(self, slots: Sequence[int], drafter: JointDrafter) -> None:
        """Tell a drafter what sequences took since it was told."""
        followed, taken = {slot: self._followed.pop(slot) for slot in slots}, list[Taken]()
        for slot, one in followed.items():
            first, n = one.known[drafter.name], len(one.ids)
            if first < n:
                taken.append((slot, first, one.ids[first:]))
                one.known[drafter.name] = n
        drafter.committed(taken)
        self._followed |= followed

    @property
    def row_bytes(self) -> int:
        """Return the bytes that drafters keep of a position in caches of their own."""
        return sum(sum(drafter.row_widths) for drafter in self.drafters.values())

    def take_rows(self, slot: int, held: Sequence[int], first: int) -> dict[str, Parts]:
        """Copy what drafters keep of positions from first on, of a settled sequence, and wait.

        held: what the sequence holds up to the last of these positions. Returns nothing if the
        drafters do not know of it.
        """
        followed = self._followed.get(slot)
        if followed is None or followed.ids[: len(held)] != held:
            return {}
        found = {
            name: drafter.take_rows(slot, first, len(held) - first)
            for name, drafter in self.drafters.items()
            if isinstance(drafter, RowKeeper)
        }
        return {name: parts for name, parts in found.items() if parts}

    def put_back(
        self, slot: int, kept: Sequence[int], ids: list[int], rows: Sequence[tuple[int, RowsCopy]]
    ) -> None:
        """Tell the drafters that a sequence holds ids, from copies but for those that it kept.

        rows: the position of the first row in each copy, and the copy.
        """
        before = self._followed.pop(slot, _Followed([], {}))
        n_kept = len(kept) if before.ids[: before.least][: len(kept)] == kept else 0
        for name, drafter in self.drafters.items():
            held = np.asarray(ids, dtype=np.int32)
            if isinstance(drafter, RowKeeper):
                pieces = [(first, copy.n_rows, copy.drafted.get(name, [])) for first, copy in rows]
                drafter.put_back(slot, held, n_kept, pieces)
            else:
                drafter.restart(slot, held)
        self._followed[slot] = _Followed(list(ids), dict.fromkeys(self.drafters, len(ids)))

    def propose(self, ask: Ask) -> Proposal | None:
        """Return the rows of the next pass of a lone sequence; None if nothing was drafted."""
        return self._propose(ask, 1, ())

    def propose_all(self, asks: Sequence[Ask], n_seqs: int) -> list[Proposal | None]:
        """Return the rows of each sequence in a pass that n_seqs share; None: nothing drafted."""
        self._foreseen = None
        groups: dict[str, list[tuple[Ask, Plan]]] = {}
        for ask in asks:
            if ask.slot in self._followed and min(self.max_rows, ask.n_room) > 1 and ask.n_left > 1:
                plan = self.controller.choose_for(n_seqs, ask.n_left, self._failed)
                drafter = as_joint(self.drafters.get(plan.source))
                if drafter and drafter.can_join(ask.race):
                    groups.setdefault(plan.source, []).append((ask, plan))
        found: dict[int, Proposal | None] = {}
        for name, members in groups.items():
            if len(members) > 1:
                found |= self._propose_jointly(name, members)
        return [
            found.get(ask.slot) or self._propose(ask, n_seqs, groups if ask.slot in found else ())
            for ask in asks
        ]

    def _propose_jointly(
        self, name: str, members: Sequence[tuple[Ask, Plan]]
    ) -> dict[int, Proposal | None]:
        """Return the rows of sequences that one drafter drafts for at once, by sequence."""
        start, drafter = time.perf_counter(), as_joint(self.drafters[name])
        if drafter is None:
            raise InternalError(f"{name} drafts for one sequence only")
        self._tell_all([ask.slot for ask, _ in members], drafter)
        n = min(max(plan.n_draft for _, plan in members), drafter.max_draft)
        n_top = max(_n_top(plan, ask.race) for ask, plan in members)
        drafts = drafter.draft_all({ask.slot: ask.anchor for ask, _ in members}, n, n_top)
        each_s, found = (time.perf_counter() - start) / len(members), dict[int, Proposal | None]()
        for (ask, plan), draft in zip(members, drafts):
            draft = draft.cut(min(plan.n_draft, drafter.max_draft)).first(_n_top(plan, ask.race))
            drafted = self._judged(drafter, ask, plan, draft, None)
            found[ask.slot] = drafted and self._proposal(ask, plan, drafted, each_s)
        return found

    def _propose(self, ask: Ask, n_seqs: int, without: Collection[str]) -> Proposal | None:
        """Return the rows of a sequence. without: drafters that have no draft for it."""
        slot, n_left, n_room = ask.slot, ask.n_left, ask.n_room
        if self.finds_nothing(slot, ask.anchor, n_left) or slot not in self._followed:
            return None
        without, most_rows = {*self._failed, *without}, min(self.max_rows, n_room)
        start = time.perf_counter()
        while most_rows > 1 and n_left > 1:
            if n_seqs > 1:
                plan = self.controller.choose_for(n_seqs, n_left, without)
            else:
                plan = self.controller.choose(n_left, without)
            if not plan.source:
                return None
            drafted = self._draft(ask, plan, most_rows)
            if drafted is None:
                without.add(plan.source)
                continue
            return self._proposal(ask, plan, drafted, time.perf_counter() - start)
        return None

    def _proposal(self, ask: Ask, plan: Plan, drafted: _Drafted, seconds: float) -> Proposal:
        draft, tree, odds = drafted
        return Proposal(plan, draft, tree.cut(min(self.max_rows, ask.n_room)), seconds, odds)

    def rests(self, n_left: int, n_seqs: int) -> bool:
        """Return whether by all that is known nothing will be drafted with n_left tokens left.

        n_seqs: how many sequences share the pass; n_left is of the one that goes on for longest.
        """
        return n_left <= 1 or not self.controller.choose_for(n_seqs, n_left, self._failed).source

    def foresee(self, slot: int, n_left: int, anchor: int) -> bool:
        """Work out what a lone sequence drafts after the pass in flight, which gives a token.

        The device is idle while `propose` runs, and not now. n_left: tokens that will be left
        then. anchor: the token that the pass reads. Return whether nothing will be drafted,
        whatever the pass gives. If that depends on what look-up finds, it is told of the anchor
        now, and `finds_nothing` asks it.
        """
        followed, names = self._followed.get(slot), list[str]()
        if followed and len(followed.ids) >= followed.least + MOST_BEHIND:
            self.settle(slot)  # the next token would have it done while the device is idle
        self._foreseen = None
        while n_left > 1:
            source = self.controller.choose(n_left, {*self._failed, *names}).source
            if not source:
                break
            if source not in self._lookups:
                return False
            names.append(source)
        self._foreseen = slot, n_left, names
        if followed and names:
            self._tell(slot, names)
            n = len(followed.ids)
            for name in names:
                if followed.known[name] == n:
                    self._lookups[name].committed([(slot, n, (anchor,))])
                    followed.known[name] = n + 1
        return not names

    def finds_nothing(self, slot: int, anchor: int, n_left: int) -> bool:
        """Return whether a lone sequence drafts nothing, by what was foreseen of this step.

        The device waits for it. False: `propose` finds out.
        """
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is None or foreseen[:2] != (slot, n_left):
            return False
        return not any(self._lookups[name].has(slot, anchor) for name in foreseen[2])

    def _draft(self, ask: Ask, plan: Plan, most_rows: int) -> _Drafted | None:
        """Return a draft and its tree; None if it is of no use."""
        drafter, race = self.drafters[plan.source], ask.race
        self._tell(ask.slot, [plan.source])
        n, tree = min(plan.n_draft, drafter.max_draft), None
        if race and self._is_rejecting(ask):
            draft = drafter.draft(ask.slot, ask.anchor, n, N_RUNNERS, offered_race(race))
        elif plan.n_nodes and isinstance(drafter, TreeDrafter):
            n_nodes = min(plan.n_nodes, most_rows - 1)
            draft, tree = drafter.tree(ask.slot, ask.anchor, n, n_nodes, race)
        else:
            draft = drafter.draft(ask.slot, ask.anchor, n, _n_top(plan, race), race)
        return self._judged(drafter, ask, plan, draft.cut(n), tree)

    def _is_rejecting(self, ask: Ask) -> bool:
        """Return whether drafts are drawn at random, and accepted by rejection."""
        return self.rejects and ask.race is not None

    def _judged(
        self, drafter: Drafter, ask: Ask, plan: Plan, draft: Draft, tree: DraftTree | None
    ) -> _Drafted | None:
        """Return a draft with the rows to verify; None if it is of no use.

        tree: of the drafter, if it has made one.
        """
        race, rejects = ask.race, self._is_rejecting(ask)
        problem = draft.problem(self._n_vocab)
        if tree and not 0 <= min(tree.tokens) <= max(tree.tokens) < self._n_vocab:
            problem = "its tree has tokens that the model lacks"
        if problem:
            self._failed.add(drafter.name)
            self.messages.append(
                f"the drafter {drafter.name} is not used any more: {problem}; "
                "the text goes on without it"
            )
            return None
        if not draft.n_depth:
            return None
        if race and rejects and draft.log_p is not None:
            draft, odds = offer(draft, race, self.p_min)
            return draft, spine_tree(ask.anchor, draft, draft.n_depth), odds
        if rejects:
            self._say_once(f"{drafter.name} gives no probabilities: its drafts are accepted where "
                           "they are what the sampler draws")  # fmt: skip
        if race and tree is None:
            draft = raced(draft, race, plan.n_top)
        tree = tree or self._tree(ask.anchor, plan, draft)
        is_passed_over = tree.n_rows == 1 and drafter.name in self._lookups
        return None if is_passed_over else (draft, tree, ())

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self.messages.append(line)

    def _tree(self, anchor: int, plan: Plan, draft: Draft) -> DraftTree:
        if plan.ddtree:
            return plan.ddtree.tree(anchor, draft)
        shape = self.controller.shape(plan, draft)
        return spine_tree(anchor, draft, shape.n_spine, shape.leaves)

    def drain_messages(self) -> list[str]:
        """Return the messages since the last call."""
        found, self.messages = self.messages, []
        return found

    def close(self) -> None:
        """Free the drafters."""
        for drafter in self.drafters.values():
            drafter.close()


def _n_top(plan: Plan, race: Race | None) -> int:
    """Return how many candidates of a depth a drafter must name."""
    return max(plan.n_top, N_RUNNERS) if race else plan.n_top


def _all_of(taps: list[Tap]) -> Tap:
    """Return a tap that calls several ones."""

    def call(rows: Tensor, row: int, n: int, first: int) -> None:
        for tap in taps:
            tap(rows, row, n, first)

    return taps[0] if len(taps) == 1 else call
