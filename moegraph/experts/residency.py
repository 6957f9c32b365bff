"""Decides what happens to missing experts, pass by pass. Bookkeeping only: no device, no bytes.

The layered runner carries the decisions out, and the simulator counts them:

    terms = residency.begin_pass(kind, n_tokens)   how this pass deals with missing experts
    residency.begin_fetch(layers)                  before each graph that fetches
    residency.fetched(il, ids)                     for each layer, in order: its graph fetched, or
    residency.routed(il, ids)                      the host handles what the layer misses
    residency.results_arrived(seconds)

A pass that fails ends with `rollback`. Results that nobody collects do not arrive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import InternalError
from ..kinds import MAX_FETCH_IDS, MAX_FETCH_ROWS, Kind, MissRules, rules_of
from .cache import ExpertCache
from .cachestats import RoutingCounts
from .cost import FetchChoice, MissWays
from .policy import Counts
from .slots import LayerSlots, count

Pairs = list[tuple[int, int]]  # (expert, slot)


class MissMode(NamedTuple):
    """How a pass deals with missing experts; decided once, by `Residency`. Graphs depend on it.

    fetch_layers: layers whose graph fetches them. short_layers: those of them whose slots may not
    suffice, so that the host sees to the rest. admits: other missing experts may get slots. cpu:
    the CPU may compute them.
    """

    fetch_layers: frozenset[int] = frozenset()
    short_layers: frozenset[int] = frozenset()
    admits: bool = False
    cpu: bool = False


# What the device must know of a layer from now on: il; its table I32 numpy [n_expert], expert ->
# slot or -1; its victims in order, (slot, its expert or -1), or None if no graph fetches there.
TableRow = tuple[int, npt.NDArray[np.int32], list[tuple[int, int]] | None]


@dataclass(slots=True)
class PassTerms:
    """What a pass of n_tokens rows does about missing experts, and what precedes it.

    waits: experts were promoted, and their uploads must end before this pass. rows: to be sent to
    the device.
    """

    n_tokens: int
    mode: MissMode
    waits: bool
    rows: list[TableRow]


class FetchedLayer(NamedTuple):
    """What the graph of a layer fetched: experts, in this order.

    row: the layer's table row if it changed. rest: what happens to the missing experts that got no
    slot, if there are any.
    """

    experts: list[int]
    row: TableRow | None
    rest: Remedy | None


@dataclass(slots=True)
class Remedy:
    """What happens to the missing experts of a layer.

    admitted: to be uploaded into slots of the layer. staged: to be uploaded into staging. on_cpu:
    for the CPU. promoted: those of them to be uploaded afterwards.
    """

    admitted: Pairs
    staged: list[int]
    on_cpu: list[int]
    promoted: Pairs


# Most experts promoted in one pass: 30 MB of a 35B-A3B, which PCIe 5.0 copies in less than a
# millisecond. The next pass waits for them.
MAX_PROMOTED = 16
# The ids of so few rows are handled one by one, which is faster than as arrays. A pass whose graphs
# fetch has no more, because fetched experts are recorded in routing order.
_LISTED_ROWS = MAX_FETCH_ROWS
# Lists of victims stay as long as the widest of so many passes needs. Where passes of many and of
# few rows take turns, longer lists would else be due before each pass of many rows.
_PATIENCE = 16
_NO_LAYERS: frozenset[int] = frozenset()

_NOTHING_FETCHED = FetchedLayer([], None, None)


class Residency:
    """Which experts are where, and what passes do about the missing ones.

    routing: how often each expert was chosen. split: how many missing experts the CPU computes.
    n_kept: experts that prompts gave slots to.
    """

    def __init__(
        self, cache: ExpertCache, ways: MissWays, *, fetchable: Collection[int] = ()
    ) -> None:
        """Take over a cache whose slots are filled.

        fetchable: layers whose graph could fetch, given slots.
        """
        self.cache, self._layers, self._dirty = cache, cache.layers, cache.dirty
        self.routing = RoutingCounts(len(cache.n_slots), cache.n_expert)
        self.split = ways.split
        self._has_cpu = ways.cpu
        self._n_used = cache.n_expert_used
        self._most_rows = min(MAX_FETCH_ROWS, MAX_FETCH_IDS // self._n_used)
        self._choice = FetchChoice(ways, self._most_rows)
        self._fetch_layers = frozenset(
            il for il in fetchable if self._choice.may_fetch and cache.layers[il].can_fetch
        )
        self._short_layers: dict[int, frozenset[int]] = {}  # by the number of ids
        self.n_kept = 0
        self._pass: PassTerms | None = None
        self._victim_layers = _NO_LAYERS  # of the pass: their graphs fetch
        self._listed: set[int] = set()  # the list of victims on the device is that of the slots
        self._n_victims = self._n_used  # so many for each layer, or all
        self._n_narrower = 0  # passes in turn that needed fewer
        self._learning, self._seconds = (0, 0), 0.0  # rows of the pass, misses before it; its time
        self._promoted: list[tuple[int, int]] = []  # (layer, expert), loading

    def miss_mode(self, kind: Kind, n_tokens: int) -> MissMode:
        """Return how a pass of this kind would deal with missing experts now."""
        return self._mode(rules_of(kind, n_tokens), n_tokens)

    def begin_pass(self, kind: Kind, n_tokens: int) -> PassTerms:
        """Decide how a pass of n_tokens rows deals with missing experts; the last pass has ended.

        Promoted experts become resident, and victims are planned for the layers whose graph
        fetches.
        """
        self._pass = None
        self.cache.begin_pass()
        rules = rules_of(kind, n_tokens)
        self._learn(n_tokens if rules.fetches else 0)
        mode = self._mode(rules, n_tokens)
        waits = bool(self._promoted)
        for il, expert in self._promoted:
            self._layers[il].mark_resident(expert)
        self._promoted.clear()
        rows = self._changed_rows(mode.fetch_layers, n_tokens * self._n_used)
        terms = PassTerms(n_tokens, mode, waits, rows)
        self._pass = terms
        return terms

    def is_current(self, terms: PassTerms) -> bool:
        """Return whether no other pass has begun since this one, and it has not ended."""
        return self._pass is terms

    def _learn(self, n_tokens: int) -> None:
        """Note what the last pass missed; n_tokens: rows of the next one, 0 if it cannot fetch."""
        if not self._fetch_layers:
            return
        n_rows, before = self._learning
        total = sum(self._layers[il].n_missing for il in self._fetch_layers)
        if n_rows and self._seconds:
            n_missing = (total - before) / len(self._fetch_layers)
            self._choice.observe(n_rows, n_missing, self._seconds)
        self._seconds = 0.0
        self._learning = n_tokens if n_tokens <= self._most_rows else 0, total

    def preferred(self, il: int, experts: Iterable[int]) -> dict[int, int]:
        """Return which of the absent experts that a prompt chose in layer il are to be kept.

        Those that the policy prefers to residents, now that the prompt is recorded -> their slots,
        which are free, or hold the residents of lowest score.
        """
        layer, score = self._layers[il], self._layers[il].policy.score
        absent = sorted(e for e in experts if score[e] > 0 and not layer.has_slot(e))
        absent.sort(key=score.__getitem__, reverse=True)
        slot_of = dict(zip(absent, reversed(layer.free)))
        worst = sorted(layer.resident, key=score.__getitem__)
        for expert, victim in zip(absent[len(slot_of) :], worst):
            if not layer.policy.accepts(expert, victim) or score[victim] >= score[expert]:
                break
            slot_of[expert] = int(layer.table[victim])
        return slot_of

    def keep(self, il: int, pairs: Pairs) -> None:
        """Make experts of layer il resident that a prompt copies into slots now.

        pairs: experts and slots that `preferred` returned, in any order and number.
        """
        for expert, slot in pairs:
            self._layers[il].take(expert, slot)
        self.n_kept += len(pairs)

    def begin_fetch(self, layers: Iterable[int]) -> None:
        """Note that a graph that fetches in these layers is launched next."""
        if self._pass is None:
            raise InternalError("a fetch without a pass")
        self.cache.begin_fetch(layers, self._pass.n_tokens * self._n_used)

    def fetched(self, il: int, ids: npt.NDArray[np.int32]) -> FetchedLayer:
        """Record what the graph of layer il fetched for rows that chose ids.

        ids: I32, n_expert_used of each row that is not padding.
        """
        terms, layer = self._pass, self._layers[il]
        if terms is None:
            raise InternalError(f"layer {il}: ids without a pass")
        chosen = ids.tolist()
        missing = layer.access(chosen)
        self.routing.add(il, chosen)
        if not missing and il not in self._dirty:  # most layers of most passes
            layer.commit_fetched(missing, chosen)
            return _NOTHING_FETCHED
        n_fetched, rest = layer.commit_fetched(missing, chosen), None
        if n_fetched < len(missing):
            rest = Remedy([], missing[n_fetched:], [], [])
            del missing[n_fetched:]
        return FetchedLayer(missing, self._row(layer) if il in self._dirty else None, rest)

    def routed(
        self, il: int, ids: npt.NDArray[np.int32], counts: Counts | None = None
    ) -> Remedy | None:
        """Decide what happens to the missing experts of layer il; None if there are none.

        ids: I32 [n_tokens * n_expert_used], the pass's choice. counts [n_expert]: how many rows of
        a pass of many chose each expert, if that is known.
        """
        terms = self._pass
        if terms is None:
            raise InternalError(f"layer {il}: ids without a pass")
        layer = self._layers[il]
        if terms.n_tokens <= _LISTED_ROWS:
            chosen = ids.tolist()
            missing = layer.access(chosen)
            self.routing.add(il, chosen)
        else:
            n_chosen = count(il, ids, self.cache.n_expert) if counts is None else counts
            missing = layer.access_batch(ids, n_chosen)
            self.routing.add_batch(il, n_chosen)
        return self._remedy(terms, layer, missing, ids) if missing else None

    def results_arrived(self, seconds: float = 0.0) -> None:
        """Note that the pass is over, and how long it took; 0: unknown."""
        if self._pass is None:
            raise InternalError("results arrived of a pass that did not begin")
        self._pass, self._seconds = None, seconds

    def rollback(self) -> None:
        """Undo a failed pass; see `ExpertCache.rollback`. The device must be idle."""
        self._promoted.clear()
        self._learning = 0, 0
        self.cache.rollback()
        self._pass = None

    def _mode(self, rules: MissRules, n_tokens: int) -> MissMode:
        fetches = rules.fetches and self._choice.fetches(n_tokens)
        return MissMode(
            self._fetch_layers if fetches else _NO_LAYERS,
            self._short(n_tokens * self._n_used) if fetches else _NO_LAYERS,
            rules.admits,
            rules.on_cpu and self._has_cpu,
        )

    def _short(self, n_ids: int) -> frozenset[int]:
        """Return the layers that fetch, but may not have a slot for each expert of n_ids ids."""
        found = self._short_layers.get(n_ids)
        if found is None:
            n_distinct = min(n_ids, self.cache.n_expert)
            found = self._short_layers[n_ids] = frozenset(
                il for il in self._fetch_layers if self._layers[il].n_slots < n_distinct
            )
        return found

    def _changed_rows(self, victim_layers: frozenset[int], n_ids: int) -> list[TableRow]:
        """Return the rows that are out of date on the device, with victims of these layers.

        n_ids: that the pass looks up in each of them.
        """
        self._victim_layers = victim_layers
        if victim_layers:  # other passes leave the lists as they are
            self._dirty.update(victim_layers - self._listed)
            if n_ids > self._n_victims:
                layers = [self._layers[il] for il in victim_layers]
                self._dirty.update(x.il for x in layers if len(x.victims) < min(n_ids, x.n_slots))
            self._n_narrower = self._n_narrower + 1 if n_ids < self._n_victims else 0
            if n_ids > self._n_victims or self._n_narrower > _PATIENCE:
                self._n_victims, self._n_narrower = n_ids, 0
        return [self._row(self._layers[il]) for il in sorted(self._dirty)]

    def _row(self, layer: LayerSlots) -> TableRow:
        il, victims = layer.il, None
        if il in self._victim_layers:
            victims = layer.plan_victims(self._n_victims)
            self._listed.add(il)
        else:
            self._listed.discard(il)
        self._dirty.discard(il)
        return il, layer.table, victims

    def _remedy(
        self, terms: PassTerms, layer: LayerSlots, missing: list[int], ids: npt.NDArray[np.int32]
    ) -> Remedy:
        il, mode = layer.il, terms.mode
        if il in mode.fetch_layers:
            raise InternalError(f"layer {il}: its graph fetches, so the host must not admit")
        on_cpu = self._for_cpu(terms.n_tokens, missing, ids) if mode.cpu else []
        staged = missing
        if on_cpu:
            elsewhere = set(on_cpu)
            staged = [expert for expert in missing if expert not in elsewhere]
        if not mode.admits or not layer.n_slots:
            return Remedy([], staged, on_cpu, [])
        working_set = set(ids.tolist())
        slots = {e: layer.admit(e, working_set) for e in layer.wanted(staged, working_set)}
        admitted = [(expert, slot) for expert, slot in slots.items() if slot is not None]
        declined = [expert for expert in staged if slots.get(expert) is None]
        promoted = self._promote(layer, on_cpu, working_set) if on_cpu else []
        return Remedy(admitted, declined, on_cpu, promoted)

    def _for_cpu(self, n_tokens: int, missing: list[int], ids: npt.NDArray[np.int32]) -> list[int]:
        """Return the missing experts that the CPU computes."""
        if n_tokens == 1:
            # the CPU takes the last of the row's choice: the cache is least likely to want them
            n_cpu = self.split.decode[len(missing)]
        else:
            # the CPU takes the experts that the fewest rows chose: its work grows with the rows,
            # while the device uploads an expert once
            chosen = Counter(ids.tolist())
            missing = sorted(missing, key=chosen.__getitem__, reverse=True)
            n_cpu = self.split.n_cpu([chosen[e] for e in missing], n_tokens)
        return missing[len(missing) - n_cpu :]

    def _promote(self, layer: LayerSlots, experts: list[int], working_set: set[int]) -> Pairs:
        """Reserve slots for experts that the CPU computes, if the cache wants them."""
        pairs = []
        considered = experts[: max(0, MAX_PROMOTED - len(self._promoted))]
        for expert in layer.wanted(considered, working_set):
            slot = layer.reserve_slot(expert, working_set)
            if slot is not None:
                pairs.append((expert, slot))
        self._promoted += [(layer.il, expert) for expert, _ in pairs]
        return pairs
