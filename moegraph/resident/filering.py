"""A ring of pinned blocks: experts of the model file pass through it on their way to the device.

Threads read experts that will be asked for into blocks that are free, while the device copies
others and computes. So a prompt waits for the disk only where the disk is slower than all else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ggml.device import Device
from ..ggml.handles import Event
from ..ggml.lib import C
from ..threads import usable_cpus
from .layout import N_STAGING

# More threads do not read faster: a disk has not more requests under way, and the page cache is as
# fast as memory.
_MAX_THREADS = 16
# It takes as long to hand the read of a smaller expert to a thread as to do it.
_THREADED_BYTES = 256 << 10
# Uploads that may be under way at once; each has an event.
_N_UPLOADS = 4

# Blocks of a ring: half of them wait or are read while the others are copied.
_N_BLOCKS = 2 * N_STAGING

Key = tuple[int, int]  # (layer, expert)


def file_ring_bytes(n_bytes: int) -> int:
    """Return the host memory of a ring; n_bytes: of the largest expert."""
    return _N_BLOCKS * n_bytes


class _Read:
    """A read into block `at`; future is None only if an interrupt came as it began."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.future: Future[None] | None = None


class FileRing:
    """Blocks of host memory. One thread uses it, except for the reads themselves.

    A block is free, or an expert is being read into it or waits there, or it is being copied to the
    device. Which blocks are in use is found from what uses them, so an interrupt loses none.
    """

    def __init__(
        self, device: Device, n_bytes: int, read: Callable[[int, int, npt.NDArray[np.uint8]], None]
    ) -> None:
        """n_bytes: of the largest expert. read: reads (layer, expert) into a block, in any thread.

        Raises:
            NativeError: there is no host memory.
        """
        self._device, self._read = device, read
        self._blocks = [device.host_buffer(n_bytes) for _ in range(_N_BLOCKS)]
        self._events = deque(device.event() for _ in range(_N_UPLOADS))
        self._is_threaded = n_bytes >= _THREADED_BYTES and usable_cpus() > 1
        self._pool: ThreadPoolExecutor | None = None
        self._is_ending = False  # threads are asked to end, and may still run
        self._reads: dict[Key, _Read] = {}  # in the order in which they were asked for
        self._taken: list[int] = []  # blocks whose upload is being enqueued
        self._copied: deque[tuple[Event | None, list[int]]] = deque()  # being copied, oldest first

    @property
    def n_bytes(self) -> int:
        """Host memory of all blocks."""
        return sum(block.array.nbytes for block in self._blocks)

    def ahead(self, wanted: Iterable[Key]) -> None:
        """Begin to read experts that will be asked for soon, as far as there are blocks.

        The uploads before the last one have mostly ended, so it waits for them: else no block would
        be free, and experts would be read one at a time, as they are asked for.
        """
        for key in wanted if self._is_threaded else ():
            if key in self._reads:
                continue
            while (at := self._free()) is None and len(self._copied) > 1:
                self._wait_for_oldest()
            if at is None:
                return
            self._begin(key, at)

    def take(self, il: int, expert: int) -> Any:
        """Return the address of an expert, once it is read; call `copied` when it is enqueued.

        Raises:
            ModelFileError: the file is shorter than its header says.
        """
        key = il, expert
        found = self._reads.get(key)
        if found is not None and found.future is None:
            self.forget()
            found = None
        if found is None:
            found = self._begin(key, self._room())
        try:
            if found.future:
                found.future.result()
            else:
                self._read(il, expert, self._blocks[found.at].array)
            self._taken.append(found.at)
        finally:
            self._reads.pop(key, None)
        return self._blocks[found.at].address()

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

    def _begin(self, key: Key, at: int) -> _Read:
        """Have a thread read an expert into block `at`, if that is worth a thread."""
        found = self._reads[key] = _Read(at)
        if self._is_threaded:
            if self._is_ending:  # a call of `forget` was interrupted
                self.forget()
                found = self._reads[key] = _Read(at)
            if self._pool is None:
                n_threads = min(_MAX_THREADS, usable_cpus())
                self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix="moegraph-read")
            found.future = self._pool.submit(self._read, *key, self._blocks[at].array)
        return found

    def _free(self) -> int | None:
        """Return a block that nothing uses; None if there is none."""
        used = {found.at for found in self._reads.values()}.union(self._taken)
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
        for handle in (*self._events, *self._blocks):
            if handle:
                handle.close()
