"""The expert cache: which expert of which layer is in which slot. Bookkeeping only, no bytes.

An expert of a layer is in one of three states:

    absent     it has no slot; its table entry is -1
    loading    it has a slot, whose bytes are still being uploaded; its table entry is -1
    resident   its table entry is its slot

`admit` makes an absent expert resident at once, for an upload that this pass uses; the expert is
not evicted before the next `begin_pass`. `reserve_slot` and `mark_resident` are its two halves, for
uploads in the background that end in a later pass. A full layer holds expert e in slot e for good.

If a layer's graph fetches missing experts, `plan_victims` lists victims before the pass, and
`commit_fetched` records afterwards which of them the graph evicted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, InternalError
from .cachestats import CacheStats
from .policy import LayerPolicy, Policy

# Most experts promoted in one pass: 30 MB of a 35B-A3B, which PCIe 5.0 copies in less than a
# millisecond. The next pass waits for them.
MAX_PROMOTED = 16
# `find_worst` sorts all slots of a layer, so it lists enough residents for several misses.
_N_WORST = 16


class _Layer:
    """State of one layer; owner [n_slots]: slot -> expert, or -1."""

    def __init__(self, n_expert: int, n_slots: int, policy: LayerPolicy) -> None:
        self.full = n_slots == n_expert
        self.policy = policy
        self.owner = list(range(n_expert)) if self.full else [-1] * n_slots
        self.resident = set(self.owner) if self.full else set()
        # descending, because slots are taken from the end
        self.free = [] if self.full else list(range(n_slots - 1, -1, -1))
        # expert -> slot
        self.loading: dict[int, int] = {}
        # admitted in this pass: their upload may not have ended
        self.fresh: set[int] = set()
        # (score, expert) of the residents of lowest score, the lowest last. Scores only rise, so an
        # entry whose score has not changed is still below all residents that are not listed.
        self.worst: list[tuple[float, int]] = []
        self._scores_of_worst = policy.score
        # (slot, its expert or -1): what the next pass may evict, in this order
        self.victims: list[tuple[int, int]] = []
        self.victim_experts: set[int] = set()

    def score(self) -> list[float]:
        """Return the policy's scores; empty `worst` if the policy has scaled them back."""
        score = self.policy.score
        if score is not self._scores_of_worst:
            self._scores_of_worst = score
            self.worst.clear()
        return score

    def find_worst(self, n: int = _N_WORST) -> None:
        """Set `worst` to the n evictable residents of lowest score."""
        score = self.score()
        ranked = sorted(self.owner[self.policy.n_static :], key=score.__getitem__)
        # -1, the owner of an empty slot, is never resident
        lowest = list(islice((expert for expert in ranked if expert in self.resident), n))
        self.worst[:] = [(score[expert], expert) for expert in reversed(lowest)]

    def lowest(self, n: int) -> list[int]:
        """Return up to n evictable residents of lowest score, the lowest first."""
        score = self.score()
        if self.worst:
            # an expert whose score rose above the list may be above residents that are not listed
            bound = self.worst[0][0]
            known = {e for _, e in self.worst if e in self.resident and score[e] <= bound}
            self.worst[:] = sorted(((score[e], e) for e in known), reverse=True)
        if len(self.worst) < n:
            self.find_worst(max(n, _N_WORST))
        return [expert for _, expert in reversed(self.worst[-n:])]

    def relist(self, expert: int) -> None:
        """Insert a resident into `worst` if its score is low enough."""
        score = self.score()[expert]
        if self.worst and score <= self.worst[0][0] and expert in self.resident:
            self.worst.append((score, expert))
            self.worst.sort(reverse=True)


class ExpertCache:
    """Slots of all layers.

    n_slots [n_layer]: 0 for no slots, n_expert for a full layer. tables: I32 numpy [n_layer,
    n_expert], expert -> slot or -1, for the device. dirty: layers whose table or victim list on the
    device is out of date. in_flight: layers whose graph may have fetched experts that
    `commit_fetched` has not recorded yet. counts [n_layer][n_expert]: how often each was chosen.

    Raises:
        ConfigError: a layer has fewer than 0 or more than n_expert slots.
    """

    def __init__(
        self, n_expert: int, n_slots: Sequence[int], policy: Policy, n_expert_used: int = 8
    ) -> None:
        for il, n in enumerate(n_slots):
            if not 0 <= n <= n_expert:
                raise ConfigError(f"layer {il} has {n} slots; allowed: 0 to {n_expert}")
        self.n_expert, self.n_expert_used = n_expert, n_expert_used
        self.n_slots = list(n_slots)
        self.policy = policy
        self.tables = np.full((len(n_slots), n_expert), -1, dtype=np.int32)
        self.counts = [[0] * n_expert for _ in n_slots]
        self.dirty = set(range(len(n_slots)))
        self.in_flight: set[int] = set()
        self.step = 0
        self._layers = [
            _Layer(n_expert, n, policy.layer(n_expert, n, n_expert_used)) for n in n_slots
        ]
        self._touched: list[_Layer] = []
        # (layer, slot) reserved since `begin_pass`; noted before any other state changes, so that
        # `rollback` works wherever a pass is interrupted
        self._given: list[tuple[int, int]] = []
        self._hits, self._misses, self._missing, self._admitted, self._evicted, self._declined = (
            [0] * len(n_slots) for _ in range(6)
        )
        for layer, row in zip(self._layers, self.tables):
            if layer.full:
                row[:] = np.arange(n_expert)

    @property
    def stats(self) -> CacheStats:
        """Return a copy of all counters."""
        return CacheStats(
            self.step, self.n_expert_used,
            *(np.array(c, dtype=np.int64) for c in (
                self._hits, self._misses, self._missing,
                self._admitted, self._evicted, self._declined,
            )),
        )  # fmt: skip

    def has_slot(self, il: int, expert: int) -> bool:
        """Return whether an expert is resident or loading."""
        layer = self._layers[il]
        return expert in layer.resident or expert in layer.loading

    def begin_pass(self) -> None:
        """Start a pass of one row or more; the one before has finished."""
        self.step += 1
        for layer in self._touched:
            layer.fresh.clear()
        self._touched.clear()
        self._given.clear()

    def access(self, il: int, ids: list[int]) -> list[int]:
        """Record what one row chose; return the missing experts, each once, in routing order.

        Raises:
            InternalError: an id is out of range, which only a broken router can produce.
        """
        layer = self._layers[il]
        # one call for all ids; a resident id is in range
        if layer.resident.issuperset(ids):
            missing = []
            self._hits[il] += len(ids)
        else:
            missing = self._missing_of(il, layer, ids)
        counts = self.counts[il]
        for expert in ids:
            counts[expert] += 1
        if not layer.full:
            layer.policy.touch(ids)
            if not layer.victim_experts.isdisjoint(ids):
                self.dirty.add(il)  # a listed victim was chosen, so another one is due
        return missing

    def _missing_of(self, il: int, layer: _Layer, ids: list[int]) -> list[int]:
        if min(ids) < 0 or max(ids) >= self.n_expert:
            raise InternalError(f"layer {il}: router chose ids {ids} of {self.n_expert} experts")
        resident = layer.resident
        absent = [expert for expert in ids if expert not in resident]
        self._misses[il] += len(absent)
        self._hits[il] += len(ids) - len(absent)
        missing = list(dict.fromkeys(absent)) if len(absent) > 1 else absent
        self._missing[il] += len(missing)
        return missing

    def access_batch(self, il: int, ids: npt.NDArray[np.int32]) -> list[int]:
        """Do as `access` for ids I32 [n_tokens * n_expert_used]; the most chosen come first.

        Raises:
            InternalError: an id is out of range, which only a broken router can produce.
        """
        if ids.size == 0:
            return []
        if ids.min() < 0 or ids.max() >= self.n_expert:
            raise InternalError(f"layer {il}: router chose ids outside 0..{self.n_expert - 1}")
        flat, layer = ids.reshape(-1), self._layers[il]
        chosen = np.bincount(flat, minlength=self.n_expert)
        self.counts[il] = (chosen + self.counts[il]).tolist()
        absent = np.flatnonzero((self.tables[il] < 0) & (chosen > 0))
        missing: list[int] = absent[np.argsort(-chosen[absent], kind="stable")].tolist()
        n_absent = int(chosen[absent].sum())
        self._hits[il] += ids.size - n_absent
        self._misses[il] += n_absent
        self._missing[il] += len(missing)
        if not layer.full:
            n_tokens = -(-ids.size // self.n_expert_used)
            last = np.full(self.n_expert, -1, dtype=np.int64)
            # numpy keeps the last of several writes to one element
            last[flat] = np.arange(ids.size) // self.n_expert_used
            layer.policy.touch_batch(chosen, last, n_tokens)
            self.dirty.add(il)  # scores changed, so other victims are due
        return missing

    def admit(self, il: int, expert: int, working_set: Collection[int]) -> int | None:
        """Make expert resident and return its slot, or None if it gets none.

        The policy chooses the victim, which is never in working_set, loading, or admitted in this
        pass. Returns None if the policy declines, if nothing may be evicted, or if expert is
        loading.

        Raises:
            InternalError: expert is resident already.
        """
        slot = self.reserve_slot(il, expert, working_set)
        if slot is not None:
            self.mark_resident(il, expert)
            layer = self._layers[il]
            layer.fresh.add(expert)
            self._touched.append(layer)
        return slot

    def reserve_slot(self, il: int, expert: int, working_set: Collection[int]) -> int | None:
        """Do as `admit`, but expert is loading until `mark_resident`; its victim leaves at once.

        Raises:
            InternalError: expert is resident already.
        """
        layer = self._layers[il]
        if expert in layer.resident:
            raise InternalError(f"layer {il}: expert {expert} is resident already")
        if expert in layer.loading:
            return None
        slot, victim = self._free_slot(layer), None
        if slot < 0:
            victim = self._victim(layer, expert, working_set)
            if victim is None:
                self._declined[il] += 1
                return None
            slot = int(self.tables[il, victim])
        self._given.append((il, slot))
        if victim is not None:
            self._drop(il, layer, victim, slot)
            self._evicted[il] += 1
        layer.owner[slot] = expert
        layer.loading[expert] = slot
        self.dirty.add(il)  # the slot may be on the victim list
        return slot

    def mark_resident(self, il: int, expert: int) -> None:
        """Make a loading expert resident, after its upload has ended.

        Raises:
            InternalError: expert is not loading.
        """
        layer = self._layers[il]
        slot = layer.loading.pop(expert, -1)
        if slot < 0:
            raise InternalError(f"layer {il}: expert {expert} is not loading")
        layer.resident.add(expert)
        layer.relist(expert)
        self.tables[il, expert] = slot
        self.dirty.add(il)
        self._admitted[il] += 1

    def rollback(self) -> None:
        """Empty every slot whose bytes a failed pass may have changed; the device must be idle.

        Those are the slots reserved since `begin_pass`, the slots of loading experts, and the
        victims of the layers in flight. The rest of the state is rebuilt from the owners of the
        slots, so the pass may have been interrupted anywhere. If this call is interrupted too, call
        it again.
        """
        for il, slot in self._given:
            self._layers[il].owner[slot] = -1
        for il in self.in_flight:
            for slot, _ in self._layers[il].victims:
                self._layers[il].owner[slot] = -1
        for il, layer in enumerate(self._layers):
            if not layer.full:
                self._rebuild(il, layer)
        self.dirty.update(range(len(self._layers)))
        self._touched.clear()
        self._given.clear()
        self.in_flight.clear()

    def _rebuild(self, il: int, layer: _Layer) -> None:
        """Empty the slots of loading experts; rebuild the rest of a layer's state from owner."""
        for slot in layer.loading.values():
            layer.owner[slot] = -1
        layer.loading.clear()
        table = self.tables[il]
        table[:] = -1
        for slot, expert in enumerate(layer.owner):
            if expert >= 0:
                table[expert] = slot
        layer.resident = set(np.flatnonzero(table >= 0).tolist())
        layer.free = [slot for slot, owner in enumerate(layer.owner) if owner < 0][::-1]
        layer.fresh.clear()
        layer.worst.clear()
        layer.victims, layer.victim_experts = [], set()

    def can_fetch(self, il: int) -> bool:
        """Return whether a layer has an evictable slot for each expert that a row may miss."""
        layer = self._layers[il]
        return not layer.full and self.n_slots[il] - layer.policy.n_static >= self.n_expert_used

    def plan_victims(self, il: int) -> list[tuple[int, int]]:
        """Choose n_expert_used victims for the next pass of a layer that `can_fetch`.

        Returns (slot, its expert or -1): free slots first, then the experts of lowest score. The
        list always suffices: a row that misses m experts chose at most n_expert_used - m listed
        ones.
        """
        layer, n = self._layers[il], self.n_expert_used
        free = [(slot, -1) for slot in reversed(layer.free) if slot >= layer.policy.n_static]
        table = self.tables[il]
        found = [(int(table[expert]), expert) for expert in layer.lowest(n)]
        layer.victims = (free + found)[:n]
        layer.victim_experts = {expert for _, expert in layer.victims}
        return layer.victims

    def commit_fetched(self, il: int, missing: Sequence[int], ids: Sequence[int]) -> None:
        """Record what a graph fetched into the slots that `plan_victims` listed.

        ids: the experts that the row chose; missing: what `access` returned for them.

        Raises:
            InternalError: the list is too short, or the slots changed after it was made.
        """
        layer = self._layers[il]
        if not missing:
            self.in_flight.discard(il)
            return
        self.dirty.add(il)
        usable = [entry for entry in layer.victims if entry[1] not in ids]
        if len(usable) < len(missing):
            raise InternalError(f"layer {il}: {len(missing)} experts for {len(usable)} slots")
        for expert, (slot, victim) in zip(missing, usable):
            if layer.owner[slot] != victim:
                raise InternalError(f"layer {il}: slot {slot} no longer holds expert {victim}")
            if victim < 0:
                layer.free.remove(slot)
            else:
                self._drop(il, layer, victim, slot)
                self._evicted[il] += 1
            layer.owner[slot] = expert
            layer.resident.add(expert)
            layer.relist(expert)
            self.tables[il, expert] = slot
            self._admitted[il] += 1
        self.in_flight.discard(il)

    def preload(
        self, il: int, experts: Sequence[int] | None = None, shares: Sequence[float] | None = None
    ) -> list[tuple[int, int]]:
        """Fill the free slots of a layer; return (expert, slot) of each expert that got one.

        experts: best first, as from a profile; None takes the lowest ids. shares [n_expert]: the
        expected choices of each expert per token. Returns nothing for a full layer.
        """
        layer = self._layers[il]
        wanted = range(self.n_expert) if experts is None else dict.fromkeys(experts)
        new = [e for e in wanted if e not in layer.resident and e not in layer.loading]
        placed = []
        layer.free.sort(reverse=True)
        for expert in new[: len(layer.free)]:
            if not 0 <= expert < self.n_expert:
                raise InternalError(f"layer {il}: no expert {expert} of {self.n_expert}")
            slot = layer.free.pop()
            layer.owner[slot] = expert
            layer.resident.add(expert)
            self.tables[il, expert] = slot
            placed.append((expert, slot))
        layer.worst.clear()
        layer.policy.start([expert for expert, _ in placed], experts is not None, shares)
        self.dirty.add(il)
        return placed

    def wanted(self, il: int, limit: int) -> list[int]:
        """Return up to limit absent experts that the policy prefers to residents, best first.

        For an exchange of many experts, as after a prompt: call `reserve_slot` or `admit` for each.
        """
        layer = self._layers[il]
        score, accepts = layer.policy.score, layer.policy.accepts
        absent = [e for e in range(self.n_expert) if self.tables[il, e] < 0 and score[e] > 0]
        absent = sorted((e for e in absent if e not in layer.loading), key=score.__getitem__)
        n_free = sum(slot >= layer.policy.n_static for slot in layer.free)
        dynamic = [e for e in layer.owner[layer.policy.n_static :] if e in layer.resident]
        worst = sorted(dynamic, key=score.__getitem__)
        found: list[int] = []
        while absent and len(found) < limit:
            at = len(found) - n_free
            if at >= 0 and (at >= len(worst) or not accepts(absent[-1], worst[at])):
                break
            if at >= 0 and score[worst[at]] >= score[absent[-1]]:
                break
            found.append(absent.pop())
        return found

    def residents(self, il: int) -> list[int]:
        """Return a layer's resident experts: those in static slots, then by falling score."""
        layer = self._layers[il]
        static = [e for e in layer.owner[: layer.policy.n_static] if e in layer.resident]
        rest = [e for e in layer.owner[layer.policy.n_static :] if e in layer.resident]
        return static + sorted(rest, key=layer.policy.score.__getitem__, reverse=True)

    def warning(self) -> str | None:
        """Return one line when layers have fewer slots than one token chooses experts, or None."""
        short = [il for il, n in enumerate(self.n_slots) if 0 < n < self.n_expert_used]
        if not short:
            return None
        fewest = min(self.n_slots[il] for il in short)
        return (
            f"{len(short)} of {len(self.n_slots)} layers have fewer slots (least {fewest}) than a "
            f"token chooses experts ({self.n_expert_used}), where LRU never hits, so they use "
            f"decayed frequency; try at least {self.n_expert_used * 2} slots a layer"
        )

    def check(self) -> None:
        """Verify all invariants.

        Raises:
            InternalError: an invariant does not hold.
        """
        for il, layer in enumerate(self._layers):
            owned, loading = [e for e in layer.owner if e >= 0], layer.loading
            table, resident = self.tables[il], layer.resident
            in_table = set(np.flatnonzero(table >= 0).tolist())
            rules = {
                "a slot has two experts or an expert two slots": len(set(owned)) == len(owned),
                "an expert is loading and resident": not resident & set(loading),
                "owners are not residents and loading experts": set(owned)
                == resident | set(loading),
                "the table does not list the residents": in_table == resident,
                "table and owners disagree": all(layer.owner[table[e]] == e for e in resident),
                "a loading slot was given away": all(
                    layer.owner[slot] == e for e, slot in loading.items()
                ),
                "a free slot has an owner, or an empty one is not free": sorted(layer.free)
                == [slot for slot, e in enumerate(layer.owner) if e < 0],
                "an expert admitted in this pass was evicted": layer.fresh <= resident,
                "a full layer changed": not layer.full or layer.owner == list(range(self.n_expert)),
            }
            wrong = [what for what, holds in rules.items() if not holds]
            if wrong:
                raise InternalError(f"expert cache, layer {il}: {'; '.join(wrong)}")

    def _free_slot(self, layer: _Layer) -> int:
        """Take a free slot that is not static, or return -1."""
        for at in range(len(layer.free) - 1, -1, -1):
            if layer.free[at] >= layer.policy.n_static:
                return layer.free.pop(at)
        return -1

    def _victim(self, layer: _Layer, expert: int, working_set: Collection[int]) -> int | None:
        """Return the victim for expert, or None."""
        score, worst = layer.score(), layer.worst
        while worst:
            value, victim = worst[-1]
            if victim in layer.resident and score[victim] == value:
                break
            layer.relist(worst.pop()[1])
        if not worst:
            layer.find_worst()
        if not worst:
            return None
        victim = worst[-1][1]
        if victim in working_set or victim in layer.fresh:
            candidates = [
                e
                for e in layer.owner[layer.policy.n_static :]
                if e in layer.resident and e not in working_set and e not in layer.fresh
            ]
            if not candidates:
                return None
            victim = min(candidates, key=score.__getitem__)
        return victim if layer.policy.accepts(expert, victim) else None

    def _drop(self, il: int, layer: _Layer, expert: int, slot: int) -> None:
        layer.owner[slot] = -1
        layer.resident.discard(expert)
        self.tables[il, expert] = -1
        self.dirty.add(il)
