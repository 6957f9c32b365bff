"""K and V of a drafter's layers: what sequences hold, as rings, and the rows of one block.

K and V of a position follow from that position alone, as those of the target do. So they are copied
to host memory with the target's rows, as far as the rings still have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ..arch.dflash import DFlashHParams
from ..ggml.device import Device
from ..ggml.handles import Owner
from ..ggml.lib import C, ffi
from ..ggml.memory import Block
from ..ggml.ops import F16, Builder, Tensor
from .draftlayout import RING_PAGE, Span, ring_shapes
from .kvpool import runs_of

Parts = list[npt.NDArray[np.uint8]]
# Rows that graphs read at least where the device captures each graph, which takes long. Attention
# to so many takes no time that could be measured, and a short text needs no second graph.
_LEAST = 1024


class DraftRings(Owner):
    """Device memory for K and V of every layer of a drafter, of n_seq sequences; F16.

    shapes: the different rings. full_lengths: rows of each once it is full. kind: of each layer,
    which of them. spans: what each sequence has.
    """

    def __init__(self, device: Device, hp: DFlashHParams, n_ctx: int, n_seq: int) -> None:
        """n_ctx: most positions that a layer without a window sees."""
        self._device = device
        self._least = _LEAST if device.can.streams else 0
        self.shapes = ring_shapes(hp, n_ctx)
        self.full_lengths = tuple(shape.n_rows for shape in self.shapes)
        windows = [shape.window for shape in self.shapes]
        self.kind = [windows.index(hp.window(il)) for il in range(hp.n_layer)]
        self.spans = [Span() for _ in range(n_seq)]
        self._row = 2 * hp.n_embd_gqa
        shapes = {
            (part, il): (hp.n_embd_gqa, self.shapes[kind].n_rows * n_seq, F16)
            for il, kind in enumerate(self.kind)
            for part in "kv"
        }
        what, remedy = "K and V of the drafter", "lower -c or use --spec off"
        block = self.own(Block(device, shapes, what, remedy))  # zeros: masked rows must be finite
        self.k, self.v = ([block.tensors[part, il] for il in range(hp.n_layer)] for part in "kv")
        self.n_bytes = block.n_bytes

    def lengths(self, slot: int) -> tuple[int, ...]:
        """Return how many rows of each ring a graph reads to draft for a sequence."""
        n_past = self.spans[slot].n_past
        return tuple(shape.length(n_past, self._least) for shape in self.shapes)

    def rows(self, kind: int, slot: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Return the rows of positions of a sequence in the tensors of a kind's layers."""
        shape = self.shapes[kind]
        return (slot * shape.n_rows + shape.rows(places)).astype(np.int32)

    def spare_row(self, kind: int, slot: int) -> int:
        """Return a row that padding may overwrite: the next block does, before it is read."""
        return slot * self.shapes[kind].n_rows

    def restart(self, slot: int, n_past: int) -> None:
        """Have a sequence begin at a position, with nothing before it."""
        self._clear(slot, self.spans[slot].first)
        self.spans[slot].restart(n_past)

    def truncate(self, slot: int, n_past: int) -> None:
        """Forget the positions of a sequence from n_past on."""
        self._clear(slot, max(n_past, self.spans[slot].first))
        self.spans[slot].truncate(n_past)

    def _clear(self, slot: int, first: int) -> None:
        """Write zeros over the positions that a sequence has from first on.

        A prompt that failed may have left NaN there. A masked row must be finite, because its
        weight of zero times NaN is NaN.
        """
        end = self.spans[slot].n_past
        if first >= end:
            return
        self._device.synchronize()
        for il, kind in enumerate(self.kind):
            shape = self.shapes[kind]
            rows = self.rows(kind, slot, np.arange(max(first, end - shape.n_cells), end))
            for _, row, n in runs_of(rows):
                for cache in (self.k[il], self.v[il]):
                    C.ggml_backend_tensor_memset(cache, 0, row * self._row, n * self._row)

    def list_pages(
        self, out: npt.NDArray[np.int32], kind: int, slot: int, n: int
    ) -> tuple[int, npt.NDArray[np.int32]]:
        """Fill in what the next block of a sequence sees in a ring (`RingShape.list_pages`)."""
        shape = self.shapes[kind]
        base = slot * (shape.n_rows // RING_PAGE)
        return shape.list_pages(out, self.spans[slot].of_ring(kind), n, base)

    def view(self, b: Builder, cache: Tensor, slot: int, il: int, n: int) -> Tensor:
        """View the first n rows of a sequence in K or V of layer il: [n_embd_gqa, n]."""
        first = slot * self.shapes[self.kind[il]].n_rows
        return b.view(cache, (cache.ne[0], n), (self._row,), first * self._row)

    def first_kept(self, slot: int, kind: int) -> int:
        """Return the first position of a sequence that a ring still has."""
        span = self.spans[slot].of_ring(kind)
        return max(span.first, span.high - self.shapes[kind].n_cells, 0)

    @property
    def row_widths(self) -> list[int]:
        """Return the bytes of a position in K and in V of each layer."""
        return [tensor.nb[1] for tensor, _ in self._tensors()]

    def take_rows(self, slot: int, first: int, n: int) -> Parts:
        """Copy rows of n positions of a sequence, and wait: K and V of each layer, U8 [m, bytes].

        m: the last of these positions that the layer's ring has. None waits for K and V.
        """
        self._device.synchronize()
        parts, span = [], self.spans[slot]
        for tensor, kind in self._tensors():
            end, size = first + n, tensor.nb[1]
            start = max(first, min(end, self.first_kept(slot, kind)))
            part = np.empty((end - start if end <= span.n_past else 0, size), np.uint8)
            for at, row, m in runs_of(self.rows(kind, slot, start + np.arange(len(part)))):
                target = ffi.from_buffer(part[at : at + m])
                C.ggml_backend_tensor_get(tensor, target, row * size, m * size)
            parts.append(part)
        self._device.check_alive()
        return parts

    def put_rows(
        self, slot: int, n_kept: int, n_past: int, pieces: Sequence[tuple[int, int, Parts]]
    ) -> None:
        """Have the rings of a sequence of n_past positions be right, from copies of rows, and wait.

        n_kept: its first positions, which the rings are right about. pieces: first position, number
        of positions, and the copy of each run, in order. Rows before a gap are of no use.
        """
        stream, firsts = self._device.compute.ptr, [0] * len(self.shapes)
        for i, (tensor, kind) in enumerate(self._tensors()):
            shape = self.shapes[kind]
            size, start, held = tensor.nb[1], n_past, []
            for at, n, parts in reversed(pieces):
                if at + n != start:
                    break
                part = parts[i] if i < len(parts) else np.empty((0, size), np.uint8)
                start = at + n - len(part)
                held.append((start, part))
                if len(part) < n:
                    break
            if start <= n_kept:
                start = min(start, self.first_kept(slot, kind), n_kept)
            for at, part in reversed(held):
                skipped = min(len(part), max(0, n_past - shape.n_cells - at))
                places = at + np.arange(skipped, len(part))
                for source, row, m in runs_of(self.rows(kind, slot, places)):
                    rows = ffi.from_buffer(part[skipped + source : skipped + source + m])
                    C.ggml_backend_tensor_set_async(stream, tensor, rows, row * size, m * size)
            if start > n_past - shape.n_cells:
                firsts[kind] = max(firsts[kind], start)
        self._device.synchronize()
        span = self.spans[slot]
        span.restart(n_past)
        span.first, span.firsts = min(firsts), tuple(firsts)

    def _tensors(self) -> Iterator[tuple[Tensor, int]]:
        """Yield K and V of each layer, and the kind of its ring."""
        for il, kind in enumerate(self.kind):
            for tensor in (self.k[il], self.v[il]):
                yield tensor, kind
