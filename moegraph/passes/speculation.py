"""What drafts for the sequences of an engine: the drafters, and who decides about them.

Drafters follow what each sequence holds. A generation says what its prompt is, and which tokens its
sequence takes. A drafter is told of these tokens before it drafts, or when there are many, because
it computes many at once nearly as fast as one. If that fails, it does not know what the sequence
holds: nothing drafts for it until `begin` has the drafters start anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ..draft.controller import Controller
from ..draft.drafter import Draft, Drafter, DraftTree, Parts, Race, Taken, confidence, spine_tree
from ..draft.lookup import LookUp
from ..draft.plan import PLAIN, Plan, Step
from ..draft.race import N_RUNNERS, Odds, offer, offered_race, raced
from ..kinds import MOST_BEHIND
from .prefixtree import n_common

if TYPE_CHECKING:  # these need the native libraries, decisions about drafts do not
    from ..ggml.ops import Tensor
    from ..resident.hostcopies import RowsCopy
    from ..runner.sweep_batch import HiddenReader

Ids = npt.NDArray[np.int32]


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


class StepSeconds(NamedTuple):
    """How long a step took; zeros if that is not known.

    total: since the end of the step before it. verify: from the launch of its pass to the results.
    Both are 0.0 if they are not known, because the caller did other things for longer than the
    device computed. commit: from the results to the end.
    """

    total: float = 0.0
    verify: float = 0.0
    commit: float = 0.0


def step_of(
    proposal: Proposal | None, drawn: Sequence[int], seconds: StepSeconds, n_missing: int
) -> Step:
    """Return what a step did.

    drawn: the tokens that the text took; the last one was drawn, but not drafted. n_missing: the
    distinct experts that the pass missed.
    """
    total, verify, commit = seconds
    if proposal is None:
        return Step(PLAIN.source, total, len(drawn), verify_s=verify, n_missing=n_missing)
    plan, n_spine = proposal.plan, len(proposal.spine)
    spine = proposal.draft.cut(n_spine)
    return Step(
        plan.source,
        total,
        n_tokens=len(drawn),
        n_rows=proposal.tree.n_rows,
        n_draft=plan.n_draft,
        n_spine=n_spine,
        n_accepted=len(drawn) - 1,
        ranks=spine.ranks(drawn),
        log_p=confidence(spine),
        drafter_s=proposal.drafter_s,
        verify_s=verify,
        commit_s=commit,
        n_missing=n_missing,
        is_trial=plan.is_trial,
    )


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
    accepted by rejection (draft/race.py); p_min: as of `offer`.
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
        # of `foresee`: slot, n_left, and what drafts of look-ups need, without which nothing drafts
        self._foreseen: tuple[int, int, Mapping[str, Mapping[int, float]]] | None = None

    def begin(self, slot: int, held: Sequence[int]) -> None:
        """Begin another text: have the drafters know what a sequence holds."""
        self._foreseen = None
        before, n = self._followed.pop(slot, None), len(held)
        ids, known = np.asarray(held, dtype=np.int32), dict.fromkeys(self.drafters, n)
        if before and n_common(np.asarray(before.ids, dtype=np.int32), ids) == n:
            for name, drafter in self.drafters.items():
                known[name] = min(before.known[name], n)
                drafter.truncate(slot, known[name])
        else:
            for drafter in self.drafters.values():
                drafter.restart(slot, np.maximum(ids, 0))  # those of pictures are no tokens
        self._followed[slot] = _Followed(list(held), known)

    def prompt_readers(self, slot: int, ids: Ids) -> dict[int, HiddenReader]:
        """Return the readers of a sweep that has a sequence hold these ids too."""
        self.settle(slot)
        if slot not in self._followed:
            return {}
        before = self._followed.pop(slot).ids
        found: dict[int, list[HiddenReader]] = {}
        for drafter in self.drafters.values():
            tokens = np.maximum(ids, 0)
            for il, reader in drafter.prompt_readers(slot, tokens, len(before)).items():
                found.setdefault(il, []).append(reader)
        held = [*before, *ids.tolist()]
        self._followed[slot] = _Followed(held, dict.fromkeys(self.drafters, len(held)))
        return {il: _all_of(readers) for il, readers in found.items()}

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
            self._tell([slot], self.drafters)

    def _tell(self, slots: Sequence[int], names: Collection[str]) -> None:
        """Tell some drafters what sequences took since they were told."""
        followed = {slot: self._followed.pop(slot) for slot in slots}
        for name in names:
            taken = list[Taken]()
            for slot, one in followed.items():
                first, one.known[name] = one.known[name], max(one.known[name], len(one.ids))
                if one.ids[first:]:
                    taken.append((slot, first, one.ids[first:]))
            if taken:
                self.drafters[name].committed(taken)
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
        n, drafters = len(held) - first, self.drafters.items()
        found = {name: drafter.take_rows(slot, first, n) for name, drafter in drafters}
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
            pieces = [(first, copy.n_rows, copy.drafted.get(name, [])) for first, copy in rows]
            drafter.put_back(slot, np.maximum(ids, 0, dtype=np.int32), n_kept, pieces)
        self._followed[slot] = _Followed(list(ids), dict.fromkeys(self.drafters, len(ids)))

    def propose_all(self, asks: Sequence[Ask], n_seqs: int) -> list[Proposal | None]:
        """Return the rows of each sequence in a pass that n_seqs share; None: nothing drafted."""
        self._foreseen = None
        groups: dict[str, list[tuple[Ask, Plan]]] = {}
        for ask in asks:
            if ask.slot in self._followed and min(self.max_rows, ask.n_room) > 1 and ask.n_left > 1:
                plan = self.controller.choose_for(n_seqs, ask.n_left, self._failed)
                drafter = self.drafters.get(plan.source)
                if drafter and drafter.can_join(ask.race):
                    groups.setdefault(plan.source, []).append((ask, plan))
        found: dict[int, Proposal | None] = {}
        for name, members in groups.items():
            if len(members) > 1:
                found |= self._propose_jointly(self.drafters[name], members)
        return [
            found.get(ask.slot) or self.propose(ask, n_seqs, groups if ask.slot in found else ())
            for ask in asks
        ]

    def _propose_jointly(
        self, drafter: Drafter, members: Sequence[tuple[Ask, Plan]]
    ) -> dict[int, Proposal | None]:
        """Return the rows of sequences that one drafter drafts for at once, by sequence."""
        start = time.perf_counter()
        self._tell([ask.slot for ask, _ in members], [drafter.name])
        n = min(max(plan.n_draft for _, plan in members), drafter.max_draft)
        n_top = max(_n_top(plan, ask.race) for ask, plan in members)
        drafts = drafter.draft_all({ask.slot: ask.anchor for ask, _ in members}, n, n_top)
        each_s, found = (time.perf_counter() - start) / len(members), dict[int, Proposal | None]()
        for (ask, plan), draft in zip(members, drafts):
            draft = draft.cut(min(plan.n_draft, drafter.max_draft)).first(_n_top(plan, ask.race))
            began = time.perf_counter() - each_s
            found[ask.slot] = self._judged(drafter, ask, plan, draft, None, began)
        return found

    def propose(self, ask: Ask, n_seqs: int = 1, without: Collection[str] = ()) -> Proposal | None:
        """Return the rows of a sequence in a pass that n_seqs share; None: nothing was drafted.

        without: drafters that have no draft for it.
        """
        if self.finds_nothing(ask.slot, ask.anchor, ask.n_left) or ask.slot not in self._followed:
            return None
        without, controller = {*self._failed, *without}, self.controller
        began = time.perf_counter()
        while min(self.max_rows, ask.n_room) > 1 and ask.n_left > 1:
            if n_seqs > 1:
                plan = controller.choose_for(n_seqs, ask.n_left, without)
            else:
                plan = controller.choose(ask.n_left, without)
            if not plan.source:
                break
            if found := self._draft(ask, plan, began):
                return found
            without.add(plan.source)
        return None

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
        now, and `finds_nothing` asks it whether that pays.
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
        needed = {name: self.controller.least_tokens(name) for name in names}
        self._foreseen = slot, n_left, needed
        if followed and names:
            self._tell([slot], names)
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
        lookups, needed = self._lookups, foreseen[2]
        return not any(lookups[name].pays(slot, anchor, least) for name, least in needed.items())

    def _draft(self, ask: Ask, plan: Plan, began: float) -> Proposal | None:
        """Return a draft with the rows to verify; None if it is of no use. began: see `_judged`."""
        drafter, race, tree = self.drafters[plan.source], ask.race, None
        self._tell([ask.slot], [plan.source])
        n, slot, anchor = min(plan.n_draft, drafter.max_draft), ask.slot, ask.anchor
        if race and self.rejects:
            draft = drafter.draft(slot, anchor, n, N_RUNNERS, offered_race(race))
        elif plan.n_nodes and drafter.has_tree:
            n_nodes = min(plan.n_nodes, self.max_rows - 1, ask.n_room - 1)
            draft, tree = drafter.tree(slot, anchor, n, n_nodes, race)
        else:
            draft = drafter.draft(slot, anchor, n, _n_top(plan, race), race)
        return self._judged(drafter, ask, plan, draft.cut(n), tree, began)

    def _judged(
        self, drafter: Drafter, ask: Ask, plan: Plan, draft: Draft, tree: DraftTree | None,
        began: float,
    ) -> Proposal | None:  # fmt: skip
        """Return a draft with the rows to verify; None if it is of no use.

        tree: of the drafter, if it has made one. began: when the draft did.
        """
        race, odds = ask.race, tuple[Odds, ...]()
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
        if race and self.rejects and draft.log_p is not None:
            draft, odds = offer(draft, race, self.p_min)
            tree = spine_tree(ask.anchor, draft, draft.n_depth)
        elif race and self.rejects and drafter.name not in self._said:
            self._said.add(drafter.name)
            self.messages.append(f"{drafter.name} gives no probabilities: its drafts are accepted "
                                 "where they are what the sampler draws")  # fmt: skip
        if tree is None:
            draft = raced(draft, race, plan.n_top) if race else draft
            if plan.ddtree:
                tree = plan.ddtree.tree(ask.anchor, draft)
            else:
                tree = spine_tree(ask.anchor, draft, self.controller.n_spine(plan, draft))
            if tree.n_rows == 1 and drafter.name in self._lookups:  # it is passed over
                return None
        tree = tree.cut(min(self.max_rows, ask.n_room))
        return Proposal(plan, draft, tree, time.perf_counter() - began, odds)

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


def _all_of(readers: list[HiddenReader]) -> HiddenReader:
    """Return a reader that calls several ones."""

    def call(rows: Tensor, row: int, n: int, first: int) -> None:
        for reader in readers:
            reader(rows, row, n, first)

    return readers[0] if len(readers) == 1 else call
