"""Copies of a sequence's recurrent states, to go back to.

KV rows need no copy: a sequence only appends to them, so going back means forgetting the last ones.
That holds until the sequence itself goes back further, or is emptied. Then the rows are gone, and
with them every snapshot of a later position.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from ..errors import RequestError
from ..ggml.device import Device
from ..ggml.handles import Buffer, Context
from ..ggml.lib import C
from ..ggml.memory import place
from ..ggml.ops import F32, Tensor


class _Copy:
    """Device memory for the recurrent states of one sequence."""

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

    def __init__(self, slot: int, n_past: int, copy: _Copy, spare: list[_Copy]) -> None:
        self.slot = slot
        self.n_past = n_past
        self.is_valid = True
        self._copy: _Copy | None = copy
        self._spare = spare

    def close(self) -> None:
        """Give up the memory, for the next snapshot; a second call does nothing."""
        copy, self._copy, self.is_valid = self._copy, None, False
        if copy is not None:
            self._spare.append(copy)

    def copy_of_states(self) -> Tensor:
        """Return the memory of the states.

        Raises:
            RequestError: the snapshot is closed, or the sequence has lost its positions since.
        """
        if self._copy is None:
            raise RequestError("the snapshot is closed")
        if not self.is_valid:
            raise RequestError(
                f"sequence {self.slot} has lost positions before {self.n_past} since this snapshot "
                "was taken; compute them again"
            )
        return self._copy.tensor


class Snapshots:
    """Takes and restores snapshots of the rows of recurrent states.

    Copies are enqueued on the compute stream, so passes of other sequences go on.
    """

    def __init__(self, device: Device, states: Iterable[Tensor]) -> None:
        self._device = device
        self._at: dict[Tensor, int] = {}  # where each state is in a copy
        for tensor in states:
            self._at[tensor] = sum(t.nb[1] for t in self._at)
        # at least one number, for a stage without recurrent states
        self._n_bytes = max(4, sum(t.nb[1] for t in self._at))
        self._spare: list[_Copy] = []
        self._live: WeakSet[Snapshot] = WeakSet()

    def take(self, slot: int, n_past: int) -> Snapshot:
        """Return a snapshot of a sequence that holds n_past positions.

        Raises:
            OutOfDeviceMemory: there is no memory for it.
        """
        copy = self._spare.pop() if self._spare else _Copy(self._device, self._n_bytes)
        snapshot = Snapshot(slot, n_past, copy, self._spare)
        self._live.add(snapshot)
        for tensor, at in self._at.items():
            self._enqueue(tensor, slot * tensor.nb[1], copy.tensor, at, tensor.nb[1])
        return snapshot

    def reserve(self) -> None:
        """Allocate the memory of one snapshot.

        Raises:
            OutOfDeviceMemory: there is no memory for it.
        """
        if not self._spare:
            self._spare.append(_Copy(self._device, self._n_bytes))

    def restore(self, snapshot: Snapshot) -> None:
        """Enqueue the copy of the states back to the snapshot's sequence.

        Raises:
            RequestError: the snapshot cannot be restored.
        """
        saved = snapshot.copy_of_states()
        for tensor, at in self._at.items():
            self._enqueue(saved, at, tensor, snapshot.slot * tensor.nb[1], tensor.nb[1])

    def _enqueue(self, source: Any, source_at: int, to: Any, to_at: int, n_bytes: int) -> None:
        C.mg_copy_bytes(self._device.compute.ptr, source, source_at, to, to_at, n_bytes)

    def forget(self, slot: int, n_past: int) -> None:
        """Make snapshots of a sequence invalid that have more positions than it keeps."""
        for snapshot in list(self._live):
            if snapshot.slot == slot and snapshot.n_past > n_past:
                snapshot.is_valid = False

    def close(self) -> None:
        """Free all memory, also that of snapshots that are not closed."""
        for snapshot in list(self._live):
            snapshot.close()
        for copy in self._spare:
            copy.close()
        self._spare.clear()
