"""Copies from a device to ordinary host memory, behind the passes in flight.

A device copies to pinned memory in a third of the time, and nobody waits. But to pin new memory
takes ten times as long as the copy, and launches wait meanwhile. So copies go through blocks that
stay pinned, and a thread brings them on. (35B shape on an H200: 62.8 MiB in 1.7 ms, 4.9 ms to
ordinary memory, 23 ms to new pinned memory.) A block is pinned, which takes 6 ms, when all others
are in use: a process that copies nothing pins nothing.

Both sides have few calls, each for many pieces: after every call a thread waits for the
interpreter lock. A second thread gained nothing that was measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import NativeError
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
    """Enqueues copies from a device.

    messages: takes what goes wrong, a line each. max_bytes: of pinned memory, but one block there
    is; None: no other limit than 16 blocks. pinned_bytes: of the blocks that there are.
    """

    def __init__(self, device: Device, messages: list[str]) -> None:
        self._device, self._messages = device, messages
        self.is_behind = device.can.streams and not device.link
        self.max_bytes: int | None = None
        self._thread = ThreadPoolExecutor(1, "copies")
        self._blocks: deque[_Block] = deque()  # the next one first
        self.pinned_bytes = 0

    def reserve(self) -> None:
        """Pin the first block if copies need one; NativeError without memory for it."""
        if self.is_behind and not self._blocks:
            self._pin()

    def _pin(self) -> None:
        """Have one more block, which is the next."""
        self._blocks.appendleft(self.own(_Block(self._device)))
        self.pinned_bytes += _BLOCK

    def take(self, copy: Arriving, pieces: Iterable[tuple[Tensor, int, Bytes]]) -> None:
        """Enqueue copies to memory of a copy, each of a tensor's bytes from one on; `send` them.

        NativeError if there is no memory for the first block.
        """
        found: list[tuple[Tensor, int, Any, int]] = []
        for tensor, start, memory in pieces:
            if not self.is_behind:
                found.append((tensor, start, ffi.from_buffer(memory), len(memory)))
                continue
            done = 0
            while done < len(memory):
                block = self._block()
                at, n = block.n_used, min(len(memory) - done, _BLOCK - block.n_used)
                block.pieces.append((at, memory[done : done + n]))
                block.copies.add(copy)
                found.append((tensor, start + done, block.host.address(at), n))
                block.n_used, done = at + n, done + n
                if block.n_used == _BLOCK:
                    self._enqueue(found)
                    self.send()
                    found = []
        self._enqueue(found)

    def _block(self) -> _Block:
        """Return the block that has room for the next copies."""
        self.reserve()
        block = self._blocks[0]
        most = _BLOCKS if self.max_bytes is None else min(_BLOCKS, self.max_bytes // _BLOCK)
        if block.job and not block.job.done() and len(self._blocks) < most:
            with suppress(NativeError):  # without memory for a further block, this one is awaited
                self._pin()
                block = self._blocks[0]
        if block.job:
            block.job.exception()
            block.restart()
        return block

    def _enqueue(self, found: list[tuple[Tensor, int, Any, int]]) -> None:
        if found:
            pieces = ffi.new("struct mg_piece[]", found)
            C.mg_get_pieces(self._device.compute.ptr, pieces, len(found))

    def send(self) -> None:
        """Have a thread bring on what was enqueued; on other devices, wait for it."""
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
            host = block.host
            moves = [(host.address(at), ffi.from_buffer(to), len(to)) for at, to in pieces]
            sent = ffi.new("struct mg_move[]", moves)
            if block.event:
                block.event.wait()
            C.mg_move_bytes(sent, len(moves))
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
