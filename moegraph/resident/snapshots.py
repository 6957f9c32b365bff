"""Copies of a sequence's recurrent states, to go back to.

KV rows need no copy: a sequence only appends to them, so going back means forgetting the last ones.
That holds until the sequence itself goes back further, or is emptied. Then the rows are gone, and
with them every snapshot of a later position.
"""

from __future__ import annotations

from weakref import WeakSet

from ..errors import RequestError
from ..ggml.device import Device
from ..ggml.handles import Buffer, Context
from ..ggml.lib import C
from ..ggml.memory import place
from ..ggml.ops import F32, Tensor
from .state import State


class _Copy:
    """Device memory for the recurrent states of one sequence in the layers of one state."""

    def __init__(self, device: Device, n_bytes: int) -> None:
        self.context = Context(1)
        self.buffer: Buffer = device.buffer(
            n_bytes, "a snapshot of a sequence", "close snapshots that are not needed"
        )
        self.tensor: Tensor = C.ggml_new_tensor_1d(self.context.ptr, F32, n_bytes // 4)
        place(self.buffer, self.tensor, 0)

    def close(self) -> None:
        self.buffer.close()
        self.context.close()


class Snapshot:
    """A sequence as it was with n_past positions; close it when it is not needed.

    slot: the sequence. is_valid: whether it can be restored.
    """

    def __init__(
        self, slot: int, n_past: int, copies: list[_Copy], spare: list[list[_Copy]]
    ) -> None:
        self.slot = slot
        self.n_past = n_past
        self.is_valid = True
        self._copies: list[_Copy] | None = copies
        self._spare = spare

    def close(self) -> None:
        """Give up the memory, for the next snapshot; a second call does nothing."""
        copies, self._copies, self.is_valid = self._copies, None, False
        if copies is not None:
            self._spare.append(copies)

    def copies_of_states(self) -> list[Tensor]:
        """Return the memory of the states, one tensor for each state that there is."""
        if self._copies is None:
            raise RequestError("the snapshot is closed")
        if not self.is_valid:
            raise RequestError(
                f"sequence {self.slot} has lost positions before {self.n_past} since this snapshot "
                "was taken; compute them again"
            )
        return [copy.tensor for copy in self._copies]


class _Rows:
    """The recurrent tensors of one state, and where their rows are in a copy."""

    def __init__(self, state: State) -> None:
        self.device = state.device
        self._at: dict[Tensor, int] = {}
        for tensor in state.recurrent:
            self._at[tensor] = sum(t.nb[1] for t in self._at)
        # at least one number, for a stage without recurrent states
        self.n_bytes = max(4, sum(t.nb[1] for t in self._at))

    def take(self, slot: int, to: Tensor) -> None:
        for tensor, at in self._at.items():
            n = tensor.nb[1]
            C.mg_copy_bytes(self.device.compute.ptr, tensor, slot * n, to, at, n)

    def put(self, slot: int, source: Tensor) -> None:
        for tensor, at in self._at.items():
            n = tensor.nb[1]
            C.mg_copy_bytes(self.device.compute.ptr, source, at, tensor, slot * n, n)


class Snapshots:
    """Takes and restores snapshots of the rows of recurrent states, on the devices that have them.

    Copies are enqueued on the compute streams, so passes of other sequences go on.
    """

    def __init__(self) -> None:
        self._rows: list[_Rows] = []
        self._spare: list[list[_Copy]] = []
        self._live: WeakSet[Snapshot] = WeakSet()

    def add(self, state: State) -> None:
        """Have later snapshots hold these layers too; there are none yet."""
        self._rows.append(_Rows(state))

    def _new(self) -> list[_Copy]:
        copies: list[_Copy] = []
        try:
            for rows in self._rows:
                copies.append(_Copy(rows.device, rows.n_bytes))
        except BaseException:
            for copy in copies:
                copy.close()
            raise
        return copies

    def take(self, slot: int, n_past: int) -> Snapshot:
        """Return a snapshot of a sequence that holds n_past positions."""
        copies = self._spare.pop() if self._spare else self._new()
        snapshot = Snapshot(slot, n_past, copies, self._spare)
        self._live.add(snapshot)
        for rows, copy in zip(self._rows, copies):
            rows.take(slot, copy.tensor)
        return snapshot

    def reserve(self) -> None:
        """Allocate the memory of one snapshot."""
        if not self._spare:
            self._spare.append(self._new())

    def restore(self, snapshot: Snapshot) -> None:
        """Enqueue the copy of the states back to the snapshot's sequence."""
        for rows, saved in zip(self._rows, snapshot.copies_of_states()):
            rows.put(snapshot.slot, saved)

    def forget(self, slot: int, n_past: int) -> None:
        """Make snapshots of a sequence invalid that have more positions than it keeps."""
        for snapshot in list(self._live):
            if snapshot.slot == slot and snapshot.n_past > n_past:
                snapshot.is_valid = False

    def close(self) -> None:
        """Free all memory, also that of snapshots that are not closed."""
        for snapshot in list(self._live):
            snapshot.close()
        for copy in (copy for copies in self._spare for copy in copies):
            copy.close()
        self._spare.clear()
        self._rows.clear()
