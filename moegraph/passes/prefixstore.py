"""What is kept of prompts: a tree in host memory, within a limit, and a folder behind it."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from ..errors import NativeError
from ..ggml.free_memory import host_memory
from ..resident.hostcopies import RowsCopy
from .prefixdisk import Entry, PrefixDisk
from .prefixtree import Node, Path, PrefixTree
from .sequencecopies import SequenceCopies

Ids = npt.NDArray[np.int32]
# Files that are begun whenever something is saved. States that are on disk leave the memory at once
# when others need it; so the oldest are written before that, from this share of the limit on.
_AHEAD, _FULL = 2, 0.5
# Share of the limit that the pinned memory may take through which copies go.
_PINNED = 0.25
# Seconds for which it is known how much memory is free: to ask takes a dozen files.
_FRESH_S = 1.0


class PrefixStore:
    """Keeps beginnings of prompts, no matter which sequences they come from.

    tree: what is in memory. disk: keeps what leaves the memory, if there is one; `close` closes it.
    """

    def __init__(self, copies: SequenceCopies, max_bytes: int | None) -> None:
        """Keep at most max_bytes, also less than the host has free; None: no other limit."""
        self.tree = PrefixTree()
        self.disk: PrefixDisk | None = None
        self._copies = copies
        self._max_bytes = max_bytes
        if max_bytes:
            copies.memory.limit_pinned(int(_PINNED * max_bytes))
        self._looked = -_FRESH_S  # when the host was last asked for its free memory
        self._free: int | None = None  # bytes that were free then, or held by what is kept

    @property
    def is_on(self) -> bool:
        """Whether anything may be kept."""
        return self._max_bytes != 0

    @property
    def n_places(self) -> int:
        """Return how many beginnings of prompts a sequence can go on from."""
        return self.tree.n_states

    @property
    def n_bytes(self) -> int:
        """Return the host memory in use, with the pinned memory that copies go through."""
        n_bytes = self.tree.n_bytes + (self.disk.pending_bytes if self.disk else 0)
        return n_bytes + self._copies.memory.pinned_bytes

    def limit(self) -> int:
        """Return how many bytes the tree may have now."""
        now, limit = time.monotonic(), self._max_bytes
        if now - self._looked >= _FRESH_S:
            memory, self._looked = host_memory(), now
            self._free = None
            if memory.available is not None:
                self._free = max(0, self.n_bytes + memory.available - memory.reserve)
        if self._free is not None:
            limit = self._free if limit is None else min(limit, self._free)
        pinned_bytes = self._copies.memory.pinned_bytes
        return 1 << 62 if limit is None else max(0, limit - pinned_bytes)

    def shrink(self, n_bytes: int, kept: Path) -> bool:
        """Remove older beginnings until the tree has at most n_bytes; see `PrefixTree.shrink`."""
        if not self.disk:
            return self.tree.shrink(n_bytes, kept)
        is_small = self.tree.shrink(n_bytes, kept, self.disk.give)
        if self.tree.n_bytes + self.disk.pending_bytes > n_bytes:
            self.disk.wait()
        return is_small

    def make_room(self, n_bytes: int, kept: Path) -> bool:
        """Remove older beginnings until there is room for n_bytes; none if that is impossible."""
        limit = self.limit() - n_bytes
        return sum(node.n_bytes for node in kept) <= limit and self.shrink(limit, kept)

    def arrived(self, path: Path) -> Path:
        """Return a path once its copies are there; an empty one if some are lost."""
        for node in path:
            if not all(copy.has_arrived for copy in (node.rows, node.states) if copy):
                node.rows, node.states, path = None, None, []
        return path

    def settle(self, kept: Path) -> None:
        """Keep the limit once something was saved; begin to write if the memory becomes full."""
        limit = self.limit()
        self.shrink(limit, kept)
        if not self.disk or self.tree.n_bytes < _FULL * limit:
            return
        n_begun = 0
        for path in self.tree.places():
            if n_begun == _AHEAD:
                return
            n_begun += self.disk.write(path, path[-1].states)

    def bring(self, ids: Ids, owner: str, n_known: int) -> None:
        """Read an owner's longest beginning of ids from disk, if it is worth that.

        n_known: ids that need not be computed anyway.
        """
        found = self.disk.find(ids, owner) if self.disk else []
        if not found or found[-1].end <= n_known:
            return
        path: Path = []
        for entry in found:  # no node has tokens of two files
            path = self.tree.reach(ids[: entry.end], owner)
        n_rows = sum(len(node.tokens) for node in path if node.rows is None)
        n_bytes = n_rows * self._copies.row_bytes + self._copies.memory.states_bytes
        try:
            if self.disk and path[-1].states is None and self.make_room(n_bytes, path):
                self._read(self.disk, found, path)
        except (NativeError, MemoryError):  # nothing else depends on it
            return

    def _read(self, disk: PrefixDisk, found: list[Entry], path: Path) -> None:
        for entry in found:
            if not _read_rows(disk, entry, path):
                return
        states = self._copies.memory.new_states(found[-1].end)
        if disk.states(found[-1], states):
            path[-1].states = states
            self.tree.touch(path)

    def close(self) -> None:
        """Write what the tree has and there is room for, and forget everything."""
        if disk := self.disk:
            n_bytes, chosen, seen = 0, list[Path](), set[Node]()
            for path in reversed(self.tree.places()):
                n_bytes += sum(node.n_bytes for node in path if node not in seen)
                seen.update(path)
                if n_bytes > disk.max_bytes:
                    break
                chosen.append(path)
            for path in sorted(chosen, key=len):  # beginnings first: no row is written twice
                disk.write(path, path[-1].states)
                disk.wait()
            disk.close()
            self.disk = None
        self.clear()

    def clear(self) -> None:
        """Forget everything that is in memory."""
        self.tree.clear()


def _read_rows(disk: PrefixDisk, entry: Entry, path: Path) -> bool:
    """Give nodes of a path the rows of a file's run; return whether they have them now."""
    rows: RowsCopy | None = None
    end = 0
    for node in path:
        start, end = end, end + len(node.tokens)
        if node.rows is not None or end <= entry.head.first or start >= entry.end:
            continue
        rows = rows or disk.rows(entry)
        if rows is None:
            return False
        _, rest = rows.split(start - entry.head.first)
        node.rows, _ = rest.split(end - start)
    return True
