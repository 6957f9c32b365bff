"""Experts in host memory, packed as in a device slot, so that one copy uploads an expert.

The device copies from pinned memory at full PCIe speed without the host. Layers that are not pinned
(not wanted, refused by the driver, or too little host memory) are read from the file into a small
pinned ring before an upload (`FileRing`); `read` reports a truncated file as an error, where a
mapping would raise SIGBUS. The CPU computes experts where they are: in pinned memory or in the
mapped file.

Threads read the experts of a few layers straight into huge pages; meanwhile the layers before them
are pinned. Where the system cannot pin memory that it has given out (WSL, some virtual machines),
the driver allocates the blocks, which takes several times as long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..arch import ModelFile
from ..errors import ConfigError, NativeError
from ..ggml.device import Device, HostBuffer, HostPages
from ..ggml.free_memory import host_memory
from ..ggml.handles import Context, Event, Owner
from ..ggml.lib import C
from ..ggml.memory import place
from ..ggml.ops import F32, Tensor
from ..gguf import TensorInfo
from ..threads import usable_cpus
from ..units import MiB, format_bytes, round_up
from .layout import N_STAGING, Packing, expert_tensors
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

Key = tuple[int, int]  # (layer, expert)


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


def _read_expert(
    model: ModelFile, layers: dict[int, Layer], il: int, expert: int, out: npt.NDArray[np.uint8]
) -> None:
    infos, packing = layers[il]
    for part, info in infos.items():
        at, size = packing.offsets[part], packing.sizes[part]
        model.read(info, out[at : at + size], expert * size)
    packing.clear_gaps(out[: packing.n_bytes])  # there was another expert before


class FileRing(Owner):
    """Pinned blocks through which experts of the model file pass on their way to the device.

    Threads read experts that will be asked for into free blocks, while the device copies others and
    computes. One thread uses the ring, except for the reads themselves.

    A block is free, or an expert is being read into it or waits there, or it is being copied to the
    device. Which blocks are in use is found from what uses them, so an interrupt loses none.
    n_bytes: of all blocks.
    """

    def __init__(
        self, device: Device, layers: Collection[int], n_bytes: int,
        read: Callable[[int, int, npt.NDArray[np.uint8]], None],
    ) -> None:  # fmt: skip
        """layers: that are not pinned; without any there are no blocks.

        n_bytes: of the largest expert. read: reads (layer, expert) to a block, in any thread.
        """
        self._device, self._layers, self._read = device, layers, read
        n_blocks = _N_BLOCKS if layers else 0
        self.n_bytes = n_blocks * n_bytes
        self._blocks = [self.own(device.host_buffer(n_bytes)) for _ in range(n_blocks)]
        self._events = deque(self.own(device.event()) for _ in range(_N_UPLOADS))
        self._pool: ThreadPoolExecutor | None = None
        self._is_ending = False  # threads are asked to end, and may still run
        # block, and who reads; None if an interrupt came first. In the order of asking
        self._reads: dict[Key, tuple[int, Future[None] | None]] = {}
        self._taken: list[int] = []  # blocks whose upload is being enqueued
        self._copied: deque[tuple[Event | None, list[int]]] = deque()  # being copied, oldest first

    def ahead(self, wanted: Iterable[Key]) -> None:
        """Begin to read experts that will be asked for soon, as far as there are blocks.

        wanted: (layer, expert); pinned ones need nothing.

        The uploads before the last one have mostly ended, so it waits for them: else no block would
        be free, and experts would be read one at a time, as they are asked for.
        """
        for key in wanted:
            if key in self._reads or key[0] not in self._layers:
                continue
            while (at := self._free()) is None and len(self._copied) > 1:
                self._wait_for_oldest()
            if at is None:
                return
            self._begin(key, at)

    def take(self, il: int, expert: int) -> Any:
        """Return the address of an expert, once it is read; call `copied` when it is enqueued."""
        key = il, expert
        if self._reads.get(key, (0, self))[1] is None:
            self.forget()
        at, read = self._reads.get(key) or self._begin(key, self._room())
        try:
            if read:
                read.result()
            self._taken.append(at)
        finally:
            self._reads.pop(key, None)
        return self._blocks[at].address()

    def copied(self) -> None:
        """Note that the uploads of all that was taken are enqueued."""
        if not self._taken:
            return
        if len(self._copied) == _N_UPLOADS:
            self._wait_for_oldest()
        event = self._events[0]
        if event:
            C.ggml_backend_event_record(event.ptr, self._device.upload.ptr)
        self._copied.append((event, self._taken))
        self._events.rotate(-1)
        self._taken = []

    def forget(self) -> None:
        """Drop what was read ahead and is not taken; the next request may want other experts."""
        if self._pool:  # a thread may still write to a block
            self._is_ending = True
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool, self._is_ending = None, False
        self._reads = {}

    def _begin(self, key: Key, at: int) -> tuple[int, Future[None] | None]:
        if self._is_ending:  # a call of `forget` was interrupted
            self.forget()
        self._reads[key] = at, None
        if self._pool is None:
            n_threads = min(_MAX_THREADS, usable_cpus())
            self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix="moegraph-ahead")
        self._reads[key] = at, self._pool.submit(self._read, *key, self._blocks[at].array)
        return self._reads[key]

    def _free(self) -> int | None:
        used = {at for at, _ in self._reads.values()}.union(self._taken)
        used.update(*(blocks for _, blocks in self._copied))
        return next((at for at in range(len(self._blocks)) if at not in used), None)

    def _room(self) -> int:
        """Return a block that nothing uses, if need be after waiting for one."""
        while (at := self._free()) is None:
            if self._copied:
                self._wait_for_oldest()
            elif self._reads:  # what is wanted now goes before what is wanted later
                self.forget()
            else:
                self.copied()
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
    stops before the host runs short of memory, and if the driver refuses to pin more; the other
    layers are read from the file, and `warning` says so. With the CPU device, 'auto' pins nothing.
    rows: the experts of each pinned layer as F32 [bytes / 4, n_expert], which a device can read.
    ring: through which the others pass.
    pinned_bytes: host memory taken, including the ring. in_place: the names of the stacks that are
    read from the file.
    """

    def __init__(
        self, device: Device, model: ModelFile, layers: Sequence[int], pin: str,
        report: Callable[[int], None] = lambda n: None,
    ) -> None:  # fmt: skip
        """Copy experts; report: called with bytes of the file that have been read."""
        self._device, self._model, self._report = device, model, report
        stacks = {il: expert_tensors(model, il) for il in layers}
        self._layers = {il: Layer(infos, Packing.of(infos)) for il, infos in stacks.items()}
        self.warning = self._why = ""  # why not all layers are pinned
        self.rows: dict[int, Tensor] = {}
        self._pinned: dict[int, HostBuffer] = {}
        size = max((layer.packing.n_bytes for layer in self._layers.values()), default=0)
        self._must = pin == "all"
        if layers and (self._must or (pin == "auto" and device.can.own_memory)):
            self._registers = _registers(device)
            self._pin(_N_BLOCKS * size)
        left = [il for il in layers if il not in self._pinned]
        read = partial(_read_expert, model, self._layers)
        self.ring = self.own(FileRing(device, left, size, read))
        self.pinned_bytes = sum(block.array.nbytes for block in self._pinned.values())
        self.pinned_bytes += self.ring.n_bytes
        self.in_place = frozenset(
            info.name for il in left for info in self._layers[il].infos.values()
        )

    def _pin(self, beside: int) -> None:
        """Copy and pin as many layers as may be; beside: bytes of the ring, if that is not all."""
        layers, pinned = self._layers, self._pinned
        if self._must:
            short = shortage(sum(map(self._size, layers)), host_memory().available)
            if short:
                raise ConfigError(f"host_pin 'all' needs {short}; use --host-pin auto or none")
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
        for n_seen, (il, layer) in enumerate(self._layers.items(), 1):
            size = self._size(il)
            # count what we took as well: a control group may not see what the driver pins
            at_most = None if free is None else free - taken
            wanted = size + (beside if n_seen < len(self._layers) else 0)
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
        self._report(sum(info.nbytes for info in self._layers[il].infos.values()))
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

    def source(self, il: int, expert: int) -> Any:
        """Return the address of a packed expert.

        If it is not pinned, call `FileRing.copied` after at most N_STAGING calls.
        """
        base = self.pinned(il)
        if base is None:
            return self.ring.take(il, expert)
        return base + expert * self._layers[il].packing.stride

    def pinned(self, il: int) -> Any:
        """Return the address of the first expert of a layer in pinned memory; None if it is not.

        Experts are `packing(il).stride` bytes apart.
        """
        block = self._pinned.get(il)
        return block.address() if block else None
