"""What the rows of a pass are to each other: positions, KV rows and masks, as numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..arch.inputs import PassShape
from ..errors import InternalError
from ..ggml.ops import MAX_TREE_ROWS
from ..resident.kvpool import KVPool
from ..resident.layout import PAGE
from ..resident.state import State
from ..units import round_up

# As a parent: the row is none of the tree's.
PADDING = -2
_IN_PAGE: npt.NDArray[np.int32] = np.arange(PAGE, dtype=np.int32)


@dataclass(frozen=True)
class Tree:
    """The drafted rows of each sequence of a verify pass.

    parents: I32 numpy [n_seqs, n_seq_tokens]: an earlier row, or -1 for a root, which continues
    what is committed. lengths: how many rows of each sequence are real. The rest are padding, with
    the parent PADDING.
    """

    parents: npt.NDArray[np.int32]
    lengths: tuple[int, ...]

    @cached_property
    def is_ragged(self) -> bool:
        """Whether there are padding rows."""
        return min(self.lengths) < int(self.parents.shape[1])

    @cached_property
    def real(self) -> npt.NDArray[np.bool_]:
        """Which rows are real, numpy shape [n_seqs, n_seq_tokens]."""
        return np.arange(self.parents.shape[1]) < np.array(self.lengths)[:, None]

    @property
    def padding(self) -> npt.NDArray[np.int64]:
        """Rows that are padding, as many as there are rows: some repeat. There is padding.

        Rows are counted over all sequences: row r of sequence s is s * n_seq_tokens + r.
        """
        is_padding = ~self.real.reshape(-1)
        return np.where(is_padding, np.arange(is_padding.size), int(is_padding.argmax()))

    @cached_property
    def sees(self) -> npt.NDArray[np.bool_]:
        """Which rows each row attends to: its path; numpy shape [n_seqs, n_rows, n_rows].

        Padding attends to row 0, because a mask must leave something.
        """
        n_seqs, n = self.parents.shape
        sees = np.zeros((n_seqs, n, n), dtype=bool)
        for row in range(n):
            parents = self.parents[:, row]
            has = np.flatnonzero(parents >= 0)
            sees[has, row] = sees[has, parents[has]]
            sees[:, row, row] = True
        padding = np.nonzero(~self.real)
        sees[padding] = np.arange(n) == 0
        return sees

    @cached_property
    def depths(self) -> npt.NDArray[np.int64]:
        """How many rows are above each row in its tree, numpy shape [n_seqs, n_seq_tokens]."""
        depths: npt.NDArray[np.int64] = self.sees.sum(axis=2) - 1
        return depths

    @cached_property
    def paths(self) -> npt.NDArray[np.int32]:
        """The rows that each row attends to, in order; numpy shape [n_seqs, n_rows, n_rows].

        The numbers after them do not matter.
        """
        n_seqs, n = self.parents.shape
        paths = np.tile(np.arange(n, dtype=np.int32), (n_seqs, n, 1))
        for seq, row in np.ndindex(n_seqs, n):
            path = np.flatnonzero(self.sees[seq, row])
            paths[seq, row, : len(path)] = path
        return paths

    def require_path(self, seq: int, path: list[int]) -> str:
        """Return what is wrong with a path of rows from a root of tree `seq` on, or ''."""
        before = -1
        for row in path:
            if not 0 <= row < self.lengths[seq]:
                return f"the tree has rows 0 to {self.lengths[seq] - 1}, not {row}"
            if self.parents[seq, row] != before:
                return f"the parent of row {row} is {self.parents[seq, row]}, not {before}"
            before = row
        return ""


def fill_mask(
    mask: npt.NDArray[np.float16], pos0: list[int], sees: npt.NDArray[np.bool_] | None = None
) -> None:
    """Fill the mask, numpy shape [n_seqs, n_seq_tokens, n_kv]; pos0: first positions.

    sees: see `Tree`; None if each row continues the one before.
    """
    n_seq_tokens = mask.shape[1]
    for seq, first in enumerate(pos0):
        mask[seq, :, :first] = 0.0
        mask[seq, :, first:] = -np.inf
        if n_seq_tokens == 1:
            mask[seq, 0, first] = 0.0
            continue
        square = mask[seq, :, first : first + n_seq_tokens]
        if sees is None:
            square[np.tril_indices(n_seq_tokens)] = 0.0
        else:
            square[sees[seq, :, : square.shape[1]]] = 0.0


def fill_window(
    mask: npt.NDArray[np.float16], whole: npt.NDArray[np.float16], pos0: list[int], window: int,
    positions: npt.NDArray[np.int64], depths: npt.NDArray[np.int64] | None = None,
) -> None:  # fmt: skip
    """Fill the mask of layers with a window from that of other layers.

    positions: of the columns of each sequence, as of `Window`; the columns of `whole` have all
    positions in order. Others: as in `fill_mask`; depths: see `Tree`.
    """
    n_seq_tokens, n_kv = whole.shape[1:]
    for seq, first in enumerate(pos0):
        rows = first + (np.arange(n_seq_tokens) if depths is None else depths[seq])
        places = np.arange(n_kv)
        places[first : first + n_seq_tokens] = rows[: n_kv - first]
        is_there = (positions[seq] >= 0) & (positions[seq] < n_kv)
        at = np.where(is_there, positions[seq], 0)
        is_seen = is_there & (places[at] > rows[:, None] - window)
        mask[seq] = np.where(is_seen, whole[seq][:, at], np.float16(-np.inf))


def gathered_rows(pool: KVPool, slots: tuple[int, ...], n_kv: int) -> npt.NDArray[np.int32]:
    """Return the KV rows of the first n_kv positions of sequences: I32 numpy [n_seqs, n_kv].

    Positions without a page get rows of the sequence's first page; they are masked.
    """
    pages = pool.table[list(slots), : n_kv // PAGE]
    rows: npt.NDArray[np.int32] = pages[:, :, None] * np.int32(PAGE) + _IN_PAGE
    return rows.reshape(len(slots), n_kv)


def check_parents(parents: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Return the parents of rows as I32, numpy shape [n_seqs, n_seq_tokens].

    A parent is an earlier row, -1 for a root, or PADDING for a row that counts for nothing.
    """
    given = np.atleast_2d(np.asarray(parents))
    if not 0 < given.shape[-1] <= MAX_TREE_ROWS:
        raise InternalError(f"a tree has {given.shape[-1]} rows, not 1 to {MAX_TREE_ROWS}")
    bad = np.argwhere((given < PADDING) | (given >= np.arange(given.shape[-1])))
    if len(bad):
        seq, row = bad[0].tolist()
        raise InternalError(
            f"tree {seq}: the parent of row {row} is {given[seq, row]}, not {PADDING} to {row - 1}"
        )
    above = np.take_along_axis(given, np.maximum(given, 0).astype(np.int64), -1)
    lost = np.argwhere((given >= 0) & (above == PADDING))
    if len(lost):
        seq, row = lost[0].tolist()
        raise InternalError(
            f"tree {seq}: the parent of row {row} is row {given[seq, row]}, which is padding"
        )
    return given.astype(np.int32)


_SPLIT = 512  # fewest columns that ggml divides into parts


class Window:
    """The window of a stage's layers: which columns of a pass's mask are which positions.

    Attention in these layers reads some positions of each sequence, gathered from its ring.
    Usually these are whole pages, from the one in which the first window begins.

    On the CPU, ggml sums the positions of a single row of an F16 cache in several parts, from 512
    positions on, and the bits depend on where the parts of all positions would begin. So the
    columns of such a row have parts of their own, with the same positions, as far as they are in
    the window, and hidden columns after them. There is one part before, unless the first is the
    very first: there ggml adds the sink. Source: ggml/src/ggml-cpu/ops.cpp,
    ggml_compute_forward_flash_attn_ext_f16.

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
