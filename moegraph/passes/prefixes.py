"""Beginnings of prompts that are kept, so that a later prompt need not compute them again.

A sequence can be continued where it ends. But it cannot be cut short, because its recurrent states
belong to its last position. So states are saved at chosen positions of a prompt, those where later
prompts may part from it, together with the KV rows before them (prefixtree.py). Everything is in
host memory: device memory is worth more as expert slots, and the copies survive whatever becomes of
the sequence.

All sequences of an engine share what is saved, for requests of the same owner. KV rows that some
sequence still has on the device are not copied: another one shares its pages. A sequence that
serves nobody keeps what it held, as the first place to go on from, until its slot or its pages are
needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ..errors import MoegraphError, NativeError
from ..ggml.free_memory import host_memory
from ..resident.hostcopies import RowsCopy, StatesCopy
from ..runner.sweep import Sweep
from .passes import Passes
from .prefixdisk import Entry, PrefixDisk
from .prefixtree import Node, Path, PrefixTree, n_common
from .prompts import keep_nothing
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


# A mark costs a pass more, for the tokens behind it; that takes about as long as so many tokens of
# a longer pass.
_WORTH = 64
# Seconds for which it is known how much memory is free: to ask takes a dozen files.
_FRESH_S = 1.0


# Tokens between marks that nobody asked for, in a long prompt.
_EVERY = 8192
# Tokens by which most sequences that are not alike differ.
_GLANCE = 32


class Prefixes:
    """Saves and restores beginnings of prompts, within a limit of host memory.

    tree: what is kept.
    """

    def __init__(self, passes: Passes, copies: SequenceCopies, max_bytes: int | None) -> None:
        """Keep at most max_bytes, also less than the host has free; None: no other limit."""
        self.tree = PrefixTree()
        self._passes = passes
        self._copies = copies
        self._max_bytes = max_bytes
        self._looked = -_FRESH_S  # when the host was last asked for its free memory
        self._free: int | None = None  # bytes that were free then, or held by what is kept
        self._owners = [""] * passes.n_seq  # of what each sequence holds
        passes.keep_cancelled(self._keep_read)
        self._spill: PrefixSpill | None = None

    def use_disk(self, disk: PrefixDisk) -> None:
        """Keep on disk what leaves the memory, and find it there again; `close` closes it."""
        self._spill = PrefixSpill(self.tree, self._copies, disk)

    @property
    def disk(self) -> PrefixDisk | None:
        """The disk behind the memory, if there is one."""
        return self._spill.disk if self._spill else None

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
        """Return the host memory in use."""
        pending = self._spill.disk.pending_bytes if self._spill else 0
        return self.tree.n_bytes + self._copies.memory.spare_bytes + pending

    def n_saved(self, ids: Ids, owner: str = "") -> int:
        """Return how much of the beginning of ids any sequence can be made to hold."""
        found = self._spill.disk.find(ids[:-1], owner) if self._spill else []
        in_memory = _length(self.tree.find(ids[:-1], self._longest(ids, owner)[1], owner))
        return max(in_memory, found[-1].end if found else 0)

    def own(self, seq: int, owner: str) -> None:
        """Note whose tokens a sequence is going to hold."""
        self._owners[seq] = owner

    def choose(self, ids: Ids, idle: Sequence[int], owner: str = "") -> int:
        """Return which of some idle sequences is to go on with ids.

        That is the one that holds most of their beginning, or else the first of `idle`, which then
        gives way: what it holds is saved if it was worth computing.
        """
        n_useful = {seq: self._n_useful(seq, ids, owner) for seq in idle}
        chosen = max(idle, key=n_useful.__getitem__)
        if not n_useful[chosen]:
            self._keep(chosen)
        return chosen

    def _n_useful(self, seq: int, ids: Ids, owner: str) -> int:
        """Return how many ids a sequence holds, or 0 if it holds more of something else."""
        n, n_held = self.n_common(seq, ids, owner), len(self._passes.held(seq))
        return n if n == n_held or 2 * n > n_held else 0

    def free(self, n_pages: int, idle: Sequence[int]) -> bool:
        """Empty idle sequences, the first of them first, until so many pages of the pool are free.

        What they hold is saved if it was worth computing. Return whether there are as many now.
        """
        for seq in idle:
            if self._passes.room.n_free_pages >= n_pages:
                break
            if self._passes.held(seq):
                self._keep(seq)
                self._passes.reset(seq)
        return self._passes.room.n_free_pages >= n_pages

    def _keep(self, seq: int) -> None:
        """Save what a sequence holds, unless little of it is new."""
        ids = np.asarray(self._passes.held(seq), dtype=np.int32)
        if len(ids) - _length(self.tree.find(ids, 0, self._owners[seq])) >= _WORTH:
            self.save(seq)

    def n_common(self, seq: int, ids: Ids, owner: str = "") -> int:
        """Return how many ids a sequence of an owner holds before it differs from them."""
        held = self._passes.held(seq) if self._owners[seq] == owner else []
        if held[:_GLANCE] != ids[: min(_GLANCE, len(held))].tolist():
            held = held[:_GLANCE]  # most sequences differ early
        return n_common(np.asarray(held, dtype=np.int32), ids)

    def _longest(self, ids: Ids, owner: str) -> tuple[int, int]:
        """Return the sequence that holds most of the beginning of ids, and how many of them."""
        n_held = {seq: self.n_common(seq, ids, owner) for seq in range(self._passes.n_seq)}
        longest = max(n_held, key=n_held.__getitem__)
        return longest, n_held[longest]

    def resume(self, seq: int, ids: Ids, owner: str = "") -> int:
        """Have a sequence hold as much of the beginning of ids as can be had without computing.

        At least the last id is left to compute. The sequence is emptied if it holds other tokens,
        or those of another owner, and nothing else fits. Return how many ids it holds.
        """
        n = self._resume(seq, ids, owner)
        self.own(seq, owner)
        return n

    def _resume(self, seq: int, ids: Ids, owner: str) -> int:
        n_held, n_kept = len(self._passes.held(seq)), self.n_common(seq, ids, owner)
        longest, n_live = self._longest(ids, owner)
        if self._spill:
            n_known = _length(self.tree.find(ids[:-1], n_live, owner))
            if n_kept == n_held < len(ids):
                n_known = max(n_known, n_kept)
            self._spill.bring(ids[:-1], owner, n_known + _WORTH, self._make_room)
        path = self.tree.find(ids[:-1], n_live, owner)
        n_saved = _length(path)
        if n_kept == n_held < len(ids) and n_kept >= n_saved:
            return n_kept
        if not path or path[-1].states is None:
            if n_held:
                self._passes.reset(seq)
            return 0
        n_kept, n_live, end, rows = min(n_kept, n_saved), min(n_live, n_saved), 0, []
        source = (longest, n_live) if n_live > n_kept else None
        for node in path:
            start, end = end, end + len(node.tokens)
            if end > n_kept and node.rows is not None:
                rows.append((start, node.rows))
        saved = ids[:n_saved].tolist(), n_kept, rows, path[-1].states, source
        self._copies.put_back(seq, *saved)
        self.tree.touch(path)
        return n_saved

    def begin(self, ids: Ids, marks: Sequence[int], n_held: int, owner: str = "") -> list[int]:
        """Return the marks of a prompt whose states are to be kept, in order, and make room.

        n_held: how many ids the sequence holds, of which nothing is removed. A mark that is only a
        few tokens after one that is kept saves less than it costs. If there is no room for all
        marks, the last ones are kept. A long prompt that has some gets more of them, so that not
        all is lost if it is cancelled.
        """
        found: list[int] = []
        more = range(n_held + _EVERY, len(ids) - _EVERY // 2, _EVERY) if marks else ()
        for mark in sorted({*marks, *more}) if self.is_on else ():
            last = max([_length(self.tree.find(ids[:mark], len(ids), owner)), *found[-1:]])
            if mark - last >= _WORTH:
                found.append(mark)
        if not found:
            return []
        limit, size = self._limit(), max(1, self._copies.states_bytes)
        self._shrink(limit - size * len(found), self.tree.find(ids[:n_held], n_held, owner))
        self._drop_spare(limit)
        n_fit = max(0, limit - self.tree.n_bytes) // size
        return found[max(0, len(found) - n_fit) :]

    def save(self, seq: int, states: StatesCopy | None = None) -> bool:
        """Keep what a sequence holds now, or held when states were copied; False without room.

        The sequence still has its positions up to there. The states are kept or closed.
        """
        n_held = None if states is None else states.n_past
        return self._save_ids(seq, states, self._passes.held(seq)[:n_held])

    def _keep_read(self, sweep: Sweep) -> None:
        """Save what prompts that are cancelled have computed, up to the last mark in each."""
        for prompt in sweep.prompts:
            whole = [copy for copy in prompt.saved if copy.n_past <= prompt.n_whole]
            prompt.saved = [copy for copy in prompt.saved if copy not in whole]
            self._copies.memory.wait()
            for states in whole:
                n_new = states.n_past - prompt.n_past
                ids = [*self._passes.held(prompt.slot), *prompt.batch.tokens[:n_new].tolist()]
                if states.is_finite:  # nobody else looks
                    self._save_ids(prompt.slot, states, ids)
                else:
                    states.close()

    def _save_ids(self, seq: int, states: StatesCopy | None, held: list[int]) -> bool:
        ids = np.asarray(held, dtype=np.int32)
        if not self.is_on or not len(ids):
            return False
        path = self.tree.reach(ids, self._owners[seq])
        try:
            return self._save(seq, states, path)
        except (NativeError, MemoryError):  # nothing else depends on it
            return False
        finally:
            limit = self._limit()
            self._shrink(limit, path if path[-1].states else [])
            self._drop_spare(limit)
            if self._spill:
                self._spill.write_ahead(limit)

    def _shrink(self, n_bytes: int, kept: Path) -> bool:
        """Remove older beginnings until the tree has at most n_bytes; see `PrefixTree.shrink`."""
        if not self._spill:
            return self.tree.shrink(n_bytes, kept)
        is_small = self.tree.shrink(n_bytes, kept, self._spill.give)
        if self.tree.n_bytes + self._spill.disk.pending_bytes > n_bytes:
            self._spill.disk.wait()
        return is_small

    def _save(self, seq: int, states: StatesCopy | None, path: Path) -> bool:
        copies, last = self._copies, path[-1]
        if last.states is None:
            if not self._make_room(copies.states_bytes, path):
                if states is not None:
                    states.close()
                return False
            last.states = copies.take_states(seq) if states is None else states
        elif states is not None:
            states.close()
        self.tree.touch(path)
        end, is_whole = 0, True
        for node in path:
            start, end = end, end + len(node.tokens)
            if node.rows is not None:
                continue
            # without rows, these states serve only while the sequence keeps its own
            is_whole = is_whole and self._make_room(copies.row_bytes * (end - start), path)
            if is_whole:
                ids = np.concatenate([each.tokens for each in path])[:end]
                node.rows = copies.take_rows(seq, start, ids.tolist())
        return is_whole

    def _drop_spare(self, limit: int) -> None:
        """Free the memory that waits for the next states, if all is more than the limit."""
        if self.n_bytes > limit:
            self._copies.memory.free_spare()

    def _make_room(self, n_bytes: int, kept: Path) -> bool:
        """Remove older beginnings until there is room for n_bytes; none if that is impossible."""
        limit = self._limit() - n_bytes
        return sum(node.n_bytes for node in kept) <= limit and self._shrink(limit, kept)

    def _limit(self) -> int:
        """Return how many bytes the tree may have now."""
        now, limit = time.monotonic(), self._max_bytes
        if now - self._looked >= _FRESH_S:
            memory, self._looked = host_memory(), now
            self._free = None
            if memory.available is not None:
                self._free = max(0, self.n_bytes + memory.available - memory.reserve)
        if self._free is not None:
            limit = self._free if limit is None else min(limit, self._free)
        return 1 << 62 if limit is None else limit

    def close(self) -> None:
        """Write what is kept to disk, if there is one, what sequences hold too, and forget it."""
        if self._spill:
            for seq in range(self._passes.n_seq):
                with suppress(MoegraphError):  # a prompt is under way, or the device has failed
                    self._passes.require_resting(seq)
                    self._keep(seq)
            self._spill.close()
            self._spill = None
        self.clear()
        self._passes.keep_cancelled(keep_nothing)

    def clear(self) -> None:
        """Forget everything that is kept; what sequences hold stays."""
        self.tree.clear()
        self._copies.memory.free_spare()


def _length(path: Path) -> int:
    """Return the tokens from the root to the end of a path."""
    return sum(len(node.tokens) for node in path)
