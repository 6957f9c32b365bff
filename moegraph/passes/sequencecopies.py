"""Copies of whole sequences: of their states in the device, and of everything in host memory.

A sequence can be taken out of the device, so that others get its pages, and go on later in any
slot as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ..errors import NativeError
from ..resident.hostcopies import RowsCopy, Snapshot, StatesCopy
from ..units import format_bytes
from .checks import require_seq
from .passes import Passes
from .speculation import Speculation


@dataclass(eq=False)
class SwappedSequence:
    """A sequence in host memory: its token ids, KV rows and states.

    `SequenceCopies.swap_in` uses it up; close one that is not needed.
    """

    ids: list[int]
    rows: RowsCopy | None = None
    states: StatesCopy | None = None

    @property
    def n_bytes(self) -> int:
        """Return the host memory that it takes."""
        return sum(part.n_bytes for part in (self.rows, self.states) if part)

    def close(self) -> None:
        """Give up the memory; a second call does nothing."""
        self.rows = self.states = None


class SequenceCopies:
    """Copies sequences and puts them back, between two passes."""

    def __init__(self, passes: Passes, speculation: Callable[[], Speculation | None]) -> None:
        """speculation: returns what drafts, or None."""
        self._passes = passes
        self._state = passes.runner.sequences
        self.memory, self.pool = self._state.copies, self._state.pool
        self._speculation = speculation

    def close(self) -> None:
        """Forget what drafts; no copies are made any more."""
        self._speculation = lambda: None

    def require_resting(self, seq: int) -> None:
        """Check that nothing of a sequence is under way."""
        passes = self._passes
        require_seq(seq, passes.n_seq)
        passes.clean_up()
        passes.runner.require_idle()
        passes.prompts.require_read(seq)

    def snapshot(self, seq: int) -> Snapshot:
        """Copy the states of a sequence within the device, to `restore`; close what is not needed.

        Its KV rows need no copy as long as it only goes on.
        """
        require_seq(seq, self._passes.n_seq)
        self._passes.clean_up()
        return self._state.snapshot(seq)

    def restore(self, snapshot: Snapshot) -> None:
        """Have a sequence be again as it was when a snapshot was taken; no other one waits."""
        passes, seq, n_past = self._passes, snapshot.slot, snapshot.n_past
        passes.clean_up()
        snapshot.copies_of_states()  # an error here changes nothing
        passes.room.require_place(seq, n_past, n_past)
        ids = passes.held(seq)[:n_past]
        passes.replace(seq, ids, partial(self._state.restore, snapshot))

    @property
    def row_bytes(self) -> int:
        """Return the most bytes of the rows of a position."""
        drafts = self._speculation()
        return self.memory.row_bytes + (drafts.row_bytes if drafts else 0)

    def take_states(self, seq: int) -> StatesCopy:
        """Copy the states of a sequence."""
        if drafts := self._speculation():
            drafts.settle(seq)
        return self.memory.take_states(seq, len(self._passes.held(seq)))

    def take_rows(self, seq: int, first: int, ids: list[int]) -> RowsCopy:
        """Copy the rows of positions of a sequence, those of drafters too.

        ids: the tokens of all positions up to the last of these; first: the first of these.
        """
        drafted = None
        if drafts := self._speculation():
            drafts.settle(seq)
            drafted = drafts.take_rows(seq, ids, first)
        return self.memory.take_rows(seq, first, len(ids) - first, drafted)

    def put_back(
        self,
        seq: int,
        ids: list[int],
        n_kept: int,
        rows: Sequence[tuple[int, RowsCopy]],
        states: StatesCopy,
        source: tuple[int, int] | None = None,
    ) -> None:
        """Have a sequence hold ids, from copies; see `Sequences.put_back`."""
        passes, drafts = self._passes, self._speculation()
        held = passes.held(seq)[:n_kept]
        if drafts and source:
            drafts.settle(source[0])  # nobody writes to shared pages
        passes.clean_up()
        passes.runner.require_idle()
        n_stays, n_shared = (0, source[1]) if source else (n_kept, 0)
        passes.room.require_place(seq, len(ids), n_stays, n_shared)
        put_back = partial(self._state.put_back, seq, n_kept, rows, states, source)
        passes.replace(seq, list(ids), put_back)
        if drafts:
            drafts.put_back(seq, held, ids, rows)

    def swap_out(self, seq: int) -> SwappedSequence:
        """Take a sequence out of the device: it is empty after this, and its pages are free.

        Verified rows that were not committed are lost.
        """
        self.require_resting(seq)
        ids = list(self._passes.held(seq))
        swapped = SwappedSequence(ids)
        try:
            if ids:
                swapped.states = self.take_states(seq)
                swapped.rows = self.take_rows(seq, 0, ids)
        except MemoryError as error:
            n_bytes = self.memory.states_bytes + self.row_bytes * len(ids)
            swapped.close()
            raise NativeError(
                f"no host memory for {format_bytes(n_bytes)} of sequence {seq}"
            ) from error
        except BaseException:
            swapped.close()
            raise
        self._passes.reset(seq)
        return swapped

    def swap_in(self, seq: int, swapped: SwappedSequence) -> None:
        """Have a sequence, whatever it held, be what another one was; this uses up the copy."""
        self.require_resting(seq)
        if swapped.rows is None or swapped.states is None:
            self._passes.reset(seq)
        else:
            self.put_back(seq, swapped.ids, 0, [(0, swapped.rows)], swapped.states)
        swapped.close()
