"""K and V of a drafter's layers: what sequences hold, as rings, and the rows of one block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..ggml.device import Device
from ..ggml.handles import Context
from ..ggml.lib import C
from ..ggml.memory import place
from ..ggml.ops import F16, Builder, Tensor
from ..modelfile.drafter import DFlashHParams
from ..units import round_up
from .layout import PAGE

Mask = npt.NDArray[np.float16]


@dataclass(frozen=True)
class RingShape:
    """Rows of a sequence in layers that reach back equally far.

    The first n_block rows are for the block that is drafted. Position p is in row
    n_block + p % n_cells, so the ring holds the last n_cells positions. window: positions that a
    row of the block reaches back, its own included; 0 for all that is held.
    """

    window: int
    n_block: int
    n_rows: int

    @classmethod
    def of(cls, window: int, n_block: int, n_ctx: int) -> RingShape:
        """Return a ring for a window in a context of n_ctx positions."""
        needed = min(window or n_ctx, n_ctx)
        return cls(window, n_block, round_up(n_block + needed, PAGE))

    @property
    def n_cells(self) -> int:
        """Positions that the ring holds."""
        return self.n_rows - self.n_block

    def length(self, n_past: int) -> int:
        """Return how many rows a graph reads to see n_past positions, of few different numbers."""
        n = self.n_block + min(n_past, self.n_cells)
        step = max(PAGE, (1 << (n - 1).bit_length()) // 8)
        return min(self.n_rows, round_up(n, step))

    def rows(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the rows of positions."""
        return self.n_block + places % self.n_cells

    def fill_mask(self, mask: Mask, held: Span, is_causal: bool) -> None:
        """Fill the mask of a block of n rows, numpy shape [n, length]."""
        n = len(mask)
        mask[:] = -np.inf
        block = mask[:, :n]
        reach = self.window or n + 1
        ahead = np.arange(n)[:, None] - np.arange(n)
        block[(ahead < reach) & ((ahead >= 0) | (not is_causal))] = 0.0
        first = max(held.first, held.high - self.n_cells, 0)
        if not self.window or held.n_past + n - self.window < first:
            self._show(mask, first, held.n_past)
            return
        for i in range(n):
            self._show(mask[i : i + 1], max(first, held.n_past + i + 1 - self.window), held.n_past)

    def _show(self, rows: Mask, first: int, end: int) -> None:
        """Let rows of the mask see the positions from first up to end."""
        if first >= end:
            return
        at, stop = first % self.n_cells, (end - 1) % self.n_cells + 1
        if at < stop:
            rows[:, self.n_block + at : self.n_block + stop] = 0.0
        else:
            rows[:, self.n_block + at : self.n_rows] = 0.0
            rows[:, self.n_block : self.n_block + stop] = 0.0


@dataclass
class Span:
    """Positions of a sequence that a drafter has seen: from first up to n_past.

    high: the most positions that it had; a ring has lost what is n_cells or more before.
    """

    first: int = 0
    n_past: int = 0
    high: int = 0

    def restart(self, n_past: int) -> None:
        """Begin at a position, with nothing before it."""
        self.first = self.n_past = self.high = n_past

    def grow(self, n: int) -> None:
        """Take n more positions."""
        self.n_past += n
        self.high = max(self.high, self.n_past)

    def truncate(self, n_past: int) -> None:
        """Forget the positions from n_past on."""
        if n_past < self.first:
            self.restart(n_past)
        self.n_past = min(self.n_past, n_past)


def ring_shapes(hp: DFlashHParams, n_ctx: int) -> tuple[RingShape, ...]:
    """Return the different rings of a drafter's layers."""
    windows = dict.fromkeys(hp.window(il) for il in range(hp.n_layer))
    return tuple(RingShape.of(window, hp.block_size, n_ctx) for window in windows)


def draft_ring_bytes(hp: DFlashHParams, n_ctx: int, n_seq: int) -> int:
    """Return the device bytes of `DraftRings`."""
    rows = {shape.window: shape.n_rows for shape in ring_shapes(hp, n_ctx)}
    n_rows = sum(rows[hp.window(il)] for il in range(hp.n_layer))
    return 2 * 2 * hp.n_embd_gqa * n_rows * n_seq


class DraftRings:
    """Device memory for K and V of every layer of a drafter, of n_seq sequences; F16.

    shapes: the different rings. kind: of each layer, which of them. spans: what each sequence has.
    """

    def __init__(self, device: Device, hp: DFlashHParams, n_ctx: int, n_seq: int) -> None:
        """n_ctx: most positions that a layer without a window sees.

        Raises:
            OutOfDeviceMemory: they do not fit.
        """
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
        return tuple(shape.length(self.spans[slot].n_past) for shape in self.shapes)

    def rows(self, kind: int, slot: int, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """Return the rows of positions of a sequence in the tensors of a kind's layers."""
        shape = self.shapes[kind]
        return (slot * shape.n_rows + shape.rows(places)).astype(np.int32)

    def view(self, b: Builder, cache: Tensor, slot: int, il: int, n: int) -> Tensor:
        """View the first n rows of a sequence in K or V of layer il: [n_embd_gqa, n]."""
        first = slot * self.shapes[self.kind[il]].n_rows
        return b.view(cache, (cache.ne[0], n), (self._row,), first * self._row)

    def fill_masks(self, masks: Sequence[Mask], slot: int, is_causal: bool) -> None:
        """Fill the mask of each ring for the next block of a sequence."""
        for shape, mask in zip(self.shapes, masks):
            shape.fill_mask(mask, self.spans[slot], is_causal)

    def close(self) -> None:
        """Free the memory."""
        self._buffer.close()
        self._context.close()
