"""Copies rows from one stage's device to the next one's, in the order of both streams;
and the layer outputs that a drafter wants to the last stage, where drafters are."""

from __future__ import annotations

import os

from ..ggml.device import Device
from ..ggml.handles import Owner
from ..ggml.lib import C
from ..ggml.memory import Block
from ..ggml.ops import Tensor
from ..graphs.inputs import HiddenRows
from ..resident.stage import Stage
from .sweep_batch import HiddenReader

# Bytes of a piece of a long copy; one goes to the second device while the next leaves the first.
_PIECE = 4 << 20
_N_PIECES = 2
# ggml lets CUDA devices read each other's memory only if this is set: some mainboards fail at it.
PEERS = "GGML_CUDA_P2P"


def is_direct(source: Device, to: Device) -> bool:
    """Return whether rows are copied without host memory between."""
    return to.can_wait_for(source) and (source.name == to.name or PEERS in os.environ)


class Boundary(Owner):
    """Copies from one device to another.

    That is done directly (`is_direct`), or else through host memory, pinned if a driver can pin it.
    If each device can wait for the other's events, the host waits for neither. Otherwise it waits
    until the first device has computed what is copied.
    """

    def __init__(self, source: Device, to: Device) -> None:
        """Allocate the memory between."""
        self._source, self._to = source, to
        self._follows = to.can_wait_for(source)
        self._between: Tensor | None = None  # on the second device, for direct copies
        if is_direct(source, to):
            shapes, what = {"rows": (_PIECE // 4, _N_PIECES)}, "rows of another device"
            self._between = self.own(Block(to, shapes, what, "lower -c")).tensors["rows"]
        else:
            owner = to if to.can.own_memory else source
            self._host = self.own(owner.host_buffer(_N_PIECES * _PIECE))
        self._left = [self.own(source.event()) for _ in range(_N_PIECES)]
        self._arrived = [self.own(to.event()) for _ in range(_N_PIECES)]
        self._turn = 0

    def line(self) -> str:
        """Return how rows are copied, in words."""
        names = f"{self._source.name} to {self._to.name}"
        if self._between is not None:
            return f"{names}: rows are copied directly"
        if self._follows:
            return f"{names}: rows are copied through pinned host memory; {PEERS}=1 avoids that"
        return f"{names}: rows are copied through host memory"

    def copy(
        self, source: Tensor, to: Tensor, n_bytes: int, source_at: int = 0, to_at: int = 0
    ) -> None:
        """Enqueue the copy of n_bytes of a tensor, after what its device computes now.

        source_at, to_at: the first byte in each tensor.
        """
        for at in range(0, n_bytes, _PIECE):
            n = min(_PIECE, n_bytes - at)
            turn, self._turn = self._turn, (self._turn + 1) % _N_PIECES
            arrived = self._arrived[turn]  # what the memory between held last
            if arrived and self._follows:
                C.ggml_backend_event_wait(self._source.compute.ptr, arrived.ptr)
            elif arrived:
                arrived.wait()
            if self._between is not None:
                between, middle = self._between, turn * _PIECE
                first, second = self._source.compute.ptr, self._to.compute.ptr
                C.mg_copy_across(first, second, source, source_at + at, between, middle, n)
                # on its own stream, because what the second device computes may still read `to`
                C.mg_copy_bytes(second, between, middle, to, to_at + at, n)
            else:
                self._copy(turn, source, source_at + at, to, to_at + at, n)
            if arrived:
                C.ggml_backend_event_record(arrived.ptr, self._to.compute.ptr)

    def _copy(
        self, turn: int, source: Tensor, source_at: int, to: Tensor, to_at: int, n: int
    ) -> None:
        first, second = self._source.compute.ptr, self._to.compute.ptr
        host, left = self._host.address(turn * _PIECE), self._left[turn]
        C.ggml_backend_tensor_get_async(first, source, host, source_at, n)
        if left and self._follows:
            C.ggml_backend_event_record(left.ptr, first)
            C.ggml_backend_event_wait(second, left.ptr)
        else:
            C.ggml_backend_synchronize(first)
            self._source.check_alive()
        C.ggml_backend_tensor_set_async(second, to, host, to_at, n)

    def close(self) -> None:
        """Wait for both devices, then free the memory."""
        self._source.synchronize()
        self._to.synchronize()
        super().close()


class Relay(Owner):
    """Copies hidden states of a stage to the last: of passes to its own, of prompts to memory."""

    def __init__(self, stage: Stage, last: Stage, n_rows: int) -> None:
        """n_rows: of the longest part of a prompt."""
        self._stage, self._last = stage, last
        self._rows = self.own(HiddenRows(last, n_rows)).all
        self._boundary = self.own(Boundary(stage.device, last.device))

    def bring(self, n_rows: int) -> None:
        """Enqueue the copy of the kept rows of a pass that was launched in the stage."""
        mine, its = self._stage.hidden_states, self._last.hidden_states
        if n_rows > mine.n_rows:
            return  # the pass keeps none
        for il in mine.layers:
            size = 4 * self._stage.hp.n_embd * n_rows
            self._boundary.copy(mine.words, its.words, size, mine.offset(il), its.offset(il))

    def relayed(self, reader: HiddenReader) -> HiddenReader:
        """Return what calls a reader of a prompt with a copy of its rows."""

        def call(rows: Tensor, row: int, n: int, first: int) -> None:
            size = 4 * self._stage.hp.n_embd
            self._boundary.copy(rows, self._rows, size * n, size * row, size * row)
            reader(self._rows, row, n, first)

        return call
