"""Copies of what a sequence has computed: states and KV rows.

States are what belongs to the last position: recurrent states, and the windows of layers that have
one (`State.kept`).

A snapshot lies on the device. KV rows need no copy there: a sequence only appends to them, so going
back means forgetting the last ones. That holds until the sequence itself goes back further, or is
emptied. Then the rows are gone, and with them every snapshot of a later position.

Copies in host memory take no device memory and stay valid whatever happens to the sequence: they
can be put into any sequence. They are on their way while other passes go on (tohost.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from weakref import WeakSet

import numpy as np

from ..errors import InternalError, NativeError, RequestError
from ..ggml.handles import Owner, closed_on_failure
from ..ggml.lib import C, ffi
from ..ggml.memory import Block
from ..ggml.ops import Tensor
from .kvpool import KVPool, runs_of
from .state import State
from .tohost import Arriving, Bytes, ToHost


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


Parts = list[Bytes]


class StatesCopy(Arriving):
    """The states of a sequence after its first n_past positions.

    memory: U8 numpy [n_bytes], where they are or are going to be.
    """

    def __init__(self, n_past: int, n_bytes: int, n_numbers: int) -> None:
        """n_numbers: F32 numbers, which come first: recurrent states."""
        self.n_past, self.n_bytes, self._n_numbers = n_past, n_bytes, n_numbers
        self.memory: Bytes = np.empty(n_bytes, np.uint8)

    @property
    def array(self) -> Bytes:
        """Return the bytes once all are there."""
        if not self.has_arrived:
            raise NativeError("states could not be copied to host memory")
        return self.memory

    @property
    def is_finite(self) -> bool:
        """Whether all is there, and all numbers of recurrent states are finite."""
        words = self.memory[: 4 * self._n_numbers].view(np.float32)
        return self.has_arrived and bool(np.isfinite(words).all())


class RowsCopy(Arriving):
    """KV rows of consecutive positions: of each cache, U8 numpy [n_rows, bytes of a row].

    drafted: by drafter, rows of its own caches, U8 [m, bytes of a row]: those of the last m
    positions. n_rows: positions. n_bytes: the memory that they take.
    """

    def __init__(self, parts: Parts, drafted: dict[str, Parts] | None = None) -> None:
        self._parts, self.n_rows, self.n_bytes = parts, len(parts[0]), 0
        self.drafted = drafted or {}
        for each in (parts, *self.drafted.values()):
            self.n_bytes += sum(part.nbytes for part in each)

    @property
    def parts(self) -> Parts:
        """Return the rows of each cache once all are there."""
        if not self.has_arrived:
            raise NativeError("KV rows could not be copied to host memory")
        return self._parts

    @classmethod
    def joined(cls, copies: Sequence[RowsCopy]) -> RowsCopy:
        """Return one copy of runs that follow one another; it may share their memory."""
        if len(copies) == 1:
            return cls(list(copies[0].parts), dict(copies[0].drafted))
        parts = [np.concatenate(each) for each in zip(*(copy.parts for copy in copies))]
        drafted = {name: _last_rows(copies, name) for name in copies[-1].drafted}
        return cls(parts, drafted)

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
    states of a sequence. row_widths: of a KV row in each cache.
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._parts: list[State] = []
        self._to_host: dict[State, ToHost] = {}
        self._messages: list[str] = []
        self._at: dict[Tensor, int] = {}  # where each state is in a copy
        self.states_bytes = self._n_numbers = 0
        self.row_widths: list[int] = []

    def add(self, state: State) -> None:
        """Have later copies hold these layers too; there are none yet."""
        self._parts.append(state)
        self._to_host[state] = ToHost(state.device, self._messages)
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

    def new_states(self, n_past: int) -> StatesCopy:
        """Return memory for the states after n_past positions; `take_layer` fills it."""
        return StatesCopy(n_past, max(1, self.states_bytes), self._n_numbers)

    def reserve(self) -> None:
        """Pin the least memory that copies go through; NativeError if there is none."""
        for to_host in self._to_host.values():
            to_host.reserve()

    def limit_pinned(self, n_bytes: int) -> None:
        """Have copies go through at most so much pinned memory, but one block of each device."""
        for to_host in self._to_host.values():
            to_host.max_bytes = n_bytes // len(self._to_host)

    @property
    def pinned_bytes(self) -> int:
        """Return the bytes of pinned memory that copies go through."""
        return sum(to_host.pinned_bytes for to_host in self._to_host.values())

    def take_layer(
        self, copy: StatesCopy, slot: int, state: State, tensors: Iterable[Tensor]
    ) -> None:
        """Enqueue the copy of some states of a sequence in one stage, as they are now."""
        pieces = []
        for tensor in tensors:
            first = self._at[tensor]
            for start, at, n in state.pieces(tensor, slot, copy.n_past):
                pieces.append((tensor, start, copy.memory[first + at : first + at + n]))
        self._to_host[state].take(copy, pieces)

    def take_states(self, slot: int, n_past: int) -> StatesCopy:
        """Copy the states of a sequence, which holds n_past positions, after the pass in flight."""
        copy = self.new_states(n_past)
        for part in self._parts:
            self.take_layer(copy, slot, part, part.kept)
        self.send()
        return copy

    def send(self) -> None:
        """Have all that was enqueued arrive by itself."""
        for to_host in self._to_host.values():
            to_host.send()

    def wait(self) -> None:
        """Wait until the devices are idle."""
        self.send()
        for part in self._parts:
            part.device.synchronize()

    def drain_messages(self) -> list[str]:
        """Return the messages since the last call."""
        # threads of two devices may have said the same
        return [*dict.fromkeys(self._messages.pop(0) for _ in [*self._messages])]

    def put_states(self, copy: StatesCopy, slot: int) -> None:
        """Have a sequence get saved states, and wait."""
        if len(copy.array) != max(1, self.states_bytes):
            raise InternalError(f"{len(copy.array)} bytes of states, not {self.states_bytes}")
        for part in self._parts:
            for tensor in part.kept:
                for start, at, n in part.pieces(tensor, slot, copy.n_past):
                    at += self._at[tensor]
                    source, stream = ffi.from_buffer(copy.array[at : at + n]), part.device.compute
                    C.ggml_backend_tensor_set_async(stream.ptr, tensor, source, start, n)
        self.wait()

    def take_rows(
        self, slot: int, first: int, n: int, drafted: dict[str, Parts] | None = None
    ) -> RowsCopy:
        """Copy the KV rows of n positions of a sequence, after the pass in flight."""
        # at once, because NumPy asks for huge pages only for large memory, and these fill faster
        memory = np.empty(n * self.row_bytes, np.uint8)
        each = zip(self.row_widths, np.split(memory, n * np.cumsum(self.row_widths)))
        parts = [part.reshape(n, width) for width, part in each]
        copy, left = RowsCopy(parts, drafted), iter(parts)
        runs = list(runs_of(self._pool.run(slot, first, n)))
        for state in self._parts:
            pieces = []
            for tensor in state.caches:
                part, size = next(left), tensor.nb[1]
                for at, row, n_rows in runs:
                    pieces.append((tensor, row * size, part[at : at + n_rows].reshape(-1)))
            self._to_host[state].take(copy, pieces)
        self.send()
        return copy

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

    def close(self) -> None:
        """Wait for copies under way, and forget the layers; there are no more copies."""
        with ExitStack() as stack:  # each, also if others are lost
            for to_host in self._to_host.values():
                stack.callback(to_host.close)
            self._to_host.clear()
            self._parts.clear()
