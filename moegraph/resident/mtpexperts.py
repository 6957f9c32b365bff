"""Which experts of the MTP block are on the device, where not all are.

Some slots keep the experts that drafts choose most often. The rest, as many as a row chooses, are
for experts that a graph fetches: each step of a chain fetches what it lacks from pinned memory, and
forgets it. So no graph depends on what an earlier step fetched, and the host changes what is kept
only between drafts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import InternalError
from ..ggml.device import Device
from ..ggml.lib import C, ffi
from ..ggml.ops import Tensor
from .bank import ExpertBanks
from .store import ExpertStore

# A count counts half after about so many drafts.
_HALF_LIFE = 200
# How much more often an expert must be chosen than the one whose slot it takes.
_MARGIN = 2.0


class BlockExperts:
    """The slots of layer il of a bank, of which the last n_expert_used are for fetched experts.

    source: all packed experts, F32 [bytes / 4, n_expert], in pinned memory. n_kept: experts that
    have slots. n_exchanged: how often one took the slot of another.
    """

    def __init__(
        self, device: Device, banks: ExpertBanks, store: ExpertStore, il: int, n_expert_used: int
    ) -> None:
        """Fill the slots that keep experts with the first ones."""
        self._device, self._banks, self._store, self._il = device, banks, store, il
        self.source: Tensor = store.rows[il]
        n_expert, n_slots = int(self.source.ne[1]), banks.n_slots[il]
        self.n_kept, self.n_exchanged = n_slots - n_expert_used, 0
        if not 0 <= self.n_kept < n_expert:
            raise InternalError(f"{n_slots} slots for {n_expert} experts, {n_expert_used} of a row")
        self._owner = np.arange(self.n_kept)  # slot -> expert
        self._counts = np.zeros(n_expert)
        self._host = device.host_buffer(4 * n_expert)
        self._table: npt.NDArray[np.int32] = self._host.array[: 4 * n_expert].view(np.int32)
        self._table[:] = -1
        self._table[: self.n_kept] = self._owner
        for slot in range(self.n_kept):
            self._upload(slot, slot)
        self._send_table()
        lists = np.full((banks.n_victims, 2), -1, dtype=np.int32)
        lists[:n_expert_used, 0] = np.arange(self.n_kept, n_slots)
        device.synchronize()
        C.ggml_backend_tensor_set(banks.victim_lists[il], ffi.from_buffer(lists), 0, lists.nbytes)

    def _upload(self, expert: int, slot: int) -> None:
        """Enqueue the copy of an expert to a slot, after the graphs that read the slot."""
        packing, memory = self._store.packing(self._il), self._banks.layer(self._il).to_fill
        source = self._store.source(self._il, expert)
        stream, at = self._device.compute.ptr, slot * packing.stride
        C.ggml_backend_tensor_set_async(stream, memory, source, at, packing.n_bytes)

    def _send_table(self) -> None:
        self._device.send(self._banks.tables[self._il], self._host, 0, self._table.nbytes)

    def note(self, ids: npt.NDArray[np.int32]) -> None:
        """Count what a draft chose, and enqueue an exchange of two experts if it is worth it.

        ids: I32 numpy, of all steps. The device is idle.
        """
        self._counts *= 0.5 ** (1 / _HALF_LIFE)
        np.add.at(self._counts, ids.reshape(-1), 1.0)
        if not self.n_kept:
            return
        absent = np.where(self._table < 0, self._counts, -1.0)
        expert, slot = int(absent.argmax()), int(self._counts[self._owner].argmin())
        if absent[expert] < self._counts[self._owner[slot]] + _MARGIN:
            return
        self._table[self._owner[slot]], self._table[expert] = -1, slot
        self._owner[slot] = expert
        self.n_exchanged += 1
        self._upload(expert, slot)
        self._send_table()

    def close(self) -> None:
        """Free the host memory."""
        self._host.close()
