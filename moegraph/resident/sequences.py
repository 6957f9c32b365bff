"""The sequences of an engine: what happens to one happens in all its layers, on every device.

Whatever changes a sequence besides a pass is decided here, once, and then done to the states of all
stages: going back, emptying it, sharing pages, and copies on the devices and in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from .hostcopies import HostCopies, RowsCopy, Snapshot, Snapshots, StatesCopy
from .kvpool import PoolShape, Positions
from .layout import PAGE
from .state import State


class Sequences(Positions):
    """All sequences of an engine, and the states that hold them.

    states: of the stages, in order of layers. snapshots: of sequences, on the devices. copies:
    copies sequences to host memory and back.
    """

    def __init__(self, shape: PoolShape) -> None:
        super().__init__(shape)
        self.states: list[State] = []
        self.snapshots = Snapshots()
        self.copies = HostCopies(self.pool)

    def add(self, state: State) -> None:
        """Take the layers of one more stage; no sequence holds anything yet."""
        self.states.append(state)
        self.snapshots.add(state)
        self.copies.add(state)

    def reset(self, slot: int) -> None:
        """Enqueue that a sequence is emptied, after the passes in flight; its pages become free."""
        for state in self.states:
            state.clear_states(slot)
        self.truncate(slot, 0)
        self.saved[slot] = 0

    def truncate(self, slot: int, n_past: int) -> None:
        """Enqueue that a sequence loses its positions from n_past on; its states do not change.

        If its last page has other users, it gets its own; PoolFull if none is free.

        KV rows are cleared too: a failed pass may have left NaN in a row, and masking it would not
        help, because NaN times zero is NaN.
        """
        runs = self.pool.beyond(slot, n_past)
        for state in self.states:
            state.clear_rows(runs)
            state.clear_after(slot, n_past)
        self.snapshots.forget(slot, n_past)
        self.n_past[slot] = n_past
        self.pool.shrink(slot, n_past)
        if n_past % PAGE and self.pool.is_shared(slot, n_past):
            old, new = self.pool.part(slot, n_past)
            self._copy_rows(old * PAGE, new * PAGE, n_past % PAGE)

    def _copy_rows(self, source: int, to: int, n: int) -> None:
        for state in self.states:
            state.copy_rows(source, to, n)

    def snapshot(self, slot: int) -> Snapshot:
        """Return a snapshot of a sequence, copied after the passes in flight."""
        return self.snapshots.take(slot, self.n_past[slot])

    def restore(self, snapshot: Snapshot) -> None:
        """Enqueue that a sequence is again as it was when a snapshot was taken."""
        self.snapshots.restore(snapshot)
        self.truncate(snapshot.slot, snapshot.n_past)

    def put_back(
        self, slot: int, n_kept: int, rows: Sequence[tuple[int, RowsCopy]], states: StatesCopy,
        source: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """Have a sequence be as it was when its states were copied to host memory.

        n_kept: its first positions, which are right already. source: another sequence and how many
        of its first positions this one gets in place of those. rows: KV rows from there on, with
        the position of the first in each copy; copies may begin earlier.
        """
        self.truncate(slot, 0 if source else n_kept)
        n_past = n_kept
        if source:
            n_past = source[1]
            self._share(slot, *source)
        for first, copy in rows:
            end = first + copy.n_rows
            if end <= n_past:
                continue
            self.pool.grow(slot, end)
            self.copies.put_rows(copy, n_past - first, slot, n_past)
            n_past = end
        self.copies.put_states(states, slot)
        self.n_past[slot] = n_past

    def _share(self, slot: int, source: int, n: int) -> None:
        """Have an empty sequence begin with n positions of another one: whole pages are shared."""
        self.pool.share(slot, source, n // PAGE)
        if n % PAGE:
            self.pool.grow(slot, n)
            first = n - n % PAGE
            self._copy_rows(self.pool.row(source, first), self.pool.row(slot, first), n % PAGE)

    def close(self) -> None:
        """Free snapshots and copies; the stages free their states."""
        self.copies.close()
        self.snapshots.close()
        self.states.clear()  # they know us
