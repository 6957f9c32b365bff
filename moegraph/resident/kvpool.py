"""Positions of sequences, and the pages of the KV caches that have them. Bookkeeping, no bytes.

The planner reads it too.

A page is PAGE consecutive rows of every KV cache. Position p of a sequence is row p % PAGE of its
page p // PAGE. Sequences take pages as they grow and return them when they shrink. The lowest free
page is taken first, so the pages of an engine with one sequence are always 0, 1, 2 and so on.

Sequences that begin alike may share the pages of their beginning. Nobody writes to a page that has
several users: only whole pages before the end of all of them are shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config import EngineConfig
from ..errors import ConfigError, InternalError, PoolFull
from ..units import round_up
from .layout import PAGE


def runs_of(rows: npt.NDArray[np.integer[Any]]) -> Iterator[tuple[int, int, int]]:
    """Yield (index, first row, number) of the parts of some rows that are consecutive."""
    at = 0
    for part in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
        if len(part):
            yield at, int(part[0]), len(part)
            at += len(part)


class KVPool:
    """Pages of n_slots sequences, of up to n_slot_pages pages each and n_pages of all together.

    table: I32 numpy [n_slots, n_slot_pages], the pages of each sequence in order of position. The
    rest of a row repeats the first page, whose rows are safe to read, or is 0. version: grows
    whenever the pages of a sequence change.

    A call may be interrupted anywhere. Then `shrink` of that sequence makes the books right again.
    """

    def __init__(self, n_slots: int, n_slot_pages: int, n_pages: int | None = None) -> None:
        """n_pages: None: enough for all sequences at their longest."""
        self.table: npt.NDArray[np.int32] = np.zeros((n_slots, n_slot_pages), dtype=np.int32)
        self.version = 0
        self._pages: list[list[int]] = [[] for _ in range(n_slots)]
        n_pages = n_slots * n_slot_pages if n_pages is None else n_pages
        # [sequence, page]: who uses what; this decides, and the lists follow from it
        self._uses = np.zeros((n_slots, n_pages), dtype=bool)

    @property
    def n_pages(self) -> int:
        """Number of pages."""
        return int(self._uses.shape[1])

    @property
    def n_free(self) -> int:
        """Number of pages that belong to no sequence."""
        return self.n_pages - int(self._uses.any(axis=0).sum())

    def n_without(self, slots: Sequence[int]) -> int:
        """Return how many pages belong to no sequence but these."""
        others = np.delete(self._uses, slots, axis=0)
        return self.n_pages - int(others.any(axis=0).sum())

    def needed(self, slot: int, n_rows: int) -> int:
        """Return how many more pages a sequence needs for n_rows positions."""
        return max(0, -(-n_rows // PAGE) - len(self._pages[slot]))

    def lacking(self, slot: int, n_rows: int, n_kept: int, n_shared: int) -> tuple[int, int]:
        """Return how many pages a sequence takes to have n_rows positions, and how many it may.

        n_kept: its first positions, which it keeps; it gives the others back first. n_shared: pages
        that it gets from another one.
        """
        pages, n_own = self._pages[slot], -(-n_kept // PAGE)
        is_parted = n_kept % PAGE != 0 and self.is_shared(slot, n_kept)
        n_freed = sum(self._n_users(page) == 1 for page in pages[n_own:])
        n_taken = -(-n_rows // PAGE) - n_own - n_shared + is_parted
        return max(0, n_taken), self.n_free + n_freed

    def room(self, slot: int) -> int:
        """Return how many positions a sequence can have while the others keep their pages."""
        return min(len(self._pages[slot]) + self.n_free, int(self.table.shape[1])) * PAGE

    def pages(self, slot: int) -> list[int]:
        """Return the pages of a sequence in order of position."""
        return list(self._pages[slot])

    def row(self, slot: int, position: int) -> int:
        """Return the KV row of a position that has a page."""
        return self._pages[slot][position // PAGE] * PAGE + position % PAGE

    def rows(
        self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Return the KV rows of positions that have pages; both arrays broadcast to one shape."""
        pages = self.table[slots, positions // PAGE].astype(np.int64)
        return pages * PAGE + positions % PAGE

    def run(self, slot: int, first: int, n: int) -> npt.NDArray[np.int64]:
        """Return the KV rows of n positions from first on, which have pages; fast for a few."""
        at = first % PAGE
        if at + n <= PAGE:
            row = self._pages[slot][first // PAGE] * PAGE + at
            return np.arange(row, row + n)
        return self.rows(np.array(slot), first + np.arange(n))

    def grow(self, slot: int, n_rows: int) -> None:
        """Give a sequence pages for n_rows positions; it keeps what it has."""
        pages, n = self._pages[slot], -(-n_rows // PAGE)
        if n <= len(pages):
            return
        if n > self.table.shape[1]:
            raise InternalError(
                f"sequence {slot} needs {n} pages of {PAGE} positions; the limit is "
                f"{self.table.shape[1]}"
            )
        if n - len(pages) > self.n_free:
            raise PoolFull(n - len(pages), self.n_free)
        while len(pages) < n:
            pages.append(self._take(slot))
        self._write(slot)

    def _take(self, slot: int) -> int:
        others = self._uses.any(axis=0) & ~self._uses[slot]
        others[self._pages[slot]] = True
        page = int((~others).argmax())
        self._uses[slot, page] = True
        return page

    def is_shared(self, slot: int, position: int) -> bool:
        """Return whether a position is in a page that other sequences use too."""
        at = position // PAGE
        return at < len(self._pages[slot]) and self._n_users(self._pages[slot][at]) > 1

    def _n_users(self, page: int) -> int:
        return int(self._uses[:, page].sum())

    def share(self, slot: int, source: int, n: int) -> None:
        """Have a sequence use the first n pages of another one, beyond those that it has already.

        The other one has as many, all full, and this one has equal rows in those that it has.
        """
        pages = self._pages[slot]
        for page in self._pages[source][len(pages) : n]:
            self._uses[slot, page] = True
            pages.append(page)
        self._write(slot)

    def part(self, slot: int, position: int) -> tuple[int, int]:
        """Give a sequence a page of its own for one that is shared; return both, the old first."""
        at = position // PAGE
        old = self._pages[slot][at]
        if not self.n_free:
            raise PoolFull(1, 0)
        self._pages[slot][at] = self._take(slot)
        self._uses[slot, old] = False
        self._write(slot)
        return old, self._pages[slot][at]

    def beyond(self, slot: int, n_rows: int) -> list[tuple[int, int]]:
        """Return (first row, rows) of the runs of KV rows after a sequence's n_rows positions.

        Rows of shared pages are left out.
        """
        runs: list[tuple[int, int]] = []
        for at in range(n_rows // PAGE, len(self._pages[slot])):
            if self._n_users(self._pages[slot][at]) > 1:
                continue
            skipped = max(n_rows - at * PAGE, 0)
            first, n = self._pages[slot][at] * PAGE + skipped, PAGE - skipped
            if runs and sum(runs[-1]) == first:
                first, n = runs[-1][0], runs.pop()[1] + n
            runs.append((first, n))
        return runs

    def shrink(self, slot: int, n_rows: int) -> None:
        """Take back the pages that a sequence of n_rows positions does not need."""
        pages = self._pages[slot]
        del pages[-(-n_rows // PAGE) :]
        used = np.zeros(self.n_pages, dtype=bool)
        used[pages] = True
        self._uses[slot] &= used
        self._write(slot)

    def _write(self, slot: int) -> None:
        pages, row = self._pages[slot], self.table[slot]
        row[:] = pages[0] if pages else 0
        row[: len(pages)] = pages
        self.version += 1


@dataclass(frozen=True)
class PoolShape:
    """The positions of n_seq sequences, up to n_ctx of each and n_rows of all together.

    n_ctx and n_rows are multiples of PAGE. n_verified: rows of each sequence in the largest verify
    pass over all of them. n_chunk: most rows of a sequence in any pass.
    """

    n_ctx: int
    n_seq: int
    n_rows: int
    n_verified: int
    n_chunk: int

    @classmethod
    def of(cls, config: EngineConfig, n_ctx: int) -> PoolShape:
        """Return the shape for a context; its n_seq, n_kv and n_draft count."""
        padded, n_seq, n_kv = round_up(n_ctx, PAGE), config.n_seq, config.n_kv
        if 0 < n_kv < n_ctx:
            raise ConfigError(
                f"n_kv is {n_kv}: all sequences together need at least the context of one, {n_ctx}"
            )
        n_rows = padded * n_seq if n_kv == 0 else padded if n_kv < 0 else round_up(n_kv, PAGE)
        n_rows, n_chunk = min(n_rows, padded * n_seq), min(config.n_rows, padded)
        return cls(padded, n_seq, n_rows, config.n_draft + 1, n_chunk)

    @property
    def n_pages(self) -> int:
        """Pages of all sequences."""
        return self.n_rows // PAGE

    def ring(self, window: int) -> int:
        """Return the rows that a layer with a window keeps of a sequence: it, and those of a pass.

        No row of a pass overwrites what another one attends to, and rows of a pass whose results
        nobody takes overwrite nothing that a later pass attends to.
        """
        return min(self.n_ctx, round_up(window + self.n_chunk, PAGE))

    def cache_rows(self, window: int | None) -> int:
        """Return the rows of a layer's KV cache, without the spare row."""
        return self.n_seq * self.ring(window) if window else self.n_rows

    @property
    def n_whole(self) -> int:
        """How many sequences can be at their longest at once."""
        return self.n_rows // self.n_ctx

    def pass_rows(self, n_ubatch: int) -> int:
        """Return the most rows of a pass, with up to n_ubatch rows of each sequence."""
        return max(n_ubatch * self.n_whole, min(n_ubatch, self.n_verified) * self.n_seq)

    def most_seen(self, limit: int = 0) -> int:
        """Return how many positions of each sequence a drafter's layers without a window see.

        That is memory of each sequence, so they see what it has if all have equally many. limit: 0
        for no other one.
        """
        n_share = max(PAGE, self.n_rows // self.n_seq)
        return min(limit, n_share) if limit else n_share

    def most_kv(self, n_seqs: int) -> int:
        """Return the longest KV length of a pass that gathers the rows of n_seqs sequences.

        No pass gathers more rows than the pool has.
        """
        return max(PAGE, min(self.n_ctx, self.n_pages // n_seqs * PAGE))

    def groups(self, lengths: dict[int, int]) -> list[tuple[int, ...]]:
        """Divide sequences among as few passes as `most_kv` allows, the longest first.

        lengths: by sequence, the positions that it will hold.
        """
        found: list[list[int]] = []
        longest = 0
        for seq in sorted(lengths, key=lambda seq: (-lengths[seq], seq)):
            if not found or longest > self.most_kv(len(found[-1]) + 1):
                found.append([])
                longest = lengths[seq]
            found[-1].append(seq)
        return [tuple(sorted(group)) for group in found]


class Positions:
    """The positions of all sequences.

    shape: how many positions they may have. n_ctx, n_seq: of it. pool: the pages of the sequences.
    n_past: positions that each sequence holds. saved: how many positions of the rope fewer those
    are, because of pictures.
    """

    def __init__(self, shape: PoolShape) -> None:
        self.shape, self.n_ctx, self.n_seq = shape, shape.n_ctx, shape.n_seq
        self.pool = KVPool(shape.n_seq, shape.n_ctx // PAGE, shape.n_pages)
        self.n_past = [0] * shape.n_seq
        self.saved = [0] * shape.n_seq

    @property
    def spare_row(self) -> int:
        """Return the last row of the KV caches, where padding rows of a pass are written."""
        return self.shape.n_rows

    def n_kv(self, n_used: int) -> int:
        """Return the KV length of a graph for n_used positions: a multiple of PAGE."""
        return min(self.n_ctx, max(PAGE, -(-n_used // PAGE) * PAGE))
