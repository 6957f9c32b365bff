"""The expert cache: the slots of all layers (slots.py), and what spans layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..config import ExpertPolicy
from .cachestats import CacheStats
from .slots import COUNTERS, Journal, LayerSlots


class ExpertCache:
    """Slots of all layers.

    n_slots [n_layer]: 0 for no slots, n_expert for a full layer. tables: I32 numpy [n_layer,
    n_expert], expert -> slot or -1, for the device. dirty: layers whose table or victim list on the
    device is out of date. step: passes so far.
    """

    def __init__(
        self, n_expert: int, n_slots: Sequence[int], policy: ExpertPolicy, n_expert_used: int = 8
    ) -> None:
        self.n_expert, self.n_expert_used = n_expert, n_expert_used
        self.n_slots = list(n_slots)
        self.tables = np.full((len(n_slots), n_expert), -1, dtype=np.int32)
        self.step = 0
        # the table of a full layer never changes
        self._journal = Journal(dirty={il for il, n in enumerate(n_slots) if n < n_expert})
        self.dirty = self._journal.dirty
        self.layers = [
            LayerSlots(il, n, n_expert_used, policy.layer(n_expert, n, n_expert_used),
                       self.tables[il], self._journal)
            for il, n in enumerate(n_slots)
        ]  # fmt: skip

    @property
    def stats(self) -> CacheStats:
        """Return a copy of all counters."""
        counted = ([getattr(layer, name) for layer in self.layers] for name in COUNTERS)
        return CacheStats(
            self.step, self.n_expert_used, *(np.array(counts, dtype=np.int64) for counts in counted)
        )

    @property
    def n_missing(self) -> int:
        """Return the distinct missing experts, summed over passes and layers."""
        return sum(layer.n_missing for layer in self.layers)

    def begin_pass(self) -> None:
        """Start a pass of one row or more; the one before has finished."""
        self.step += 1
        for il, _ in self._journal.given:
            self.layers[il].fresh.clear()
        self._journal.given.clear()

    def begin_fetch(self, layers: Iterable[int], n_ids: int) -> None:
        """Note that a graph is launched next that fetches in these layers what n_ids ids miss."""
        self._journal.in_flight.update(dict.fromkeys(layers, n_ids))

    def rollback(self) -> None:
        """Empty every slot whose bytes a failed pass may have changed; the device must be idle.

        Those are the slots reserved since `begin_pass`, the slots of loading experts, and the
        victims of the layers in flight. The rest of the state is rebuilt from the owners of the
        slots, so the pass may have been interrupted anywhere. If this call is interrupted too, call
        it again.
        """
        journal = self._journal
        for il, slot in journal.given:
            self.layers[il].owner[slot] = -1
        for il, n_listed in journal.in_flight.items():
            for slot, _ in self.layers[il].victims[:n_listed]:
                self.layers[il].owner[slot] = -1
        for layer in self.layers:
            if not layer.full:
                layer.rebuild()
                self.dirty.add(layer.il)
        journal.given.clear()
        journal.in_flight.clear()

    def lost_to(self, copy: ExpertCache) -> dict[int, list[tuple[int, int]]]:
        """Return by layer (expert, slot) of what passes of a copy have overwritten.

        That must be uploaded again, and all tables are due, before a pass uses this cache.
        """
        lost = {}
        for layer, other in zip(self.layers, copy.layers):
            if not layer.full:
                self.dirty.add(layer.il)
                both = enumerate(zip(layer.owner, other.owner))
                lost[layer.il] = [(mine, at) for at, (mine, held) in both if mine not in (-1, held)]
        return lost
