"""Experts in host memory, packed as in a device slot, so that one copy uploads an expert.

The device copies from pinned memory at full PCIe speed without the host. Layers that are not pinned
(not wanted, refused by the driver, or too little host memory) are read from the file into a small
pinned ring before an upload (`FileRing`); `read` reports a truncated file as an error, where a
mapping would raise SIGBUS. The CPU computes experts where they are: in pinned memory or in the
mapped file.

Where host memory cannot hold all experts, it is a cache of them: blocks hold some for good, and the
others pass through further blocks (`FileRing`, experts/hostlevel.py). They are read past the page
cache, by several threads at once.

Threads read the experts of a few layers straight into huge pages; meanwhile the layers before them
are pinned. Where the system cannot pin memory that it has given out (WSL, some virtual machines),
the driver allocates the blocks, which takes several times as long.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..arch import ModelFile
from ..errors import ConfigError, InternalError, NativeError
from ..ggml.device import Device, HostBuffer, HostPages
from ..ggml.free_memory import host_memory
from ..ggml.handles import Context, Event, Owner
from ..ggml.lib import C
from ..ggml.memory import place
from ..ggml.ops import F32, Tensor
from ..gguf import TensorInfo
from ..gguf.directfile import PIECE_BYTES as DIRECT_BYTES
from ..gguf.directfile import DirectFile
from ..threads import usable_cpus
from ..units import GiB, MiB, format_bytes, format_share, round_up
from .layout import N_STAGING, Packing, expert_tensors, host_slots, n_passing, passing_bytes
from .weights import PIECE_BYTES, Readers

# Layers that are read at the same time.
_N_AT_ONCE = 4
# Layers that are read: the memory of each, and the reads into it.
_Begun = deque[tuple[int, HostBuffer, list[Future[None]]]]


class Layer(NamedTuple):
    """A layer that is not full: its stacks in the file, and how an expert is packed."""

    infos: dict[str, TensorInfo]
    packing: Packing


def _registers(device: Device) -> bool:
    """Return whether the device can pin memory that the system has given out."""
    try:
        with closing(HostPages(2 * MiB)) as probe:
            device.pin(probe)
    except NativeError:
        return False
    return True


def shortage(size: int, at_most: int | None) -> str:
    """Return why taking size bytes would leave too little host memory; empty if it would not.

    at_most: upper limit of the available bytes by our own count; None if unknown.
    """
    memory = host_memory()
    if memory.available is None or at_most is None:
        return ""
    available = max(0, min(memory.available, at_most))
    if size + memory.reserve <= available:
        return ""
    limit = memory.limit
    of = "" if limit is None else f" (the control group may use {format_bytes(limit)})"
    return (
        f"{format_bytes(size)} of host memory, {format_bytes(available)} are available{of}, and "
        f"{format_bytes(memory.reserve)} of them stay free"
    )


# More threads do not read faster: a disk has not more requests under way, and the page cache is as
# fast as memory.
_MAX_THREADS = 16
# Uploads that may be under way at once; each has an event.
_N_UPLOADS = 4

# Blocks of a ring: half of them wait or are read while the others are copied.
_N_BLOCKS = 2 * N_STAGING
# Host memory that is taken at a time.
_AT_A_TIME = 1 * GiB

Key = tuple[int, int]  # (layer, expert)
Job = Callable[[], None]


def _read_experts(readers: Readers, layer: Layer, out: npt.NDArray[np.uint8]) -> list[Future[None]]:
    """Begin to read all experts of a layer; out: U8 [n_expert, packing.stride], numpy shape."""
    begun = []
    for part, info in layer.infos.items():
        at, size = layer.packing.offsets[part], layer.packing.sizes[part]
        rows, step = out[:, at : at + size], max(1, PIECE_BYTES // size)
        begun += [
            readers.read(info, rows[first : first + step], first * size)
            for first in range(0, len(out), step)
        ]
    return begun


def _reads_of(
    file: ModelFile | DirectFile, step: int, layers: Mapping[int, Layer], il: int, expert: int,
    out: npt.NDArray[np.uint8],
) -> Iterator[Job]:  # fmt: skip
    """Yield what reads an expert to a block, in any order; step: bytes that one of them reads."""
    infos, packing = layers[il]
    packing.clear_gaps(out[: packing.n_bytes])  # there was another expert before
    for part, info in infos.items():
        at, size = packing.offsets[part], packing.sizes[part]
        for start in range(0, size, step):
            piece = out[at + start : at + min(start + step, size)]
            yield partial(file.read, info, piece, expert * size + start)


class _Piece(NamedTuple):
    """A part of host memory: its bytes, and the address of the first."""

    array: npt.NDArray[np.uint8]
    address: Any


class FileRing(Owner):
    """Blocks of host memory that hold experts, and through which others of the file pass.

    Threads read experts that will be asked for into free blocks, while the device copies others and
    computes. One thread uses the ring, except for the reads themselves.

    A block is free, or holds an expert for good, or an expert is being read into it or waits there,
    or it is being copied to the device. Which blocks are in use is found from what uses them, so an
    interrupt loses none.
    n_bytes: of all blocks. n_read_bytes, waited_s: bytes of experts that were read from the file,
    and seconds in which the caller waited for them. wanted: of what is taken next, what stays.
    """

    def __init__(
        self, device: Device, kinds: Mapping[int, int], pieces: Mapping[int, Sequence[_Piece]],
        jobs: Callable[[int, int, npt.NDArray[np.uint8]], Iterable[Job]], n_threads: int,
    ) -> None:  # fmt: skip
        """kinds: of each layer, which blocks it uses; pieces: those of each kind.

        jobs: returns what threads do to read (layer, expert) to a block.
        """
        self._device, self._kinds, self._jobs = device, kinds, jobs
        self._blocks = [piece for each in pieces.values() for piece in each]
        self._kind_of = [kind for kind, each in pieces.items() for _ in each]
        self.n_bytes = sum(piece.array.nbytes for piece in self._blocks)
        self._events = deque(self.own(device.event()) for _ in range(_N_UPLOADS))
        self._saved = self.own(device.event())
        self._n_threads, self._pool = n_threads, list[ThreadPoolExecutor]()
        self._is_ending = False  # threads are asked to end, and may still run
        # block, and who reads; None if an interrupt came first. In the order of asking
        self._reads: dict[Key, tuple[int, list[Future[None]] | None]] = {}
        self._held: dict[Key, int] = {}
        self._taken: dict[int, Key] = {}  # blocks whose upload is being enqueued
        self._copied: deque[tuple[Event | None, list[int]]] = deque()  # being copied, oldest first
        self._saving: set[int] = set()  # held, while the stream of graphs fills them
        self._passing: dict[int, list[int]] = {}  # blocks that hold nothing for good, by kind
        self.wanted: set[Key] = set()
        self.n_read_bytes, self.waited_s = 0, 0.0
        self._find_passing()

    def _find_passing(self) -> None:
        held = set(self._held.values())
        self._passing = {kind: [] for kind in self._kinds.values()}
        for at, kind in enumerate(self._kind_of):
            if at not in held:
                self._passing[kind].append(at)

    def ahead(self, wanted: Iterable[Key]) -> None:
        """Begin to read experts that will be asked for soon, as far as there are blocks.

        wanted: (layer, expert); pinned ones need nothing.

        The uploads before the last one have mostly ended, so it waits for them: else no block would
        be free, and experts would be read one at a time, as they are asked for.
        """
        for key in wanted:
            if key in self._reads or key in self._held or key[0] not in self._kinds:
                continue
            while (at := self._free(key[0])) is None and len(self._copied) > 1:
                self._wait_for_oldest()
            if at is None:
                return
            self._begin(key, at)

    def take(self, il: int, expert: int) -> Any:
        """Return the address of an expert, once it is read; call `copied` when it is enqueued."""
        key = il, expert
        if key in self._held:
            self._settle(self._held[key])
            return self._blocks[self._held[key]].address
        if self._reads.get(key, (0, self))[1] is None:
            self.forget()
        at, reads = self._reads.get(key) or self._begin(key, self._room(il))
        start = time.perf_counter()
        try:
            for read in reads or ():
                read.result()
            self._taken[at] = key
        finally:
            self._reads.pop(key, None)
        self.waited_s += time.perf_counter() - start
        self.n_read_bytes += self._blocks[at].array.nbytes
        if key in self.wanted:
            self._hold(key, at)
        return self._blocks[at].address

    def copied(self) -> None:
        """Note that the uploads of all that was taken are enqueued."""
        if not self._taken:
            return
        if len(self._copied) == _N_UPLOADS:
            self._wait_for_oldest()
        event = self._events[0]
        if event:
            C.ggml_backend_event_record(event.ptr, self._device.upload.ptr)
        self._copied.append((event, list(self._taken)))
        self._events.rotate(-1)
        self._taken = {}

    def held(self, il: int) -> set[int]:
        """Return the experts of a layer that blocks hold."""
        return {expert for at, expert in self._held if at == il}

    def holds(self, il: int, expert: int) -> bool:
        """Return whether a block holds an expert."""
        return (il, expert) in self._held

    def _hold(self, key: Key, at: int) -> None:
        self._passing[self._kind_of[at]].remove(at)  # an interrupt here loses it until `forget`
        self._held[key] = at

    def drop(self, il: int, expert: int) -> None:
        """Have the block of an expert hold it no longer, after the uploads from it."""
        at = self._held.pop((il, expert), None)
        if at is not None:
            self._settle(at)
            self._taken[at] = il, expert
            self._passing[self._kind_of[at]].append(at)

    def save(self, il: int, expert: int, memory: Tensor, start: int, n: int, late: bool) -> None:
        """Enqueue the copy of an expert from the device, from a byte of a tensor, to hold it.

        late: on the stream of graphs, else on that of uploads.
        """
        at, stream = self._room(il), self._device.compute if late else self._device.upload
        self._taken[at] = il, expert
        C.ggml_backend_tensor_get_async(stream.ptr, memory, self._blocks[at].address, start, n)
        if late and self._saved:
            C.ggml_backend_event_record(self._saved.ptr, stream.ptr)
            self._saving.add(at)
        self._hold((il, expert), at)

    def _settle(self, at: int) -> None:
        """Have uploads wait for the stream of graphs, if that may still fill the block."""
        if at in self._saving and self._saved:
            C.ggml_backend_event_wait(self._device.upload.ptr, self._saved.ptr)
            self._saving.clear()

    def forget(self) -> None:
        """Drop what was read ahead and is not taken; the next request may want other experts."""
        for pool in self._pool:  # a thread may still write to a block
            self._is_ending = True
            pool.shutdown(wait=True, cancel_futures=True)
        self._pool, self._is_ending = [], False
        self._reads = {}
        self._find_passing()

    def _begin(self, key: Key, at: int) -> tuple[int, list[Future[None]] | None]:
        if self._is_ending:  # a call of `forget` was interrupted
            self.forget()
        self._reads[key] = at, None
        if not self._pool:
            name = "moegraph-ahead"
            self._pool = [ThreadPoolExecutor(self._n_threads, thread_name_prefix=name)]
        jobs = self._jobs(*key, self._blocks[at].array)
        self._reads[key] = at, [self._pool[0].submit(job) for job in jobs]
        return self._reads[key]

    def _free(self, il: int) -> int | None:
        used = {at for at, _ in self._reads.values()}.union(self._taken)
        used.update(*(blocks for _, blocks in self._copied))
        return next((at for at in self._passing[self._kinds[il]] if at not in used), None)

    def _room(self, il: int) -> int:
        """Return a block that nothing uses, if need be after waiting for one."""
        while (at := self._free(il)) is None:
            if self._copied:
                self._wait_for_oldest()
            elif self._reads:  # what is wanted now goes before what is wanted later
                self.forget()
            elif self._taken:
                self.copied()
            else:
                raise InternalError("no block of host memory is free")
        return at

    def _wait_for_oldest(self) -> None:
        event, _ = self._copied[0]
        if event:
            event.wait()
        self._copied.popleft()

    def close(self) -> None:
        """End the threads and free the memory. No upload may be under way."""
        self.forget()
        super().close()


def raw_rows(context: Context, packing: Packing, n: int) -> Tensor:
    """Make a tensor F32 [bytes / 4, n] whose rows are the raw bytes of n packed experts."""
    # the kernel that fetches a row copies 16 bytes at a time
    tensor = C.ggml_new_tensor_2d(context.ptr, F32, round_up(packing.n_bytes, 16) // 4, n)
    tensor.nb[1] = packing.stride
    tensor.nb[2] = tensor.nb[3] = packing.stride * n
    return tensor


class ExpertStore(Owner):
    """The experts of layers that are not full, in host memory that the upload stream can read.

    pin: 'all' and 'auto' copy the layers into pinned memory at start, 'none' copies none. 'auto'
    takes what host memory there is, and stops if the driver refuses to pin more. With the CPU
    device, 'auto' pins nothing unless host_mem says how much. If not all experts have room, host
    memory is a cache: `n_held` says of how many experts of a layer. `warning` says what is where.
    rows: the experts of each pinned layer as F32 [bytes / 4, n_expert], which a device can read.
    ring: through which the others pass.
    pinned_bytes: host memory taken, including the ring. in_place: the names of the stacks that are
    read from the file.
    """

    def __init__(
        self, device: Device, model: ModelFile, layers: Sequence[int], pin: str,
        report: Callable[[int], None] = lambda n: None, n_slots: Sequence[int] = (),
        host_mem: int | None = None, share: float = 1.0,
    ) -> None:  # fmt: skip
        """Copy experts; report: called with bytes of the file that have been read.

        n_slots: the device's, by layer; () for none. host_mem: bytes for copies; None: what is
        free, of which this store may take a share.
        """
        self._device, self._model, self.report = device, model, report
        stacks = {il: expert_tensors(model, il) for il in layers}
        self._layers = {il: Layer(infos, Packing.of(infos)) for il, infos in stacks.items()}
        self._n_slots = n_slots or [0] * model.hparams.n_layer
        self.warning = self._why = ""  # why not all layers are pinned
        self.rows: dict[int, Tensor] = {}
        self.n_held: dict[int, int] = {}
        self._pinned: dict[int, HostBuffer] = {}
        size = max((layer.packing.n_bytes for layer in self._layers.values()), default=0)
        self._must = pin == "all"
        self._registers = False
        if layers and (self._must or host_mem or (pin == "auto" and device.can.own_memory)):
            self._registers = _registers(device)
            self._divide(host_mem, share)
            self._pin(_N_BLOCKS * size)
        left = [il for il in layers if il not in self._pinned]
        self.ring = self._open_cache(left) if self.n_held else self._open_ring(left, size)
        self.pinned_bytes = sum(block.array.nbytes for block in self._pinned.values())
        self.pinned_bytes += self.ring.n_bytes
        self.in_place = frozenset(
            info.name for il in left if not self.n_held for info in self.infos(il).values()
        )

    def _divide(self, host_mem: int | None, share: float) -> None:
        """Decide how many experts of each layer host memory holds, if not all."""
        room, n_expert = host_mem, self._model.hparams.n_expert
        sizes = {il: layer.packing.stride for il, layer in self._layers.items()}
        total = n_expert * sum(sizes.values())
        if self._must and host_mem is not None and host_mem < total:
            raise ConfigError(
                f"host_pin 'all' needs {format_bytes(total)} of host memory, and --host-mem allows "
                f"{format_bytes(host_mem)}; use --host-pin auto"
            )
        if not self._must and host_mem is None:
            spare = host_memory().spare
            room = None if spare is None else int(spare * share)
        elif short := shortage(min(total, room or total), host_memory().available):
            what = "host_pin 'all'" if self._must else "--host-mem"
            remedy = "use --host-pin auto or none" if self._must else "allow less"
            raise ConfigError(f"{what} needs {short}; {remedy}")
        found = host_slots(None if self._must else room, sizes, self._n_slots, n_expert)
        held = {il: n for il, n in found.items() if n < n_expert}
        if any(held.values()):
            self.n_held = held
        elif held and host_mem is not None:
            raise ConfigError(
                f"--host-mem allows {format_bytes(host_mem)} for copies of experts, and "
                f"{format_bytes(passing_bytes(sizes.values()) + sum(sizes.values()))} is the least "
                "for one of each layer; allow more"
            )

    def _open_ring(self, layers: Sequence[int], size: int) -> FileRing:
        """Return blocks through which experts pass; size: of the largest."""
        n_blocks = _N_BLOCKS if layers else 0
        hosts = [self.own(self._device.host_buffer(size)) for _ in range(n_blocks)]
        pieces = {0: [_Piece(host.array, host.address()) for host in hosts]}
        reads = partial(_reads_of, self._model, size, self._layers)
        n_threads = min(_MAX_THREADS, usable_cpus())
        return self.own(FileRing(self._device, dict.fromkeys(layers, 0), pieces, reads, n_threads))

    def _open_cache(self, layers: Sequence[int]) -> FileRing:
        """Return blocks that hold experts, and others through which experts pass."""
        kinds = {il: self._layers[il].packing.stride for il in layers}
        n_blocks = {kind: n_passing(kind) for kind in kinds.values()}
        for il, kind in kinds.items():
            n_blocks[kind] += self.n_held.get(il, 0)
        pieces = {kind: list(self._pieces(kind, n)) for kind, n in n_blocks.items()}
        direct = self.own(DirectFile(self._model))
        reads = partial(_reads_of, direct, DIRECT_BYTES, self._layers)
        ring = self.own(FileRing(self._device, kinds, pieces, reads, _MAX_THREADS))
        self.warning = self._where(direct.is_direct)
        return ring

    def _pieces(self, size: int, n: int) -> Iterator[_Piece]:
        """Allocate n blocks of a size, pinned as far as the driver pins."""
        at_most = max(1, _AT_A_TIME // size)
        for first in range(0, n, at_most):
            n_bytes = size * min(at_most, n - first)
            host = self._allocate(n_bytes) or HostPages(n_bytes)
            self.own(host)
            try:
                if isinstance(host, HostPages):
                    self._device.pin(host)
            except NativeError as error:  # copies from memory that is not pinned are slower
                self._refused(error)
            for start in range(0, n_bytes, size):
                yield _Piece(host.array[start : start + size], host.address(start))

    def _where(self, is_direct: bool) -> str:
        """Return a line that says where the experts are."""
        n_expert, total, parts = self._model.hparams.n_expert, 0, [0, 0, 0]
        for il, layer in self._layers.items():
            device, host = self._n_slots[il], self.n_held.get(il, n_expert)
            total += n_expert * layer.packing.stride
            for at, n in enumerate((device, host, max(0, n_expert - device - host))):
                parts[at] += n * layer.packing.stride
        on_device, on_host, alone = (format_share(n / total) for n in parts)
        how = "past" if is_direct else "through"
        line = (
            f"of the experts that can be missing, the device holds {on_device}, host memory "
            f"{on_host} ({format_bytes(parts[1])}), and the file alone {alone}, read {how} the "
            "page cache"
        )
        return f"{line}: {self._why}" if self._why else line

    def _pin(self, beside: int) -> None:
        """Copy and pin layers of which all experts have room.

        beside: bytes of the ring, if that is not all.
        """
        layers, pinned = self._layers, self._pinned
        begun: _Begun = deque()
        try:
            with closing(Readers(self._model)) as readers:
                self._copy(readers, begun, beside)
        finally:  # the memory goes after those that read into it
            for _, block, _ in begun:
                block.close()
        context = self.own(Context(len(layers) + 1))
        for il, block in pinned.items():
            self.rows[il] = raw_rows(context, layers[il].packing, self._model.hparams.n_expert)
            place(block, self.rows[il], 0)
        if self._why:
            taken = sum(block.array.nbytes for block in pinned.values())
            self.warning = (
                f"pinned host memory holds the experts of {len(pinned)} of {len(layers)} "
                f"layers ({format_bytes(taken)}), the others are read from the file: {self._why}"
            )

    def _copy(self, readers: Readers, begun: _Begun, beside: int) -> None:
        """Copy layer by layer until all are done or one cannot be."""
        taken, free = 0, host_memory().available
        layers = {il: x for il, x in self._layers.items() if il not in self.n_held}
        for n_seen, (il, layer) in enumerate(layers.items(), 1):
            size = self._size(il)
            # count what we took as well: a control group may not see what the driver pins
            at_most = None if free is None else free - taken
            wanted = size + (beside if n_seen < len(layers) else 0)
            short = "" if self._must else shortage(wanted, at_most)
            if short:
                self._why = f"the next layer needs {short}"
                break
            if len(begun) == _N_AT_ONCE and not self._finish(begun):
                return
            block = self._allocate(size)
            if block is None:
                break
            taken += size
            rows = block.array.reshape(-1, layer.packing.stride)
            if not self._registers:  # what the driver gives may hold anything
                layer.packing.clear_gaps(rows)
            begun.append((il, block, _read_experts(readers, layer, rows)))
        while begun and self._finish(begun):
            pass

    def _size(self, il: int) -> int:
        return self._layers[il].packing.stride * self._model.hparams.n_expert

    def _allocate(self, size: int) -> HostBuffer | None:
        try:
            if self._registers:
                return HostPages(size)
            return self._device.host_buffer(size, must_pin=True)
        except NativeError as error:
            self._refused(error)
            return None

    def _finish(self, begun: _Begun) -> bool:
        """Wait for the first layer of `begun` and pin it; return whether that worked."""
        il, block, reads = begun[0]
        for read in reads:
            read.result()
        try:
            if isinstance(block, HostPages):
                self._device.pin(block)
        except NativeError as error:
            self._refused(error)
            return False
        self._pinned[il] = self.own(block)
        begun.popleft()
        self.report(sum(info.nbytes for info in self._layers[il].infos.values()))
        return True

    def _refused(self, error: NativeError) -> None:
        if self._must:
            raise error
        self._why = str(error)

    @property
    def layers(self) -> list[int]:
        """The layers whose experts are in this store."""
        return list(self._layers)

    def stacks(self, il: int) -> dict[str, tuple[TensorInfo, int, int, Any]]:
        """Return (info, address, bytes from expert to expert, owner) of a layer's stacks, by part.

        The addresses are in pinned memory or in the mapped file, and valid while the owner lives.
        """
        (infos, packing), pinned = self._layers[il], self._pinned.get(il)
        found: dict[str, tuple[TensorInfo, int, int, Any]] = {}
        for part, info in infos.items():
            if pinned:
                found[part] = (info, pinned.base + packing.offsets[part], packing.stride, pinned)
            else:
                address = self._model.map(info).ctypes.data
                found[part] = (info, address, packing.sizes[part], self._model)
        return found

    @property
    def is_aligned(self) -> bool:
        """Whether every expert is aligned to 32 bytes, as ggml's CPU kernels need."""
        return all(
            address % 32 == 0
            for il in self._layers
            for _, address, _, _ in self.stacks(il).values()
        )

    def infos(self, il: int) -> dict[str, TensorInfo]:
        """Return a layer's expert stacks in the file, by part."""
        return self._layers[il].infos

    def packing(self, il: int) -> Packing:
        """Return how an expert of a layer is packed."""
        return self._layers[il].packing

    def pinned(self, il: int) -> Any:
        """Return the address of the first expert of a layer in pinned memory; None if it is not.

        Experts are `packing(il).stride` bytes apart.
        """
        block = self._pinned.get(il)
        return block.address() if block else None
