"""Where the rows of a pass find the positions of their windows: which columns of a mask are which.

Attention in layers with a window reads some positions of each sequence, gathered from its ring.
Usually these are whole pages, from the one in which the first window begins.

On the CPU, ggml sums the positions of a single row of an F16 cache in several parts, from 512
positions on, and the bits depend on where the parts of all positions would begin. So the columns
of such a row have parts of their own, with the same positions, as far as they are in the window,
and hidden columns after them. There is one part before, unless the first is the very first: there
ggml adds the sink. Source: ggml/src/ggml-cpu/ops.cpp, ggml_compute_forward_flash_attn_ext_f16.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..arch.inputs import PassShape
from ..resident.layout import PAGE
from ..resident.state import State
from ..units import round_up

_SPLIT = 512  # fewest columns that ggml divides into parts


class Window:
    """The window of a stage's layers, and the columns of passes.

    pages: of the rings, for each sequence and position, I32 numpy [n_seq, n_pages].
    """

    def __init__(self, state: State) -> None:
        self._state, self.n, self.ring = state, state.window, state.ring
        n, (n_seq, n_pages) = state.ring // PAGE, state.pool.table.shape
        pages = np.arange(n_seq)[:, None] * n + np.arange(n_pages) % n
        self.pages: npt.NDArray[np.int32] = pages.astype(np.int32)

    def is_split(self, shape: PassShape) -> bool:
        """Return whether the columns of a pass are in parts."""
        return shape.n_tokens == 1 and self._state.n_attention_parts > 0 and not shape.is_paged

    def columns(self, shape: PassShape) -> tuple[int, int]:
        """Return how many columns a pass has for each sequence, and in how many parts."""
        if not self.is_split(shape):
            n = round_up(self.n - 1 + shape.n_seq_tokens, PAGE) + PAGE
            return min(n, shape.n_kv), self._state.n_attention_parts
        n_kv, n_parts = shape.n_kv, self._state.n_attention_parts
        each = -(-n_kv // n_parts)
        n = min(n_parts, (self.n - 2) // each + 3)
        size = max(min(each, self.n), -(-_SPLIT // n))
        return (n_kv, n_parts) if n * size >= n_kv else (n * size, n)  # n * size is _SPLIT or more

    def most_columns(self, n_rows: int, n_seqs: int) -> int:
        """Return a bound on the columns of passes of n_rows rows over n_seqs sequences together."""
        least = n_rows + n_seqs * (self.n + 2 * PAGE)
        return max(least, 4 * self.n + 2 * _SPLIT) if self._state.n_attention_parts else least

    def most_bytes(self, n_ubatch: int, n_rows: int) -> int:
        """Return a bound on the bytes of mask, rows and indices of a pass of n_rows rows.

        n_ubatch: most rows of a sequence.
        """
        n = n_ubatch + self.n + 2 * PAGE
        return 2 * n * n_rows + 6 * self.most_columns(n_rows, self._state.n_seq) + 8 * n_rows

    def positions(self, shape: PassShape, firsts: list[int]) -> npt.NDArray[np.int64]:
        """Return the position of each column, numpy [n_seqs, n_columns]; -1: there is none.

        firsts: the position of the first row of each sequence.
        """
        n_columns, n = self.columns(shape)
        if not self.is_split(shape):
            begins = [max(0, first - self.n + 1) // PAGE * PAGE for first in firsts]
            return np.array(begins)[:, None] + np.arange(n_columns)
        if n_columns == shape.n_kv:
            return np.arange(n_columns)[None]
        begin, each = (
            max(firsts[0] - self.n + 1, 0),
            -(-shape.n_kv // self._state.n_attention_parts),
        )
        places = np.arange(begin, firsts[0] + 1)
        parts = places // each
        found = np.full((1, n_columns), -1)
        at = (parts - max(0, begin // each - 1)) * (n_columns // n)
        found[0, at + places - np.maximum(parts * each, begin)] = places
        return found

    def rows(
        self, slots: tuple[int, ...], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return the rows of the rings to gather; those of columns without a position are any."""
        return self._state.ring_rows(np.array(slots)[:, None], positions)

    def mask(self, positions: npt.NDArray[np.int64], first: int) -> npt.NDArray[np.float16]:
        """Return the mask of the row at position `first`, of the shape of positions."""
        is_seen = (positions > first - self.n) & (positions <= first) & (positions >= 0)
        return np.where(is_seen, np.float16(0), np.float16(-np.inf))


class WindowRow:
    """What layers with a window read in one-row passes; writes only what changes between passes."""

    def __init__(
        self, window: Window, shape: PassShape, mask: npt.NDArray[np.float16],
        rows: npt.NDArray[np.int32], idx: npt.NDArray[np.int64],
    ) -> None:  # fmt: skip
        self._window, self._shape, self._parts = window, shape, (mask, rows, idx)
        self._is_split, self._ring, self._begin = window.is_split(shape), window.ring, -1

    def move_to(self, slot: int, first: int, goes_on: bool) -> None:
        """Write the inputs of a row; goes_on: it follows that of the last call."""
        (mask, rows, idx), window = self._parts, self._window
        idx[0] = slot * self._ring + first % self._ring
        if self._shape.is_paged:
            if not goes_on:
                rows[:] = window.pages[slot]
            return
        begin = max(0, first - window.n + 1) // PAGE * PAGE
        if goes_on and begin == self._begin and not self._is_split:
            mask[first - begin] = 0.0
            if first - window.n >= begin:
                mask[first - window.n - begin] = -np.inf
            return
        places, self._begin = window.positions(self._shape, [first]), begin
        mask[:], rows[:] = window.mask(places[0], first), window.rows((slot,), places)[0]
