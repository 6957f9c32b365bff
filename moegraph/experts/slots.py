"""The slots of one layer: which expert is in which slot. Bookkeeping only, no bytes.

An expert of a layer is in one of three states:

    absent     it has no slot; its table entry is -1
    loading    it has a slot, whose bytes are still being uploaded; its table entry is -1
    resident   its table entry is its slot

`admit` makes an absent expert resident at once, for an upload that this pass uses; the expert is
not evicted before the next pass. `reserve_slot` and `mark_resident` are its two halves, for uploads
that end in a later pass. A full layer holds expert e in slot e for good.

If a layer's graph fetches missing experts, `plan_victims` lists victims before the pass, and
`commit_fetched` records afterwards which of them the graph evicted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..errors import InternalError
from .policy import Counts, LayerPolicy

# Sorting all slots of a layer takes a while, so enough residents are listed for several misses.
_N_LISTED = 16


class Ranking:
    """The residents of lowest score in a layer.

    owner, resident: those of the layer, which changes them in place.
    """

    def __init__(self, policy: LayerPolicy, owner: list[int], resident: set[int]) -> None:
        self._policy, self._owner, self._resident = policy, owner, resident
        # Scores only rise, so no resident that is not listed has a score below _bound.
        self._low: list[int] = []
        self._bound, self._scores = -math.inf, policy.score

    def clear(self) -> None:
        """Forget the ranking: residents or scores have changed in other ways than `add` says."""
        self._low.clear()

    def add(self, expert: int) -> None:
        """Note that an expert has become resident."""
        if self._low and self._policy.score[expert] <= self._bound and expert not in self._low:
            self._low.append(expert)

    def lowest(self, n: int) -> list[int]:
        """Return up to n residents of lowest score, the lowest first."""
        score, resident, bound = self._policy.score, self._resident, self._bound
        if score is not self._scores:  # the policy has scaled them back
            self._scores = score
            self._low.clear()
        low = [e for e in self._low if e in resident and score[e] <= bound]
        low.sort(key=score.__getitem__)
        if len(low) < n:
            # -1, the owner of an empty slot, is never resident
            ranked = sorted(self._owner, key=score.__getitem__)
            low = [expert for expert in ranked if expert in resident]
        self._low = low[:_N_LISTED]
        self._bound = score[self._low[-1]] if low else -math.inf
        return low[: max(n, 0)]

    def victim(self, working_set: Collection[int], fresh: Collection[int]) -> int | None:
        """Return the resident of lowest score that is in neither of both; None: there is none."""
        for n in (1, _N_LISTED, len(self._owner)):
            for lowest in self.lowest(n):
                if lowest not in working_set and lowest not in fresh:
                    return lowest
        return None


# Counters of a layer, see `CacheStats`.
COUNTERS = ("n_hits", "n_misses", "n_missing", "n_admitted", "n_evicted", "n_declined")


@dataclass
class Journal:
    """What the layers note for the cache, before any other state changes.

    given: (layer, slot) reserved since the pass began. in_flight: layers whose graph may have
    fetched experts that `commit_fetched` has not recorded yet, and how many of the layer's victims
    it can reach. dirty: layers whose table or victim list on the device is out of date.
    """

    given: list[tuple[int, int]] = field(default_factory=list)
    in_flight: dict[int, int] = field(default_factory=dict)
    dirty: set[int] = field(default_factory=set)


def count(il: int, ids: npt.NDArray[np.int32], n_expert: int) -> Counts:
    """Return how many rows of layer il chose each expert, [n_expert]."""
    if ids.size and (ids.min() < 0 or ids.max() >= n_expert):
        raise InternalError(f"layer {il}: router chose ids outside 0..{n_expert - 1}")
    return np.bincount(ids.reshape(-1), minlength=n_expert)


class LayerSlots:
    """State of layer il. Its policy chooses victims.

    owner [n_slots]: slot -> expert, or -1. table: I32 numpy [n_expert], expert -> slot or -1.
    loading: expert -> slot. fresh: experts admitted in this pass, whose upload may not have ended.
    victims: (slot, its expert or -1) that the next pass may evict, in this order. evicted: slot ->
    the expert that was evicted from it last, whose bytes are there until others come.
    n_hits, n_misses, n_missing, n_admitted, n_evicted, n_declined: see `CacheStats`.
    """

    def __init__(
        self,
        il: int,
        n_slots: int,
        n_expert_used: int,
        policy: LayerPolicy,
        table: npt.NDArray[np.int32],
        journal: Journal,
    ) -> None:
        self.il, self.n_slots, self.n_expert = il, n_slots, len(table)
        self.n_expert_used = n_expert_used
        self.full = n_slots == self.n_expert
        self.policy = policy
        self.table = table
        self._journal = journal
        self.owner = list(range(self.n_expert)) if self.full else [-1] * n_slots
        table[:] = self.owner if self.full else -1
        self.resident = set(self.owner) if self.full else set()
        # descending, because slots are taken from the end
        self.free = [] if self.full else list(range(n_slots - 1, -1, -1))
        self.loading: dict[int, int] = {}
        self.fresh: set[int] = set()
        self._ranking = Ranking(policy, self.owner, self.resident)
        self.victims: list[tuple[int, int]] = []
        self._first_victims: set[int] = set()
        self.evicted: dict[int, int] = {}
        self.n_hits = self.n_misses = self.n_missing = 0
        self.n_admitted = self.n_evicted = self.n_declined = 0

    @property
    def can_fetch(self) -> bool:
        """Whether experts may be missing, and there is a slot for each that a row may miss."""
        return self.n_expert_used <= self.n_slots < self.n_expert

    def has_slot(self, expert: int) -> bool:
        """Return whether an expert is resident or loading."""
        return expert in self.resident or expert in self.loading

    def access(self, ids: list[int]) -> list[int]:
        """Record what a few rows chose; return the missing experts, each once, in routing order."""
        # one call for all ids; a resident id is in range
        if self.resident.issuperset(ids):
            missing = []
            self.n_hits += len(ids)
        else:
            missing = self._count_misses(ids)
        if not self.full:
            self.policy.touch(ids)
            if not self._first_victims.isdisjoint(ids):
                # a victim was chosen, so another one is due
                self._journal.dirty.add(self.il)
        return missing

    def _count_misses(self, ids: list[int]) -> list[int]:
        resident = self.resident
        absent = [expert for expert in ids if expert not in resident]
        if min(absent) < 0 or max(absent) >= self.n_expert:
            raise InternalError(
                f"layer {self.il}: router chose ids {ids} of {self.n_expert} experts"
            )
        self.n_misses += len(absent)
        self.n_hits += len(ids) - len(absent)
        missing = list(dict.fromkeys(absent)) if len(absent) > 1 else absent
        self.n_missing += len(missing)
        return missing

    def access_batch(self, ids: npt.NDArray[np.int32], chosen: Counts) -> list[int]:
        """Do as `access` for ids I32 [n_tokens * n_expert_used]; the most chosen come first.

        chosen: see `count`.
        """
        if ids.size == 0:
            return []
        absent = np.flatnonzero((self.table < 0) & (chosen > 0))
        missing: list[int] = absent[np.argsort(-chosen[absent], kind="stable")].tolist()
        n_absent = int(chosen[absent].sum())
        self.n_hits += ids.size - n_absent
        self.n_misses += n_absent
        self.n_missing += len(missing)
        if not self.full:
            n_tokens = -(-ids.size // self.n_expert_used)
            self.policy.touch_batch(chosen, ids.reshape(-1), n_tokens)
            self._journal.dirty.add(self.il)  # scores changed, so other victims are due
        return missing

    def admit(self, expert: int, working_set: Collection[int]) -> int | None:
        """Make expert resident and return its slot, or None if it gets none.

        The policy chooses the victim, which is never in working_set, loading, or admitted in this
        pass. Returns None if the policy declines, if nothing may be evicted, or if expert is
        loading.
        """
        slot = self.reserve_slot(expert, working_set)
        if slot is not None:
            self.mark_resident(expert)
            self.fresh.add(expert)
        return slot

    def wanted(self, experts: list[int], working_set: Collection[int]) -> list[int]:
        """Return those of some absent experts that `admit` may give a slot; decline the others.

        The search for a victim takes time, and whom the policy declines here it would decline after
        each of the others: victims of higher scores follow.
        """
        if self.free:
            return experts
        victim = self._ranking.victim(working_set, self.fresh)
        accepts = self.policy.accepts
        found = [] if victim is None else [e for e in experts if accepts(e, victim)]
        self.n_declined += len(experts) - len(found)
        return found

    def reserve_slot(self, expert: int, working_set: Collection[int]) -> int | None:
        """Do as `admit`, but expert is loading until `mark_resident`; its victim leaves at once."""
        if expert in self.resident:
            raise InternalError(f"layer {self.il}: expert {expert} is resident already")
        if expert in self.loading:
            return None
        if self.free:
            slot, victim = self.free.pop(), None
        else:
            victim = self._ranking.victim(working_set, self.fresh)
            if victim is None or not self.policy.accepts(expert, victim):
                self.n_declined += 1
                return None
            slot = int(self.table[victim])
        self._journal.given.append((self.il, slot))
        if victim is not None:
            self._evict(victim, slot)
        self.owner[slot] = expert
        self.loading[expert] = slot
        self._journal.dirty.add(self.il)  # the slot may be on the victim list
        return slot

    def mark_resident(self, expert: int) -> None:
        """Make a loading expert resident, after its upload has ended."""
        self._hold(expert, self.loading.pop(expert))
        self._journal.dirty.add(self.il)

    def take(self, expert: int, slot: int) -> None:
        """Make an absent expert resident in a slot, which the expert in it leaves."""
        if self.has_slot(expert):
            raise InternalError(f"layer {self.il}: expert {expert} has a slot already")
        self._journal.given.append((self.il, slot))
        self._put(expert, slot)
        self._journal.dirty.add(self.il)

    def plan_victims(self, n: int) -> list[tuple[int, int]]:
        """Choose up to n victims for the next passes of a layer that can fetch.

        Returns (slot, its expert or -1): free slots first, then the experts of lowest score. A list
        of as many victims as rows choose ids suffices: rows that miss m experts chose at most n - m
        listed ones. A layer with fewer slots lists them all. A list also serves passes of
        fewer rows, which read the start of it.

        Another list is due once one of the first victims was chosen, because others then have lower
        scores. What stands behind is hardly ever taken before that.
        """
        free = [(slot, -1) for slot in reversed(self.free)]
        found = self._ranking.lowest(n - len(free))
        slot_of = self.table.item  # for a few numbers faster than an array of indices
        self.victims = [(slot_of(expert), expert) for expert in found]
        if free:
            self.victims = free[:n] + self.victims
        self._first_victims = set(found[: max(0, 2 * self.n_expert_used - len(free))])
        return self.victims

    def commit_fetched(self, missing: Sequence[int], ids: Sequence[int]) -> int:
        """Record what a graph fetched into slots that `plan_victims` listed; return how many.

        ids: the experts that the rows chose; missing: what `access` returned for them. The last of
        the missing experts were not fetched if all slots were listed and taken.

        The rule is that of the device: keep it in step with `moegraph_fetch_assign` (C and CUDA),
        `moegraph_router_find_slots`, and the model in tests/helpers/fetch_case.py.
        """
        in_flight, n_fetched = self._journal.in_flight, 0
        n_listed = in_flight.get(self.il)
        if n_listed is None:
            raise InternalError(f"layer {self.il}: a fetch was recorded that no graph announced")
        if missing:
            self._journal.dirty.add(self.il)
            needed = set(ids)
            usable = (pair for pair in self.victims[:n_listed] if pair[1] not in needed)
            for expert, (slot, victim) in zip(missing, usable):
                if self.owner[slot] != victim:
                    raise InternalError(f"layer {self.il}: slot {slot} has lost expert {victim}")
                self._put(expert, slot)
                n_fetched += 1
            if n_fetched < len(missing) and n_listed < self.n_slots:
                raise InternalError(
                    f"layer {self.il}: {len(missing)} experts for {n_fetched} slots"
                )
        del in_flight[self.il]
        return n_fetched

    def preload(
        self, experts: Sequence[int] | None = None, shares: Sequence[float] | None = None
    ) -> list[tuple[int, int]]:
        """Fill the free slots; return (expert, slot) of each expert that got one.

        experts: best first, as from a profile; None takes the lowest ids. shares [n_expert]: the
        expected choices of each expert per token. Returns nothing for a full layer.
        """
        wanted = range(self.n_expert) if experts is None else experts
        placed, new = [], (expert for expert in wanted if not self.has_slot(expert))
        for expert, slot in zip(new, self.free[::-1]):
            self.free.pop()
            self.owner[slot] = expert
            self.resident.add(expert)
            self.table[expert] = slot
            placed.append((expert, slot))
        self._ranking.clear()
        self.policy.start([expert for expert, _ in placed], shares)
        self._journal.dirty.add(self.il)
        return placed

    def rebuild(self) -> None:
        """Empty the slots of loading experts; rebuild the rest of the state from owner."""
        for slot in self.loading.values():
            self.owner[slot] = -1
        self.loading.clear()
        table = self.table
        table[:] = -1
        for slot, expert in enumerate(self.owner):
            if expert >= 0:
                table[expert] = slot
        self.resident.clear()
        self.resident.update(np.flatnonzero(table >= 0).tolist())
        self.free = [slot for slot, owner in enumerate(self.owner) if owner < 0][::-1]
        self.fresh.clear()
        self._ranking.clear()
        self.victims, self._first_victims = [], set()
        self.evicted.clear()

    def leave(self, expert: int) -> None:
        """Take the slot of a resident expert away; the slot is free."""
        slot = int(self.table[expert])
        self._evict(expert, slot)
        self.free.append(slot)
        self.evicted.pop(slot)

    def _put(self, expert: int, slot: int) -> None:
        """Make an expert resident in a slot, which is free or loses its expert."""
        if self.owner[slot] < 0:
            self.free.remove(slot)
        else:
            self._evict(self.owner[slot], slot)
        self.owner[slot] = expert
        self._hold(expert, slot)

    def _hold(self, expert: int, slot: int) -> None:
        self.resident.add(expert)
        self._ranking.add(expert)
        self.table[expert] = slot
        self.n_admitted += 1

    def _evict(self, expert: int, slot: int) -> None:
        self.owner[slot] = -1
        self.evicted[slot] = expert
        self.resident.discard(expert)
        self.table[expert] = -1
        self.n_evicted += 1
