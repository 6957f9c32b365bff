"""Where a drafter keeps the positions of a sequence: rings, and the masks for their rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..arch.dflash import DFlashHParams
from ..units import round_up
from .layout import PAGE

# Rows of a page of a ring, where attention reads it through a list of pages.
RING_PAGE = 16
Mask = npt.NDArray[np.float16]
Ints = npt.NDArray[np.int32]
# Numbers that lists of pages are made of; no ring has half as many pages.
_COUNT: Ints = np.arange(1 << 17, dtype=np.int32)


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
        needed, n_block = min(window or n_ctx, n_ctx), round_up(n_block, RING_PAGE)
        return cls(window, n_block, round_up(n_block + needed, PAGE))

    @property
    def n_cells(self) -> int:
        """Positions that the ring holds."""
        return self.n_rows - self.n_block

    def length(self, n_past: int, least: int = 0) -> int:
        """Return how many rows a graph reads to see n_past positions, of few different numbers.

        least: rows that it reads if the ring has so many.
        """
        n = max(self.n_block + min(n_past, self.n_cells), least)
        step = max(PAGE, (1 << (n - 1).bit_length()) // 8)
        return min(self.n_rows, round_up(n, step))

    def rows(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the rows of positions."""
        return self.n_block + places % self.n_cells

    def list_pages(self, out: Ints, held: Span, n: int, base: int) -> tuple[int, Ints]:
        """Fill in what a block of n rows sees, for attention that reads pages of RING_PAGE rows.

        out: I32 numpy, gets the pages; base: that of the first row of the sequence. Returns how
        many rows of these pages, from the first on, are positions that the block sees, and after
        how many rows behind them the others are: positions of a page that is not seen whole, and
        the block. Every row sees as far back as the first.
        """
        first = max(held.first, held.high - self.n_cells, 0)
        if self.window:
            first = max(first, held.n_past + 1 - self.window)
        begin = min(round_up(first, RING_PAGE), max(held.n_past, first))
        n_seen = held.n_past - begin if begin < held.n_past else 0
        n_whole, n_around = -(-n_seen // RING_PAGE), self.n_cells // RING_PAGE
        n_block = self.n_block // RING_PAGE
        at, cells = begin // RING_PAGE % n_around, base + n_block
        out[:n_whole] = _COUNT[at : at + n_whole] + cells
        if at + n_whole > n_around:  # around the end of the ring
            out[n_around - at : n_whole] -= n_around
        out[n_whole : n_whole + n_block] = _COUNT[:n_block] + base
        others = _COUNT[:n] + (RING_PAGE * n_whole - n_seen)
        if first < begin:
            out[n_whole + n_block] = cells + first // RING_PAGE % n_around
            at = RING_PAGE * (n_whole + n_block) + first % RING_PAGE - n_seen
            others = np.concatenate((_COUNT[: begin - first] + at, others))
        return n_seen, others

    def fill_mask(self, mask: Mask, held: Span, is_causal: bool) -> None:
        """Fill the mask of a block of n rows, numpy shape [n, length]."""
        n = len(mask)
        first = max(held.first, held.high - self.n_cells, 0)
        if not self.window and first == 0:  # the usual case of a long context, written once
            seen = self.n_block + held.n_past
            mask[:, :n] = 0.0
            mask[:, n : self.n_block] = mask[:, seen:] = -np.inf
            mask[:, self.n_block : seen] = 0.0
            if is_causal:
                mask[:, :n][np.triu_indices(n, 1)] = -np.inf
            return
        mask[:] = -np.inf
        block = mask[:, :n]
        reach = self.window or n + 1
        ahead = np.arange(n)[:, None] - np.arange(n)
        block[(ahead < reach) & ((ahead >= 0) | (not is_causal))] = 0.0
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

    high: the most positions that it had; a ring has lost what is n_cells or more before. firsts:
    where each ring begins, if some begin later than `first`.
    """

    first: int = 0
    n_past: int = 0
    high: int = 0
    firsts: tuple[int, ...] = ()

    def restart(self, n_past: int) -> None:
        """Begin at a position, with nothing before it."""
        self.first = self.n_past = self.high = n_past
        self.firsts = ()

    def of_ring(self, kind: int) -> Span:
        """Return what a ring has."""
        return replace(self, first=max(self.first, self.firsts[kind])) if self.firsts else self

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
