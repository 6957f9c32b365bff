"""Copies of what a sequence has computed: states and KV rows.

States are what belongs to the last position: recurrent states, and the windows of layers that have
one (`State.kept`).

A snapshot lies on the device. KV rows need no copy there: a sequence only appends to them, so going
back means forgetting the last ones. That holds until the sequence itself goes back further, or is
emptied. Then the rows are gone, and with them every snapshot of a later position.

Copies in host memory take no device memory and stay valid whatever happens to the sequence: they
can be put into any sequence. States are copied to pinned memory, which takes a third of the time.
But to pin new memory takes ten times as long as the copy, so a few blocks are kept for the next
copies. (35B shape on an H200: 62.8 MiB in 1.7 ms, 4.9 ms to ordinary memory, 23 ms to new pinned
memory.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from ..errors import InternalError, NativeError, RequestError
from ..ggml.device import HostBuffer
from ..ggml.handles import Owner, closed_on_failure
from ..ggml.lib import C, ffi
from ..ggml.memory import Block
from ..ggml.ops import Tensor
from .kvpool import KVPool, runs_of
from .state import State


class Snapshot:
    """A sequence as it was with n_past positions; close it when it is not needed.

    slot: the sequence. is_valid: whether it can be restored.
    """

    def __init__(
        self, slot: int, n_past: int, copies: list[Block], spare: list[list[Block]]
    ) -> None:
        self.slot, self.n_past, self.is_valid = slot, n_past, True
        self._copies: list[Block] | None = copies
        self._spare = spare

    def close(self) -> None:
        """Give up the memory, for the next snapshot; a second call does nothing."""
        copies, self._copies, self.is_valid = self._copies, None, False
        if copies is not None:
            self._spare.append(copies)

    def copies_of_states(self) -> list[list[Tensor]]:
        """Return the memory of the states, of each state that there is."""
        if self._copies is None:
            raise RequestError("the snapshot is closed")
        if not self.is_valid:
            raise RequestError(
                f"sequence {self.slot} has lost positions before {self.n_past} since this snapshot "
                "was taken; compute them again"
            )
        return [list(copy.tensors.values()) for copy in self._copies]


class Snapshots(Owner):
    """Takes and restores snapshots of the rows of recurrent states, on the devices that have them.

    Copies are enqueued on the compute streams, so passes of other sequences go on.
    """

    def __init__(self) -> None:
        self._states: list[State] = []
        self._spare: list[list[Block]] = []
        self._live: WeakSet[Snapshot] = WeakSet()

    def add(self, state: State) -> None:
        """Have later snapshots hold these layers too; there are none yet."""
        self._states.append(state)

    def _new(self) -> list[Block]:
        what, remedy, copies = "a snapshot of a sequence", "close some snapshots", list[Block]()
        with closed_on_failure():
            for state in self._states:
                sizes = [_size(state, tensor) // 4 for tensor in state.kept]
                shapes = {i: (size, 1) for i, size in enumerate(sizes)}
                copies.append(self.own(Block(state.device, shapes, what, remedy)))
        return copies

    def take(self, slot: int, n_past: int) -> Snapshot:
        """Return a snapshot of a sequence that holds n_past positions."""
        copies = self._spare.pop() if self._spare else self._new()
        snapshot = Snapshot(slot, n_past, copies, self._spare)
        self._live.add(snapshot)
        for state, found in zip(self._states, snapshot.copies_of_states()):
            for tensor, copy in zip(state.kept, found):
                for start, at, n in state.pieces(tensor, slot, n_past):
                    C.mg_copy_bytes(state.device.compute.ptr, tensor, start, copy, at, n)
        return snapshot

    def reserve(self) -> None:
        """Allocate the memory of one snapshot."""
        if not self._spare:
            self._spare.append(self._new())

    def restore(self, snapshot: Snapshot) -> None:
        """Enqueue the copy of the states back to the snapshot's sequence."""
        for state, found in zip(self._states, snapshot.copies_of_states()):
            for tensor, copy in zip(state.kept, found):
                for start, at, n in state.pieces(tensor, snapshot.slot, snapshot.n_past):
                    C.mg_copy_bytes(state.device.compute.ptr, copy, at, tensor, start, n)

    def forget(self, slot: int, n_past: int) -> None:
        """Make snapshots of a sequence invalid that have more positions than it keeps."""
        for snapshot in list(self._live):
            if snapshot.slot == slot and snapshot.n_past > n_past:
                snapshot.is_valid = False

    def close(self) -> None:
        """Free all memory, also that of snapshots that are not closed."""
        super().close()
        self._spare.clear()
        self._states.clear()


def _size(state: State, tensor: Tensor) -> int:
    """Return the bytes that a tensor has of the state of a sequence."""
    return sum(n for _, _, n in state.pieces(tensor, 0, 0))


Parts = list[npt.NDArray[np.uint8]]
# Blocks that wait for the next copies.
_MAX_SPARE = 2
# Blocks that a thread keeps ready where several sequences take turns.
_AHEAD = 8


class StatesCopy:
    """The states of a sequence after its first n_past positions."""

    def __init__(
        self, n_past: int, buffer: HostBuffer, spare: list[HostBuffer], most: int, n_numbers: int
    ) -> None:
        """spare: where the memory goes in the end, if there are fewer than `most` blocks.

        n_numbers: F32 numbers, which come first: recurrent states.
        """
        self.n_past, self._n_numbers = n_past, n_numbers
        self.buffer: HostBuffer | None = buffer
        self.n_bytes = buffer.array.nbytes
        self._spare, self._most = spare, most

    @property
    def is_finite(self) -> bool:
        """Whether all numbers of recurrent states of a copy that is complete are finite."""
        words = _open(self).array[: 4 * self._n_numbers].view(np.float32)
        return bool(np.isfinite(words).all())

    def close(self) -> None:
        """Give up the memory, to one of the next copies; a second call does nothing."""
        buffer, self.buffer = self.buffer, None
        if buffer is None:
            return
        if len(self._spare) < self._most:
            self._spare.append(buffer)
        else:
            buffer.close()


def _open(copy: StatesCopy) -> HostBuffer:
    if copy.buffer is None:
        raise InternalError("the saved states are closed")
    return copy.buffer


class RowsCopy:
    """KV rows of consecutive positions: of each cache, U8 numpy [n_rows, bytes of a row].

    drafted: by drafter, rows of its own caches, U8 [m, bytes of a row]: those of the last m
    positions.
    """

    def __init__(self, parts: Parts, drafted: dict[str, Parts] | None = None) -> None:
        self.parts = parts
        self.drafted = drafted or {}

    @classmethod
    def joined(cls, copies: Sequence[RowsCopy]) -> RowsCopy:
        """Return one copy of runs that follow one another; it may share their memory."""
        if len(copies) == 1:
            return cls(list(copies[0].parts), dict(copies[0].drafted))
        parts = [np.concatenate(each) for each in zip(*(copy.parts for copy in copies))]
        drafted = {name: _last_rows(copies, name) for name in copies[-1].drafted}
        return cls(parts, drafted)

    @property
    def n_rows(self) -> int:
        """Return the number of positions."""
        return len(self.parts[0])

    @property
    def n_bytes(self) -> int:
        """Return the memory that they take."""
        drafted = (part for parts in self.drafted.values() for part in parts)
        return sum(part.nbytes for part in (*self.parts, *drafted))

    def split(self, n: int) -> tuple[RowsCopy, RowsCopy]:
        """Return copies of the first n positions and of the others."""
        n_rest = self.n_rows - n

        def cut(parts: Parts, is_first: bool) -> Parts:
            ends = [max(0, len(part) - n_rest) for part in parts]
            return [(p[:end] if is_first else p[end:]).copy() for p, end in zip(parts, ends)]

        first, rest = (
            RowsCopy(cut(self.parts, one), {k: cut(p, one) for k, p in self.drafted.items()})
            for one in (True, False)
        )
        return first, rest

    def close(self) -> None:
        """Give up the memory."""
        self.parts, self.drafted = [], {}


def _last_rows(copies: Sequence[RowsCopy], name: str) -> Parts:
    """Return a drafter's rows of the last positions of runs, up to the first that lacks some."""
    found: Parts = []
    for i, part in enumerate(copies[-1].drafted[name]):
        joined, is_whole = [part], len(part) == copies[-1].n_rows
        for copy in reversed(copies[:-1]):
            each = copy.drafted.get(name)
            if not is_whole or each is None:
                break
            joined.insert(0, each[i])
            is_whole = len(each[i]) == copy.n_rows
        found.append(np.concatenate(joined))
    return found


class HostCopies:
    """Copies the states and rows of sequences to host memory and back, after the pass in flight.

    The layers may be on several devices; a copy has them all, in order. states_bytes: size of the
    states of a sequence. row_widths: of a KV row in each cache. spare: blocks for the next
    copies of states.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._parts: list[State] = []
        self.spare: list[HostBuffer] = []
        self._pinner: ThreadPoolExecutor | None = None
        self._most = _MAX_SPARE
        self._pinning: Future[None] | None = None
        self._at: dict[Tensor, int] = {}  # where each state is in a copy
        self.states_bytes = self._n_numbers = 0
        self.row_widths: list[int] = []

    def add(self, state: State) -> None:
        """Have later copies hold these layers too; there are none yet."""
        self._parts.append(state)
        numbers = [(part, tensor) for part in self._parts for tensor in part.recurrent]
        rings = [(part, t) for part in self._parts for each in part.rings.values() for t in each]
        self.states_bytes = 0
        for part, tensor in numbers + rings:
            self._at[tensor] = self.states_bytes
            self.states_bytes += _size(part, tensor)
        self._n_numbers = sum(tensor.ne[0] for _, tensor in numbers)
        # without pages, copies of rows still have a length
        self.row_widths = [t.nb[1] for part in self._parts for t in part.caches] or [0]

    @property
    def row_bytes(self) -> int:
        """Return the bytes of the KV rows of a position."""
        return sum(self.row_widths)

    def _new_buffer(self) -> HostBuffer:
        # memory that one GPU driver pinned is pinned for all its devices
        return self._parts[0].device.host_buffer(max(1, self.states_bytes))

    def new_states(self, n_past: int) -> StatesCopy:
        """Return memory for the states after n_past positions; `take_layer` fills it.

        A device may still read what it held before. Who fills it on the host waits for that first.
        """
        self._pin_more()
        n_numbers = self._n_numbers
        if self.spare:
            return StatesCopy(n_past, self.spare.pop(), self.spare, self._most, n_numbers)
        if self._pinner:  # ordinary memory is there at once
            size = max(1, self.states_bytes)
            buffer = self._parts[0].device.host_buffer(size, may_pin=False)
            return StatesCopy(n_past, buffer, [], 0, n_numbers)
        return StatesCopy(n_past, self._new_buffer(), self.spare, self._most, n_numbers)

    def pin_ahead(self, n: int = _AHEAD) -> None:
        """From now on have a thread keep n blocks ready for the next copies."""
        if self._parts[0].device.can.streams and not self._pinner:
            self._pinner, self._most = ThreadPoolExecutor(1, "pin"), n
            self._pin_more()

    def _pin_more(self) -> None:
        """Have the thread pin a block, unless it is at it or there are enough."""
        is_pinning = self._pinning and not self._pinning.done()
        if self._pinner and not is_pinning and len(self.spare) < self._most:
            self._pinning = self._pinner.submit(self._pin)

    def _pin(self) -> None:
        with suppress(NativeError):  # the next copy asks again
            self.spare.append(self._new_buffer())

    def take_layer(
        self, copy: StatesCopy, slot: int, state: State, tensors: Iterable[Tensor]
    ) -> None:
        """Enqueue the copy of some states of a sequence in one stage, as they are now."""
        host, stream = _open(copy), state.device.compute.ptr
        for tensor in tensors:
            for start, at, n in state.pieces(tensor, slot, copy.n_past):
                to = host.address(self._at[tensor] + at)
                C.ggml_backend_tensor_get_async(stream, tensor, to, start, n)

    def take_states(self, slot: int, n_past: int) -> StatesCopy:
        """Copy the states of a sequence, which holds n_past positions, and wait for it."""
        copy = self.new_states(n_past)
        for part in self._parts:
            self.take_layer(copy, slot, part, part.kept)
        self.wait()
        self._check_alive()
        return copy

    def wait(self) -> None:
        """Wait until copies that were enqueued are complete."""
        for part in self._parts:
            part.device.synchronize()

    def _check_alive(self) -> None:
        """Check that what was copied came from all devices; of a lost worker it is zeros."""
        for part in self._parts:
            part.device.check_alive()

    def put_states(self, copy: StatesCopy, slot: int) -> None:
        """Enqueue that a sequence gets saved states."""
        host = _open(copy)
        if host.array.nbytes != max(1, self.states_bytes):
            raise InternalError(f"{host.array.nbytes} bytes of states, not {self.states_bytes}")
        for part in self._parts:
            for tensor in part.kept:
                for start, at, n in part.pieces(tensor, slot, copy.n_past):
                    source = host.address(self._at[tensor] + at)
                    C.ggml_backend_tensor_set_async(
                        part.device.compute.ptr, tensor, source, start, n
                    )

    def take_rows(self, slot: int, first: int, n: int) -> RowsCopy:
        """Copy the KV rows of n positions of a sequence, and wait for it."""
        caches = [tensor for part in self._parts for tensor in part.caches]
        parts = [np.empty((n, width), dtype=np.uint8) for width in self.row_widths]
        self.wait()
        for at, row, n_rows in runs_of(self._pool.run(slot, first, n)):
            for tensor, part in zip(caches, parts):
                target = ffi.from_buffer(part[at : at + n_rows])
                size = tensor.nb[1]
                C.ggml_backend_tensor_get(tensor, target, row * size, n_rows * size)
        self._check_alive()
        return RowsCopy(parts)

    def put_rows(self, copy: RowsCopy, skipped: int, slot: int, first: int) -> None:
        """Write saved rows, except the first `skipped`, to positions from `first` on, and wait.

        The sequence has pages for these positions.
        """
        shapes = [part.shape for part in copy.parts]
        if shapes != [(copy.n_rows, width) for width in self.row_widths]:
            raise InternalError(f"KV rows of shapes {shapes}, of widths {self.row_widths}")
        caches = [
            (part.device.compute.ptr, tensor) for part in self._parts for tensor in part.caches
        ]
        for at, row, n_rows in runs_of(self._pool.run(slot, first, copy.n_rows - skipped)):
            for (stream, tensor), part in zip(caches, copy.parts):
                source = ffi.from_buffer(part[skipped + at : skipped + at + n_rows])
                size = tensor.nb[1]
                C.ggml_backend_tensor_set_async(stream, tensor, source, row * size, n_rows * size)
        self.wait()

    def free_spare(self) -> None:
        """Free the memory of closed copies; those that are not closed stay."""
        if self._pinning:
            self._pinning.result()
        for buffer in self.spare:
            buffer.close()
        self.spare.clear()

    def close(self) -> None:
        """Free the memory of closed copies, and forget the layers; there are no more copies."""
        self.free_spare()
        self._parts.clear()
