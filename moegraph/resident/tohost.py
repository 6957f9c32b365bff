"""Copies from a device to ordinary host memory, behind the passes in flight.

A device copies to pinned memory in a third of the time, and nobody waits. But to pin new memory
takes ten times as long as the copy, and launches wait meanwhile. So copies go through blocks that
are pinned once, and a thread brings them on. (35B shape on an H200: 62.8 MiB in 1.7 ms, 4.9 ms to
ordinary memory, 23 ms to new pinned memory.)
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from ..ggml.device import Device
from ..ggml.handles import Owner
from ..ggml.lib import C, ffi
from ..ggml.ops import Tensor
from ..units import MiB

Bytes = npt.NDArray[np.uint8]
# All that a sequence of thousands of positions has, and what is kept of a prompt meanwhile, fit in.
_BLOCKS, _BLOCK = 16, 16 * MiB


class Arriving:
    """Host memory that a thread may still be filling. jobs: that fill it, once they are sent."""

    jobs: tuple[Future[None], ...] = ()

    @property
    def has_arrived(self) -> bool:
        """Wait until all is there; False if a part is lost."""
        return all(job.exception() is None for job in self.jobs)


class _Block(Owner):
    """Pinned memory, what is on its way through it, and the job that brings that on."""

    def __init__(self, device: Device) -> None:
        self.host, self.event = self.own(device.host_buffer(_BLOCK)), self.own(device.event())
        self.restart()

    def restart(self, job: Future[None] | None = None) -> None:
        """Leave the memory to a job, or take it for the next copies."""
        self.job = job
        self.pieces: list[tuple[int, Bytes]] = []  # where in the memory, and where it goes
        self.copies: set[Arriving] = set()
        self.n_used = 0


class ToHost(Owner):
    """Enqueues copies from a device. messages: takes what goes wrong, a line each."""

    def __init__(self, device: Device, messages: list[str]) -> None:
        self._device, self._messages = device, messages
        self.is_behind = device.can.streams and not device.link
        self._thread = ThreadPoolExecutor(1, "copies")
        self._blocks: deque[_Block] = deque()

    def pin(self) -> None:
        """Pin the blocks, which takes 0.1 s, unless there are some, or none are needed."""
        while self.is_behind and len(self._blocks) < _BLOCKS:
            self._blocks.append(self.own(_Block(self._device)))

    def take(self, copy: Arriving, tensor: Tensor, start: int, memory: Bytes) -> None:
        """Enqueue the copy of bytes of a tensor from `start` on to memory of a copy; `send` it."""
        stream, size, done = self._device.compute.ptr, len(memory), 0
        if not self.is_behind:
            C.ggml_backend_tensor_get_async(stream, tensor, ffi.from_buffer(memory), start, size)
            return
        while done < size:
            block = self._blocks[0]
            if block.job:
                block.job.exception()
                block.restart()
            at, n = block.n_used, min(size - done, _BLOCK - block.n_used)
            block.pieces.append((at, memory[done : done + n]))
            block.copies.add(copy)
            to = block.host.address(at)
            C.ggml_backend_tensor_get_async(stream, tensor, to, start + done, n)
            block.n_used, done = at + n, done + n
            if block.n_used == _BLOCK:
                self.send()

    def send(self) -> None:
        """Have the thread bring on what was enqueued; on other devices, wait for it."""
        block = self._blocks[0] if self._blocks else None
        if not self.is_behind:
            self._device.finish()
        elif block and block.pieces and not block.job:
            if block.event:
                C.ggml_backend_event_record(block.event.ptr, self._device.compute.ptr)
            job = self._thread.submit(self._bring, block, block.pieces)
            for copy in block.copies:
                copy.jobs += (job,)
            block.restart(job)
            self._blocks.rotate(-1)

    def _bring(self, block: _Block, pieces: list[tuple[int, Bytes]]) -> None:
        try:
            if block.event:
                block.event.wait()
            for at, memory in pieces:
                memory[:] = block.host.array[at : at + len(memory)]
        except Exception as error:
            line = f"a prompt is not kept, as copying it failed: {error}"
            self._messages += {line}.difference(self._messages)
            raise

    def close(self) -> None:
        """Wait for copies under way, and free the memory."""
        try:
            self._device.synchronize()
        finally:  # a lost device keeps no thread and no memory
            self._thread.shutdown()
            super().close()
