"""Between memory and disk: which beginnings of prompts are written, and which come back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..errors import NativeError
from ..resident.hostcopies import RowsCopy, StatesCopy
from .prefixdisk import Entry, PrefixDisk
from .prefixtree import Node, Path, PrefixTree
from .sequencecopies import SequenceCopies

Ids = npt.NDArray[np.int32]
# Files that are begun whenever something is saved. States that are on disk leave the memory at once
# when others need it; so the oldest are written before that, from this share of the limit on.
_AHEAD, _FULL = 2, 0.5


class PrefixSpill:
    """Writes states of a tree to disk before they leave it, and brings them back."""

    def __init__(self, tree: PrefixTree, copies: SequenceCopies, disk: PrefixDisk) -> None:
        self._tree, self._copies = tree, copies
        self.disk = disk

    def give(self, path: Path, states: StatesCopy) -> None:
        """Take over states that leave the tree; they are closed when they are on disk."""
        self.disk.give(path, states, self._copies.states_bytes)

    def write_ahead(self, limit: int) -> None:
        """Begin to write some of the oldest states, if the memory is going to be full.

        limit: bytes that the tree may have.
        """
        if self._tree.n_bytes < _FULL * limit:
            return
        n_begun = 0
        for path in self._tree.places():
            if n_begun == _AHEAD:
                return
            n_begun += self._write(path)

    def _write(self, path: Path) -> bool:
        """Begin to write the states at the end of a path, unless they are on disk."""
        states = path[-1].states
        if states is None or self.disk.is_writing(states):
            return False
        self.disk.write(path, states, self._copies.states_bytes)
        return self.disk.is_writing(states)

    def bring(
        self, ids: Ids, owner: str, n_known: int, make_room: Callable[[int, Path], bool]
    ) -> None:
        """Read an owner's longest beginning of ids from disk, if it is worth that.

        n_known: ids that need not be computed anyway. make_room: makes room for so many bytes,
        without removing anything of a path.
        """
        found = self.disk.find(ids, owner)
        if not found or found[-1].end <= n_known:
            return
        path: Path = []
        for entry in found:  # no node has tokens of two files
            path = self._tree.reach(ids[: entry.end], owner)
        n_rows = sum(len(node.tokens) for node in path if node.rows is None)
        n_bytes = n_rows * self._copies.row_bytes + self._copies.states_bytes
        try:
            if path[-1].states is None and make_room(n_bytes, path):
                self._read(found, path)
        except (NativeError, MemoryError):  # nothing else depends on it
            return

    def _read(self, found: list[Entry], path: Path) -> None:
        for entry in found:
            if not self._read_rows(entry, path):
                return
        memory = self._copies.memory
        states = memory.new_states(found[-1].end)
        memory.wait()  # a device may still be reading what this memory held before
        if self.disk.states(found[-1], states):
            path[-1].states = states
            self._tree.touch(path)
        else:
            states.close()

    def _read_rows(self, entry: Entry, path: Path) -> bool:
        """Give nodes of a path the rows of a file's run; return whether they have them now."""
        rows: RowsCopy | None = None
        end = 0
        for node in path:
            start, end = end, end + len(node.tokens)
            if node.rows is not None or end <= entry.head.first or start >= entry.end:
                continue
            rows = rows or self.disk.rows(entry)
            if rows is None:
                return False
            _, rest = rows.split(start - entry.head.first)
            node.rows, _ = rest.split(end - start)
        return True

    def close(self) -> None:
        """Write what the tree has and there is room for, and end."""
        n_bytes, chosen, seen = 0, list[Path](), set[Node]()
        for path in reversed(self._tree.places()):
            n_bytes += sum(node.n_bytes for node in path if node not in seen)
            seen.update(path)
            if n_bytes > self.disk.max_bytes:
                break
            chosen.append(path)
        for path in sorted(chosen, key=len):  # beginnings first, so that no row is written twice
            self._write(path)
            self.disk.wait()
        self.disk.close()
