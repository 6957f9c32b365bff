"""Uploads experts to slots of the device, and adds what it computes with them to a pass.

    compute: mixer_router(l) | moe(l) ... | slots | wait for event | add_uploaded(l) | next layer
    upload:                       experts ............... | event

Overwriting a victim's slot is safe: this pass did not choose the victim, and earlier passes have
finished, or the ids of this pass would not have arrived. An exchange, which comes before any ids,
waits for what is enqueued. Experts without a slot go through two staging banks in turn, up to
N_STAGING at a time. An upload into a bank waits for the event after the last `add_uploaded` that
read the bank.

`add_uploaded` gets its slots as an input. Their host copy may be rewritten once the ids of a later
layer have arrived: by then the device has read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from ..experts.passplan import TableRow
from ..ggml.device import Device
from ..ggml.lib import C, ffi
from ..ggml.ops import Tensor
from ..graphs.cache import BuiltGraph
from ..resident.bank import Bank
from ..resident.layout import N_STAGING
from ..resident.stage import Stage


class HostRows:
    """Pinned host rows to upload; array: I32, numpy shape [n_rows, n]. addresses: of the rows."""

    def __init__(self, device: Device, n_rows: int, n: int) -> None:
        self.host = device.host_buffer(4 * n_rows * n)
        self.array: npt.NDArray[np.int32] = self.host.array[: 4 * n_rows * n].view(np.int32)
        self.array = self.array.reshape(n_rows, n)
        self.addresses: list[Any] = [self.host.address(4 * row * n) for row in range(n_rows)]

    def close(self) -> None:
        """Free the memory."""
        self.host.close()


class SlotTables:
    """Host copy of the cache's tables, and its upload to the device.

    A row holds a layer's slot table and, if the layer's graph fetches, its victim list. The host
    writes a row as soon as it knows of a change, mostly while the device computes.
    """

    def __init__(self, stage: Stage) -> None:
        self._first = stage.layers.start
        self._device, self._banks = stage.device, stage.banks
        self._rows = HostRows(stage.device, len(stage.layers), stage.banks.table_stride)
        self._n_expert, self._n_victims = stage.hp.n_expert, stage.banks.n_victims
        # as on the device: the rows of full layers never change
        self._rows.array[:, : self._n_expert] = np.arange(self._n_expert)
        self._is_due = False

    def write(self, changed: TableRow) -> None:
        """Copy a layer's new row."""
        il, table, victims = changed
        row, n = self._rows.array[il - self._first], self._n_expert
        row[:n] = table
        if victims is not None:
            n_listed = n + 2 * len(victims)
            # several times faster than to assign the list
            row[n:n_listed] = np.fromiter(chain.from_iterable(victims), np.int32, 2 * len(victims))
            row[n_listed : n + 2 * self._n_victims] = -1  # a graph may read more than there are
        self._is_due = True

    def send(self) -> None:
        """Enqueue the upload of all rows, if any changed, after passes that read the old ones."""
        if self._is_due:
            # one copy for all rows: a small copy takes about 2 us, whatever its size
            self._device.send(self._banks.all_tables, self._rows.host, 0, self._rows.array.nbytes)
            self._is_due = False

    def close(self) -> None:
        """Free the memory."""
        self._rows.close()


Pairs = Sequence[tuple[int, int]]  # (expert, slot)
Ids = npt.NDArray[np.int32]


class Uploader:
    """Enqueues copies of experts, and the graphs that add them.

    n_bytes: bytes that crossed to the device, summed.
    """

    def __init__(self, stage: Stage, max_ids: int) -> None:
        """Allocate host rows for passes of at most max_ids chosen ids."""
        self._device, self._banks, self._store = stage.device, stage.banks, stage.store
        self._n_expert, self.n_bytes = stage.hp.n_expert, 0
        # row 0: slots of the layer's own bank; one row for each wave through a staging bank
        self._slots = HostRows(stage.device, 1 + -(-self._n_expert // N_STAGING), max_ids)
        self._uploaded, self._enqueued = stage.device.event(), stage.device.event()
        self._staging_free = [stage.device.event(), stage.device.event()]
        self._staging_turn = 0

    def send(self, il: int, bank: Bank, pairs: Pairs) -> None:
        """Enqueue copies of (expert, slot) pairs to a bank."""
        upload, store, packing = self._device.upload.ptr, self._store, self._store.packing(il)
        memory, base = bank.to_fill, store.pinned(il)
        if base is None:
            self._send_from_file(il, memory, pairs)
        else:
            both = np.array(pairs, dtype=np.int32)
            C.mg_upload_experts(
                upload, memory, base, packing.stride,
                ffi.cast("int32_t *", ffi.from_buffer(both)), len(pairs), packing.stride,
                packing.n_bytes, 1,
            )  # fmt: skip
        self.n_bytes += packing.n_bytes * len(pairs)

    def _send_from_file(self, il: int, memory: Tensor, pairs: Pairs) -> None:
        """Enqueue copies of experts that are not pinned."""
        upload, store, packing = self._device.upload.ptr, self._store, self._store.packing(il)
        try:
            for n_done, (expert, slot) in enumerate(pairs):
                if n_done % N_STAGING == 0:
                    store.copied()
                    store.ahead((il, e) for e, _ in pairs[n_done : n_done + 2 * N_STAGING])
                found, at = store.source(il, expert), slot * packing.stride
                C.ggml_backend_tensor_set_async(upload, memory, found, at, packing.n_bytes)
        except BaseException:
            store.forget()
            raise
        finally:
            store.copied()

    def fill(self, il: int, placed: Pairs) -> None:
        """Upload experts into slots of their layer and wait."""
        if placed:
            self.send(il, self._banks.layer(il), placed)
            self._device.synchronize()

    def exchange(self, exchanged: Sequence[tuple[int, Pairs]]) -> None:
        """Upload (layer, experts and slots) before a pass.

        Steps of a prompt that are enqueued may read what the victims' slots hold, so the uploads
        wait for them. The compute stream waits for the uploads; the host does not.
        """
        if self._enqueued:
            C.ggml_backend_event_record(self._enqueued.ptr, self._device.compute.ptr)
            C.ggml_backend_event_wait(self._device.upload.ptr, self._enqueued.ptr)
        for il, pairs in exchanged:
            self.send(il, self._banks.layer(il), pairs)
        if self._uploaded:
            C.ggml_backend_event_record(self._uploaded.ptr, self._device.upload.ptr)
            C.ggml_backend_event_wait(self._device.compute.ptr, self._uploaded.ptr)

    def promote(self, il: int, pairs: Pairs) -> None:
        """Upload experts into slots of their layer in the background, until `wait`."""
        self.send(il, self._banks.layer(il), pairs)
        if self._uploaded:
            C.ggml_backend_event_record(self._uploaded.ptr, self._device.upload.ptr)

    def wait(self) -> None:
        """Wait for the last uploads that `exchange` or `promote` enqueued."""
        if self._uploaded:
            self._uploaded.wait()

    def add(self, il: int, pairs: Pairs, ids: Ids, graph: BuiltGraph) -> None:
        """Upload experts into slots of their layer and launch `add_uploaded` over them.

        ids: I32 [n_tokens * n_expert_used], the pass's choice; -1 in rows that do not count.
        """
        self.send(il, self._banks.layer(il), pairs)
        self._launch(il, 0, pairs, ids, graph, ffi.NULL)

    def add_staged(
        self, il: int, experts: Sequence[int], ids: Ids, graphs: Sequence[BuiltGraph]
    ) -> None:
        """Upload experts to the staging banks in turn; launch the `add_uploaded` of each bank."""
        for wave, start in enumerate(range(0, len(experts), N_STAGING), 1):
            pairs = list(zip(experts[start : start + N_STAGING], range(N_STAGING)))
            turn, self._staging_turn = self._staging_turn, 1 - self._staging_turn
            event = self._staging_free[turn]
            free = event.ptr if event else ffi.NULL
            if event:  # the graph that read the bank last has ended
                C.ggml_backend_event_wait(self._device.upload.ptr, free)
            self.send(il, self._banks.staging(il, turn), pairs)
            self._launch(il, wave, pairs, ids, graphs[turn], free)

    def _launch(
        self, il: int, wave: int, pairs: Pairs, ids: Ids, graph: BuiltGraph, free: Any
    ) -> None:
        """Launch `add_uploaded` after the uploads; free: the event to record after it.

        wave: the host row that carries the slots.
        """
        slot_of = np.full(self._n_expert + 1, -1, dtype=np.int32)  # the last for ids of -1
        experts, slots = zip(*pairs)
        slot_of[list(experts)] = slots
        self._slots.array[wave, : ids.size] = slot_of[ids]
        uploaded = self._uploaded.ptr if self._uploaded else ffi.NULL
        status = C.mg_upload_launch(
            self._device.compute.ptr, self._device.upload.ptr, graph.outputs,
            self._slots.addresses[wave], 4 * ids.size, free, uploaded, graph.graph,
        )  # fmt: skip
        if status:
            self._device.check(status, f"the missing experts of layer {il}")

    def close(self) -> None:
        """Free the events and the host rows."""
        for handle in (self._slots, self._uploaded, self._enqueued, *self._staging_free):
            if handle:
                handle.close()
