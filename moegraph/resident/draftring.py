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
from ..ggml.handles import Context
from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import F16, Builder, Tensor
from ..units import round_up
from .draftlayout import RING_PAGE, Mask, RingShape, Span, ring_shapes

# Rows that graphs read at least where the device captures each graph, which takes long. Attention
# to so many takes no time that could be measured, and a short text needs no second graph.
_LEAST = 1024


class DraftRings:
    """Device memory for K and V of every layer of a drafter, of n_seq sequences; F16.

    shapes: the different rings. kind: of each layer, which of them. spans: what each sequence has.
    """

    def __init__(self, device: Device, hp: DFlashHParams, n_ctx: int, n_seq: int) -> None:
        """n_ctx: most positions that a layer without a window sees."""
        self._device = device
        self._least = _LEAST if device.can.streams else 0
        self.shapes = ring_shapes(hp, n_ctx)
        windows = [shape.window for shape in self.shapes]
        self.kind = [windows.index(hp.window(il)) for il in range(hp.n_layer)]
        self.spans = [Span() for _ in range(n_seq)]
        self._row = 2 * hp.n_embd_gqa
        self._context = Context(2 * hp.n_layer)
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        offsets, size = [], 0
        for il in range(hp.n_layer):
            for tensors in (self.k, self.v):
                n_rows = self.shapes[self.kind[il]].n_rows * n_seq
                tensors.append(C.ggml_new_tensor_2d(self._context.ptr, F16, hp.n_embd_gqa, n_rows))
                offsets.append(size)
                size = round_up(size + self._row * n_rows, device.alignment)
        self._buffer = device.buffer(size, "K and V of the drafter", "lower -c or use --spec off")
        # masked rows must be finite
        C.ggml_backend_buffer_clear(self._buffer.ptr, 0)
        for tensor, offset in zip((t for kv in zip(self.k, self.v) for t in kv), offsets):
            place(self._buffer, tensor, offset)
        self.n_bytes = size

    def lengths(self, slot: int) -> tuple[int, ...]:
        """Return how many rows of each ring a graph reads to draft for a sequence."""
        n_past = self.spans[slot].n_past
        return tuple(shape.length(n_past, self._least) for shape in self.shapes)

    @property
    def full_lengths(self) -> tuple[int, ...]:
        """Rows of each ring once it is full."""
        return tuple(shape.n_rows for shape in self.shapes)

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
            for part in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
                at, n_bytes = int(part[0]) * self._row, len(part) * self._row
                for cache in (self.k[il], self.v[il]):
                    C.ggml_backend_tensor_memset(cache, 0, at, n_bytes)

    def block_rows(self, kind: int, slots: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.int64]:
        """Return the rows of blocks of sequences in tensors of a kind: [n, n_slots]."""
        return slots * self.shapes[kind].n_rows + np.arange(n)[:, None]

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

    def fill_masks(self, masks: Sequence[Mask], slot: int, is_causal: bool) -> None:
        """Fill the mask of each ring for the next block of a sequence."""
        for kind, (shape, mask) in enumerate(zip(self.shapes, masks)):
            shape.fill_mask(mask, self.spans[slot].of_ring(kind), is_causal)

    def first_kept(self, slot: int, kind: int) -> int:
        """Return the first position of a sequence that a ring still has."""
        span = self.spans[slot].of_ring(kind)
        return max(span.first, span.high - self.shapes[kind].n_cells, 0)

    def close(self) -> None:
        """Free the memory."""
        self._buffer.close()
        self._context.close()


Parts = list[npt.NDArray[np.uint8]]


def row_widths(rings: DraftRings) -> list[int]:
    """Return the bytes of a position in K and in V of each layer."""
    return [tensor.nb[1] for tensor, _ in _tensors(rings)]


def take_rows(device: Device, rings: DraftRings, slot: int, first: int, n: int) -> Parts:
    """Copy rows of n positions of a sequence, and wait: K and V of each layer, U8 [m, bytes].

    m: the last of these positions that the layer's ring has. None waits for K and V.
    """
    device.synchronize()
    parts, span = [], rings.spans[slot]
    for tensor, kind in _tensors(rings):
        shape, end, size = rings.shapes[kind], first + n, tensor.nb[1]
        start = max(first, min(end, rings.first_kept(slot, kind)))
        part = np.empty((end - start if end <= span.n_past else 0, size), np.uint8)
        for at, row, m in _runs(shape, start, len(part)):
            target = ffi.from_buffer(part[at : at + m])
            row += slot * shape.n_rows
            C.ggml_backend_tensor_get(tensor, target, row * size, m * size)
        parts.append(part)
    device.check_alive()
    return parts


def put_rows(
    device: Device, rings: DraftRings, slot: int, n_kept: int, n_past: int,
    pieces: Sequence[tuple[int, int, Parts]],
) -> None:  # fmt: skip
    """Have the rings of a sequence of n_past positions be right, from copies of rows, and wait.

    n_kept: its first positions, which the rings are right about. pieces: the first position,
    the number of positions, and the copy of each run, in order. Rows before a gap are of no use.
    """
    stream, firsts = device.compute.ptr, [0] * len(rings.shapes)
    for i, (tensor, kind) in enumerate(_tensors(rings)):
        shape = rings.shapes[kind]
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
            start = min(start, rings.first_kept(slot, kind), n_kept)
        for at, part in reversed(held):
            skipped = min(len(part), max(0, n_past - shape.n_cells - at))
            for source, row, m in _runs(shape, at + skipped, len(part) - skipped):
                rows = ffi.from_buffer(part[skipped + source : skipped + source + m])
                row += slot * shape.n_rows
                C.ggml_backend_tensor_set_async(stream, tensor, rows, row * size, m * size)
        if start > n_past - shape.n_cells:
            firsts[kind] = max(firsts[kind], start)
    device.synchronize()
    span = rings.spans[slot]
    span.restart(n_past)
    span.first, span.firsts = min(firsts), tuple(firsts)


def _tensors(rings: DraftRings) -> Iterator[tuple[Tensor, int]]:
    """Yield K and V of each layer, and the kind of its ring."""
    for il, kind in enumerate(rings.kind):
        for tensor in (rings.k[il], rings.v[il]):
            yield tensor, kind


def _runs(shape: RingShape, first: int, n: int) -> Iterator[tuple[int, int, int]]:
    """Yield (index, row, rows) of the parts of n positions whose rows are consecutive."""
    at = 0
    while at < n:
        cell = (first + at) % shape.n_cells
        m = min(n - at, shape.n_cells - cell)
        yield at, shape.n_block + cell, m
        at += m
