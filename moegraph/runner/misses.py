"""What happens when a token needs experts that are not on the device.

Graph B of the layer is running meanwhile and left those experts out. They are fetched from host memory
on the upload stream and computed by a small graph C, which adds them:

    compute: A(l) | B(l) ............ | tables | wait here | C(l) | A(l+1)
    upload:               experts ... | event here
    host:          sees ids, picks slots

An expert goes into a slot of its layer when the cache gives it one; its victim is no expert of this
pass, and every earlier pass that read the slot has finished, because the host has seen this layer's
ids. Otherwise it goes, with up to N_SPARE others at a time, into one of two spare banks, which take
turns: an upload waits for the event behind the last C that read its bank. Tables travel on the compute
stream, behind whatever still uses the old ones. Their host copies are one row for each wave of each
layer, so none is rewritten before the next pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..experts.bank import Bank, ExpertBanks
from ..experts.cache import ExpertCache
from ..experts.store import N_SPARE, ExpertStore
from ..ggml.device import Device
from ..ggml.handles import Event
from ..ggml.lib import C, ffi
from ..ggml.ops import Tensor
from ..graphs.cache import BuiltGraph

# From more rows on, experts pass through the spare banks: a prompt would flush the cache of a layer.
ADMIT_ROWS = 8


class MissHandler:
    """Fetches missing experts and has them computed."""

    def __init__(
        self, device: Device, banks: ExpertBanks, store: ExpertStore, cache: ExpertCache
    ) -> None:
        self._device = device
        self._banks = banks
        self._store = store
        self.cache = cache
        n_layer, n_expert = cache.tables.shape
        self._row_bytes = 4 * n_expert
        self._waves = 2 + -(-n_expert // N_SPARE)
        self._host = device.host_buffer(n_layer * self._waves * self._row_bytes)
        rows = self._host.array[: n_layer * self._waves * self._row_bytes].view(np.int32)
        self._rows: npt.NDArray[np.int32] = rows.reshape(n_layer, self._waves, n_expert)
        self._here = device.event()
        self._free = [device.event(), device.event()]
        self._turn = 0
        self.n_bytes_fetched = 0

    def upload_tables(self) -> None:
        """Bring the device's tables up to date with the cache; the device is idle."""
        for il in self.cache.dirty:
            row = np.ascontiguousarray(self.cache.tables[il])
            C.ggml_backend_tensor_set(self._banks.tables[il], ffi.from_buffer(row), 0, row.nbytes)
        self.cache.dirty.clear()

    def fill(self, il: int, placed: Sequence[tuple[int, int]]) -> None:
        """Copy experts into slots of a layer, as (expert, slot), and wait for it."""
        for start in range(0, len(placed), N_SPARE):
            copies = self._copies(il, self._banks.layer(il), placed[start : start + N_SPARE])
            C.mg_upload(self._device.upload.ptr, copies, len(copies))
            self._device.synchronize()

    def resolve(
        self, il: int, missing: list[int], ids: list[int], n_rows: int,
        graphs: Mapping[str, BuiltGraph],
    ) -> None:
        """Fetch and compute the missing experts of a layer.

        ids: all that the pass chose there; graphs: the layer's C for each bank: 'own' (only for few
        rows and a layer that has slots), 'spare0', 'spare1'.
        """
        admitted, waiting = [], missing
        if "own" in graphs:
            waiting = []
            for expert in missing:
                slot = self.cache.admit(il, expert, ids)
                if slot is None:
                    waiting.append(expert)
                else:
                    admitted.append((expert, slot))
        if admitted:
            self._run(il, 0, self._banks.layer(il), admitted, graphs["own"], None)
        for wave, start in enumerate(range(0, len(waiting), N_SPARE), 2):
            pairs = list(zip(waiting[start : start + N_SPARE], range(N_SPARE)))
            turn, self._turn = self._turn, 1 - self._turn
            bank = self._banks.spare(il, turn)
            self._run(il, wave, bank, pairs, graphs[f"spare{turn}"], self._free[turn])

    def _run(
        self, il: int, wave: int, bank: Bank, pairs: list[tuple[int, int]],
        graph: BuiltGraph, free: Event | None,
    ) -> None:
        """Upload experts as (expert, slot) of a bank and launch C over them."""
        if self._store.uses_ring and self._here:
            self._here.wait()
        copies = self._copies(il, bank, pairs)
        row = self._rows[il, wave]
        row.fill(-1)
        for expert, slot in pairs:
            row[expert] = slot
        tables = [self._table_copy(il, wave, self._banks.missed)]
        if il in self.cache.dirty:
            self._rows[il, 1] = self.cache.tables[il]
            tables.append(self._table_copy(il, 1, self._banks.tables[il]))
            self.cache.dirty.discard(il)
        status = C.mg_fetch_launch(
            self._device.compute.ptr, self._device.upload.ptr, copies, len(copies),
            ffi.new("struct mg_copy[]", tables), len(tables),
            free.ptr if free else ffi.NULL, self._here.ptr if self._here else ffi.NULL, graph.graph,
        )  # fmt: skip
        if status:
            self._device.check(status, f"the missing experts of layer {il}")

    def _table_copy(self, il: int, wave: int, table: Tensor) -> tuple[Any, int, Any, int]:
        at = (il * self._waves + wave) * self._row_bytes
        return table, 0, self._host.address(at), self._row_bytes

    def _copies(self, il: int, bank: Bank, pairs: Sequence[tuple[int, int]]) -> Any:
        copies = []
        for expert, slot in pairs:
            for part, (address, size) in self._store.sources(il, expert).items():
                copies.append((bank.parts[part], slot * size, address, size))
                self.n_bytes_fetched += size
        return ffi.new("struct mg_copy[]", copies)

    def close(self) -> None:
        """Free events and tables."""
        self._device.synchronize()
        for handle in (self._host, self._here, *self._free):
            if handle:
                handle.close()
