"""One prompt of a sweep: what its sequence was before, and what came of it."""

from __future__ import annotations

from ..errors import InternalError, NativeError
from ..resident.hostcopies import StatesCopy
from ..resident.sequences import Sequences
from ..resident.snapshots import Snapshot
from .results import NotFinite, Output
from .sweep_batch import SweepBatch


class SweptPrompt:
    """A prompt while a sweep computes it, perhaps together with others.

    n_past: positions of its sequence before it. saved: the states at the cuts, in host memory; they
    are complete after the last step, and the caller closes them. n_whole: positions that all layers
    have. output: the results, after the last step; error: why there are none. has_left: nobody
    wants them; its sequence becomes what it was.
    """

    def __init__(self, batch: SweepBatch, sequences: Sequences) -> None:
        self.batch, self.slot = batch, batch.slot
        self._sequences = sequences
        self.n_past = self.n_whole = sequences.n_past[self.slot]
        self.saved: list[StatesCopy] = []
        self.output: Output | None = None
        self.error: NotFinite | None = None
        self.has_left = False
        self._before: Snapshot | None = None

    @property
    def n_end(self) -> int:
        """Return the positions of the sequence after the prompt."""
        return self.n_past + len(self.batch.tokens)

    def begin(self) -> None:
        """Take a snapshot, memory for the states at the cuts, and pages.

        Raises:
            OutOfDeviceMemory: there is no memory for a snapshot.
        """
        sequences = self._sequences
        if self.n_past:
            self._before = sequences.snapshot(self.slot)
        for cut in self.batch.cuts:
            try:
                self.saved.append(sequences.copies.new_states(cut))
            except NativeError:  # nothing but this copy depends on it
                break
        sequences.pool.grow(self.slot, self.n_end)

    @property
    def is_kept(self) -> bool:
        """Whether the sequence keeps the rows, once the sweep has ended."""
        return not (self.error or self.has_left)

    def end(self) -> None:
        """Have the sequence have the rows; what it was if there are no results."""
        if not self.is_kept:
            self.undo()
            return
        if self.output is None:
            raise InternalError("a prompt has ended without results")
        self._sequences.n_past[self.slot] = self.n_end

    def undo(self) -> None:
        """Make the sequence what it was; safe to call again if it was interrupted."""
        if self._before:
            self._sequences.restore(self._before)
        elif self.n_past:  # it failed before anything was computed
            self._sequences.truncate(self.slot, self.n_past)
        else:
            self._sequences.reset(self.slot)

    def close(self, is_undone: bool) -> None:
        """Free what was taken to go back, which is impossible then; is_undone: all of it."""
        for copy in self.saved if is_undone else ():
            copy.close()
        if self._before:
            self._before.close()
