"""Fetches experts before the graphs that may miss them: what a token chose when it last occurred.

    compute: steps 0 | step 1 ........ layer 5 | layer 6 | ... each waits for what comes to it
    upload:          experts of layer 5, those of layer 6 ...

The tokens of a pass are known before it is launched, drafted ones too. What they chose last time is
right for half of the experts that a pass misses (docs/benchmarks/predict.md). Such experts get the
slots of lowest score in their layers, and the tables of the pass say that they come. The upload
stream copies them in the order of layers, beside the graphs. They stay, chosen or not.

A graph waits for copies that are enqueued before it is launched, or it might wait forever: the
driver may let a launch wait until the device is idle. The layers of the first graph get nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..ggml.handles import Owner
from ..ggml.lib import C, ffi
from ..kinds import MAX_AHEAD
from ..resident.stage import Stage
from .tables import SlotTables


class AheadFetch(Owner):
    """Plans and enqueues copies."""

    def __init__(self, stage: Stage, tables: SlotTables) -> None:
        hp, banks, store, n_layer = stage.hp, stage.banks, stage.store, len(stage.layers)
        self._device, self._tables, self._first = stage.device, tables, stage.layers.start
        self._n_expert, self._n_used, self._n_victims = (
            hp.n_expert,
            hp.n_expert_used,
            banks.n_victims,
        )
        # an id + 1, 0: not known; memory of tokens that never occur is never touched
        self._known = np.zeros((hp.n_vocab, n_layer, hp.n_expert_used), np.uint16)
        self._layers = ffi.new("struct mg_ahead_layer[]", n_layer)
        for il in store.rows:
            at, packing = il - self._first, store.packing(il)
            row = ffi.from_buffer("int32_t[]", tables.rows[at])
            self._layers[at] = (
                row, banks.layer(il).to_fill, store.rows[il].data, packing.stride, packing.n_bytes,
                banks.there[il],
            )  # fmt: skip
        self._found = np.zeros((n_layer * MAX_AHEAD, 3), np.int32)
        self._counts = np.zeros(hp.n_expert, np.int32)
        one = self.own(stage.device.host_buffer(4, must_pin=True))
        one.array[:4].view(np.int32)[:] = 1
        self._one = ffi.cast("int32_t *", one.address(0))
        self._copied = self.own(stage.device.event())
        self._n = 0  # found in this pass

    @property
    def sent(self) -> list[tuple[int, int, int]]:
        """Return (il, expert, slot) of what the pass fetches ahead."""
        found = self._found[: self._n].tolist()
        return [(at + self._first, expert, slot) for at, expert, slot in found]

    def plan(self, tokens: npt.NDArray[np.int32], first: int) -> bool:
        """Choose what comes for tokens I32 [n] in the layers from `first` on, if anything.

        The tables that are sent next say it.
        """
        tokens = np.ascontiguousarray(tokens)
        self._n = C.mg_plan_ahead(
            self._layers, len(self._layers), first - self._first,
            ffi.from_buffer("uint16_t[]", self._known), ffi.from_buffer("int32_t[]", tokens),
            len(tokens), self._n_used, self._n_expert, self._n_victims,
            ffi.from_buffer("int32_t[]", self._counts), ffi.from_buffer("int32_t[]", self._found),
        )  # fmt: skip
        if self._n:
            self._tables.changed()
        return self._n > 0

    def send(self) -> int:
        """Enqueue the copies, before the graphs that wait for them are launched; return bytes."""
        upload = self._device.upload.ptr
        found = ffi.from_buffer("int32_t[]", self._found)
        n_bytes = C.mg_send_ahead(upload, self._layers, found, self._n, self._one)
        if self._copied:
            C.ggml_backend_event_record(self._copied.ptr, upload)
        return int(n_bytes)

    def end(self, tokens: npt.NDArray[np.int32], ids: npt.NDArray[np.int32]) -> None:
        """Note what tokens chose, and have what is enqueued next wait for all copies.

        ids: I32 numpy [n_layer, rows, n_expert_used], below 0 for what is not known.
        """
        self._known[tokens] = np.maximum(ids[:, : len(tokens)] + 1, 0).transpose(1, 0, 2)
        if self._n and self._copied:
            C.ggml_backend_event_wait(self._device.compute.ptr, self._copied.ptr)
        self._n = 0

    def note(self, il: int, tokens: npt.NDArray[np.int32], ids: npt.NDArray[np.int32]) -> None:
        """Note what tokens of a prompt chose in layer il: I32 numpy [n_tokens * n_expert_used]."""
        self._known[tokens, il - self._first] = ids.reshape(len(tokens), -1) + 1
