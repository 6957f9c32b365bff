"""The second level of the expert cache: experts in host memory, the others only in the file.

Host memory holds experts that have no slot on the device, so together they hold as many as they
can. Both levels are `LayerSlots` with one policy: an expert has one score. What the device evicts
is offered to host memory, as is what passes through staging; what gets a slot on the device leaves
it. Bookkeeping only, no bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .cache import ExpertCache
from .residency import Pairs
from .slots import Journal, LayerSlots


@dataclass(slots=True)
class Moves:
    """What happens in host memory when experts of a layer go to the device.

    read: experts that come from the file. left: those that host memory gives up before, and moved:
    once they are on the device. saved: (expert, its slot on the device), to be copied to host
    memory before the slot is overwritten. kept: experts on their way to the device that stay in
    host memory too.
    """

    read: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    saved: Pairs = field(default_factory=list)
    kept: list[int] = field(default_factory=list)


class HostLevel:
    """Host slots of some layers of a cache; layers: their numbers. Others need no decisions."""

    def __init__(self, cache: ExpertCache, n_slots: Mapping[int, int]) -> None:
        """cache: the device's. n_slots: by layer, fewer than there are experts."""
        self._device, self._journal, n_expert = cache.layers, Journal(), cache.n_expert
        self.layers, self._needed = frozenset(n_slots), frozenset[int]()
        self._host = {
            il: LayerSlots(il, n, cache.n_expert_used, cache.layers[il].policy,
                           np.empty(n_expert, dtype=np.int32), self._journal)
            for il, n in n_slots.items()
        }  # fmt: skip

    def mask(self) -> npt.NDArray[np.bool_]:
        """Return which experts are on the device or in host memory: [n_layer, n_expert]."""
        found = np.array([slots.table >= 0 for slots in self._device])
        for il, slots in self._host.items():
            found[il] |= slots.table >= 0
        return found

    def fill(self, il: int) -> list[int]:
        """Take the best experts without a slot on the device, at the start; return them by id."""
        if il not in self._host:
            return []
        host, device = self._host[il], self._device[il]
        absent = [e for e in range(host.n_expert) if not device.has_slot(e)]
        absent.sort(key=device.policy.score.__getitem__, reverse=True)
        taken = list(zip(absent, host.free[::-1]))
        for expert, slot in taken:
            host.take(expert, slot)
        return sorted(expert for expert, _ in taken)

    def begin(self, il: int, needed: Iterable[int] = ()) -> None:
        """Note what goes to the device next: host memory keeps it, and what it gets meanwhile."""
        if il in self._host:
            self._needed = frozenset(needed)
            self._host[il].fresh.clear()
            self._journal.given.clear()

    def move(
        self, il: int, admitted: Sequence[tuple[int, int]], others: Sequence[int] = ()
    ) -> Moves:
        """Decide what moves when the device takes experts of layer il, some of those after `begin`.

        admitted: experts and their slots, which `LayerSlots` gave them. others: experts that pass
        through the device.
        """
        moves = Moves()
        if il not in self._host:
            return moves
        host, device = self._host[il], self._device[il]
        going = [expert for expert, _ in admitted] + list(others)
        moves.read = [e for e in going if e not in host.resident]
        in_use = self._needed.union(going)
        for expert, slot in admitted:
            if expert in host.resident:
                host.leave(expert)
                moves.moved.append(expert)
            evicted = device.evicted.pop(slot, -1)
            if evicted >= 0 and self._takes(host, device, evicted, in_use, moves):
                moves.saved.append((evicted, slot))
        moves.kept = [e for e in others if self._takes(host, device, e, in_use, moves)]
        return moves

    @staticmethod
    def _takes(
        host: LayerSlots, device: LayerSlots, expert: int, in_use: Collection[int], moves: Moves
    ) -> bool:
        """Offer an expert to host memory; return whether it is taken, and was not there."""
        if host.has_slot(expert) or device.has_slot(expert) or not host.n_slots:
            return False
        slot = host.admit(expert, in_use)
        if slot is None:
            return False
        evicted = host.evicted.pop(slot, -1)
        if evicted >= 0:
            moves.left.append(evicted)
        return True

    def restore(self, il: int, held: set[int]) -> set[int]:
        """Note after a failure what host memory holds of a layer; return what it gives up."""
        if il not in self._host:
            return set()
        host = self._host[il]
        for expert in host.resident - held:
            host.leave(expert)
        return held - host.resident

    def in_order(self, il: int, experts: list[int]) -> list[int]:
        """Return experts as a prompt should ask for them.

        First come those in host memory, as given, and then the others in the order of the file.
        """
        if il not in self._host:
            return experts
        here = self._host[il].resident
        return [e for e in experts if e in here] + sorted(e for e in experts if e not in here)
