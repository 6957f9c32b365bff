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

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ..errors import MoegraphError, NativeError, RequestError
from ..resident.hostcopies import StatesCopy
from ..runner.sweep import Sweep
from .passes import Passes
from .prefixstore import PrefixStore
from .prefixtree import Path, n_common
from .sequencecopies import SequenceCopies

Ids = npt.NDArray[np.int32]
# A mark costs a pass more, for the tokens behind it; that takes about as long as so many tokens of
# a longer pass.
_WORTH = 64
# Tokens between marks that nobody asked for, in a long prompt.
_EVERY = 8192
# Tokens by which most sequences that are not alike differ.
_GLANCE = 32


class Prefixes:
    """Saves beginnings of prompts, and has sequences go on from them. store: what is kept."""

    def __init__(self, passes: Passes, copies: SequenceCopies, store: PrefixStore) -> None:
        self.store = store
        self._passes = passes
        self._copies = copies
        self._owners = [""] * passes.n_seq  # of what each sequence holds
        passes.prompts.keep = self._keep_read

    def n_saved(self, ids: Ids, owner: str = "") -> int:
        """Return how much of the beginning of ids any sequence can be made to hold."""
        found = self.store.disk.find(ids[:-1], owner) if self.store.disk else []
        in_memory = _length(self.store.tree.find(ids[:-1], self._longest(ids, owner)[1], owner))
        return max(in_memory, found[-1].end if found else 0)

    def own(self, seq: int, owner: str) -> None:
        """Note whose tokens a sequence is going to hold."""
        self._owners[seq] = owner

    def owned(self, seq: int, owner: str) -> list[int]:
        """Return what a sequence holds, which must be an owner's."""
        self._copies.require_resting(seq)
        if self._owners[seq] != owner and self._passes.held(seq):
            raise RequestError(f"slot {seq} holds what another key has sent")
        return self._passes.held(seq)

    def choose(self, ids: Ids, idle: Sequence[int], owner: str = "") -> int:
        """Return which of some idle sequences is to go on with ids.

        That is the one that holds most of their beginning, or else the first of `idle`, which then
        gives way: what it holds is saved if it was worth computing.
        """
        n_useful = dict.fromkeys(idle, 0)
        for seq in idle:
            n, n_held = self.n_common(seq, ids, owner), len(self._passes.held(seq))
            if n == n_held or 2 * n > n_held:  # otherwise it holds more of something else
                n_useful[seq] = n
        chosen = max(idle, key=n_useful.__getitem__)
        if not n_useful[chosen]:
            self._keep(chosen)
        return chosen

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
        if len(ids) - _length(self.store.tree.find(ids, 0, self._owners[seq])) >= _WORTH:
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
        if self.store.disk:
            n_known = _length(self.store.tree.find(ids[:-1], n_live, owner))
            if n_kept == n_held < len(ids):
                n_known = max(n_known, n_kept)
            self.store.bring(ids[:-1], owner, n_known + _WORTH)
        path = self.store.arrived(self.store.tree.find(ids[:-1], n_live, owner))
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
        self.store.tree.touch(path)
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
        for mark in sorted({*marks, *more}) if self.store.is_on else ():
            last = max([_length(self.store.tree.find(ids[:mark], len(ids), owner)), *found[-1:]])
            if mark - last >= _WORTH:
                found.append(mark)
        if not found:
            return []
        store, size = self.store, max(1, self._copies.memory.states_bytes)
        limit = store.limit()
        store.shrink(limit - size * len(found), store.tree.find(ids[:n_held], n_held, owner))
        n_fit = max(0, limit - self.store.tree.n_bytes) // size
        return found[max(0, len(found) - n_fit) :]

    def save(self, seq: int, states: StatesCopy | None = None) -> bool:
        """Keep what a sequence holds now, or held when states were copied; False without room.

        The sequence still has its positions up to there.
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

    def _save_ids(self, seq: int, states: StatesCopy | None, held: list[int]) -> bool:
        ids = np.asarray(held, dtype=np.int32)
        if not self.store.is_on or not len(ids):
            return False
        path = self.store.tree.reach(ids, self._owners[seq])
        try:
            return self._save(seq, states, path)
        except (NativeError, MemoryError):  # nothing else depends on it
            return False
        finally:
            self.store.settle(path if path[-1].states else [])

    def _save(self, seq: int, states: StatesCopy | None, path: Path) -> bool:
        copies, last = self._copies, path[-1]
        if last.states is None:
            if not self.store.make_room(copies.memory.states_bytes, path):
                return False
            last.states = copies.take_states(seq) if states is None else states
        self.store.tree.touch(path)
        end, is_whole = 0, True
        for node in path:
            start, end = end, end + len(node.tokens)
            if node.rows is not None:
                continue
            # without rows, these states serve only while the sequence keeps its own
            is_whole = is_whole and self.store.make_room(copies.row_bytes * (end - start), path)
            if is_whole:
                ids = np.concatenate([each.tokens for each in path])[:end]
                node.rows = copies.take_rows(seq, start, ids.tolist())
        return is_whole

    def close(self) -> None:
        """Write what is kept to disk, if there is one, what sequences hold too, and forget it."""
        if self.store.disk:
            for seq in range(self._passes.n_seq):
                with suppress(MoegraphError):  # a prompt is under way, or the device has failed
                    self._copies.require_resting(seq)
                    self._keep(seq)
        self.store.close()
        self._passes.prompts.keep = None


def _length(path: Path) -> int:
    """Return the tokens from the root to the end of a path."""
    return sum(len(node.tokens) for node in path)
