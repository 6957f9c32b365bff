"""Results of a pass or a prompt in host memory: a check of each row, then what was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InternalError, NativeError, OutOfDeviceMemory
from ..ggml.choose import TOTAL_WORD
from ..ggml.device import Device, HostBuffer
from ..ggml.handles import Owner
from ..ggml.lib import C, ffi
from ..ggml.memory import Block
from ..graphs.head import HeadOutputs, Results
from ..units import round_up

# members of an Enum are slow to look up
_LOGITS, _ARGMAX = Results.LOGITS, Results.ARGMAX
# A NaN that no device computes: the check of a row that has not arrived.
_MISSING = 0x7FC0DEAD
# Bytes; every result in the host block starts at a multiple.
_ALIGN = 64


@dataclass(slots=True)
class Output:
    """Results of one pass: argmax I32 [n_out], logits F32, numpy shape [n_out, n_vocab], or
    candidates I32 [n_out, n]; none of them if the stage has no head.

    All are copies.
    """

    argmax: npt.NDArray[np.int32] | None = None
    logits: npt.NDArray[np.float32] | None = None
    candidates: npt.NDArray[np.int32] | None = None

    def require_logits(self) -> npt.NDArray[np.float32]:
        """Return the logits, F32, numpy shape [n_out, n_vocab]."""
        if self.logits is None:
            raise InternalError("the pass did not return logits")
        return self.logits


class NotFinite(NativeError):
    """Results of some sequences of a pass are NaN or infinite; those of the others are good.

    sequences: those with such results. output: the results of the whole pass.
    """

    def __init__(self, message: str, sequences: tuple[int, ...], output: Output) -> None:
        super().__init__(message)
        self.sequences = sequences
        self.output = output


class ResultMemory(Owner):
    """Pinned memory for the results of one head at a time; it grows when it must.

    is_watched: `have_arrived` is asked for.
    """

    def __init__(self, device: Device, n_vocab: int) -> None:
        self._device, self._n_vocab = device, n_vocab
        self._host = self.own(device.host_buffer(16384))
        self.is_watched = False
        self._head: HeadOutputs | None = None  # launched last, while its tensors are intact
        self._reads: Any = None  # the copies of `_reads_of` to the host
        self._reads_of: HeadOutputs | None = None
        # where they arrive: F32 [n_out], and 32-bit words
        self._check, self._main = np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int32)
        self._logits: HostBuffer | None = None  # a row that `logits` has read
        # a copy of rows of logits, to be read while the next pass computes, and how many there are
        self._kept: Block | None = None
        self._n_kept, self._copied = 0, self.own(device.event())

    def forget(self) -> None:
        """Note that something is computed: the logits on the device are lost."""
        self._head = None

    def reads(self, head: HeadOutputs | None) -> tuple[object, int]:
        """Return the copies of a head's results to the host, and how many: check, then main.

        None without a head.
        """
        if head is None:
            return ffi.NULL, 0
        if head is not self._reads_of:  # not as for the token before
            n_check = C.ggml_nbytes(head.check)
            n_main, body = C.ggml_nbytes(head.main), round_up(n_check, _ALIGN)
            if body + n_main > self._host.array.nbytes:
                # first: if it fails, the old memory stays usable
                larger = self.own(self._device.host_buffer(body + n_main))
                self._device.synchronize()
                smaller, self._host = self._host, larger
                smaller.close()
            self._check = self._host.array[:n_check].view(np.float32)
            self._main = self._host.array[body : body + n_main].view(np.int32)
            self._reads = ffi.new(
                "struct mg_readback[2]",
                [
                    {"src": head.check, "dst": self._host.address(), "size": n_check},
                    {"src": head.main, "dst": self._host.address(body), "size": n_main},
                ],
            )
            self._reads_of = head
        self._head = head
        if self.is_watched:
            self._check.view(np.uint32)[:] = _MISSING
        return self._reads, 2

    def have_arrived(self) -> bool:
        """Return whether the check of the head that was launched last is in host memory.

        The rest of the results follows it. A device that happens to write the very number that
        stands for nothing here is never seen to arrive, so the caller must not wait for this alone.
        """
        return self._check.size > 0 and not (self._check.view(np.uint32) == _MISSING).any()

    def read(self, kind: Results, n_out: int) -> tuple[Output, npt.NDArray[np.bool_]]:
        """Return the first n_out rows that have arrived, and which of them are finite."""
        finite = np.isfinite(self._check[:n_out])
        if kind is _ARGMAX:
            return Output(argmax=self._main[:n_out].copy()), finite
        rows = self._main.reshape(len(self._check), -1)[:n_out].copy()
        if kind is _LOGITS:
            return Output(logits=rows.view(np.float32)), finite
        finite &= np.isfinite(rows[:, TOTAL_WORD].view(np.float32))
        return Output(candidates=rows), finite

    def keep(self) -> bool:
        """Have `logits` know the rows of now until `release`; return whether there is memory."""
        if self._head is None:
            return False
        logits, compute = self._head.logits, self._device.compute.ptr
        n_bytes = C.ggml_nbytes(logits)
        if self._kept is None or self._kept.n_bytes < n_bytes:
            self._device.synchronize()
            if self._kept:
                self._kept.close()
            self._kept, shapes, what = None, {"all": (1, n_bytes // 4)}, "logits that are kept"
            try:
                self._kept = self.own(Block(self._device, shapes, what, "lower --parallel"))
            except OutOfDeviceMemory:
                return False
        C.mg_copy_bytes(compute, logits, 0, self._kept.tensors["all"], 0, n_bytes)
        if self._copied:
            C.ggml_backend_event_record(self._copied.ptr, compute)
        self._n_kept = logits.ne[1]
        return True

    def release(self) -> None:
        """End what `keep` began."""
        self._n_kept = 0

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return the logits of a row that was kept, or else of the head that was launched last.

        F32 [n_vocab]. The memory is used again by the next call.
        """
        size = 4 * self._n_vocab
        if self._logits is None:
            self._logits = self.own(self._device.host_buffer(size))
        if self._kept and 0 <= row < self._n_kept:
            stream, source = self._device.upload.ptr, self._kept.tensors["all"]
            if self._copied:
                C.ggml_backend_event_wait(stream, self._copied.ptr)
        elif self._head and 0 <= row < self._head.logits.ne[1]:
            stream, source = self._device.compute.ptr, self._head.logits
        else:
            raise InternalError(f"the logits of row {row} are not on the device any more")
        C.ggml_backend_tensor_get_async(stream, source, self._logits.address(), row * size, size)
        C.ggml_backend_synchronize(stream)
        self._device.check_alive()
        return self._logits.array.view(np.float32)
