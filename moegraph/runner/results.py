"""Results of a pass or a prompt in host memory: a check of each row, then what was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InternalError, NativeError, OutOfDeviceMemory
from ..ggml.choose import TOTAL_WORD
from ..ggml.device import Device, HostBuffer
from ..ggml.lib import C, ffi
from ..ggml.memory import Block
from ..ggml.ops import Tensor
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


class KeptLogits:
    """A copy of logits on the device, to be read while the next pass computes.

    n_rows: of the copy; 0 if there is none.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._block: Block | None = None
        self._copied = device.event()
        self.n_rows = 0

    def keep(self, logits: Tensor) -> bool:
        """Enqueue the copy of logits F32 [n_vocab, n]; return False if there is no memory."""
        n_bytes, compute = C.ggml_nbytes(logits), self._device.compute.ptr
        if self._block is None or self._block.n_bytes < n_bytes:
            self._device.synchronize()
            self._free()
            shapes, what = {"all": (1, n_bytes // 4)}, "logits that are kept"
            try:
                self._block = Block(self._device, shapes, what, "lower --parallel")
            except OutOfDeviceMemory:
                return False
        C.mg_copy_bytes(compute, logits, 0, self._block.tensors["all"], 0, n_bytes)
        if self._copied:
            C.ggml_backend_event_record(self._copied.ptr, compute)
        self.n_rows = logits.ne[1]
        return True

    def read(self, row: int, to: HostBuffer) -> None:
        """Copy a row to host memory, on the stream for uploads, and wait."""
        stream, size = self._device.upload.ptr, to.array.nbytes
        if self._block is None:
            raise InternalError("no logits were kept")
        if self._copied:
            C.ggml_backend_event_wait(stream, self._copied.ptr)
        C.ggml_backend_tensor_get_async(
            stream, self._block.tensors["all"], to.address(), row * size, size
        )
        C.ggml_backend_synchronize(stream)

    def _free(self) -> None:
        if self._block:
            self._block.close()
        self._block = None

    def close(self) -> None:
        """Free the memory."""
        self._free()
        if self._copied:
            self._copied.close()


class ResultMemory:
    """Pinned memory for the results of one head at a time; it grows when it must.

    is_watched: `have_arrived` is asked for.
    """

    def __init__(self, device: Device, n_vocab: int) -> None:
        self._device, self._n_vocab = device, n_vocab
        self._host = device.host_buffer(16384)
        self.is_watched = False
        self._head: HeadOutputs | None = None  # launched last, while its tensors are intact
        self._reads: Any = None  # the copies of `_reads_of` to the host
        self._reads_of: HeadOutputs | None = None
        # where they arrive: F32 [n_out], and 32-bit words
        self._check, self._main = np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int32)
        self._logits: HostBuffer | None = None  # a row that `logits` has read
        self._kept = KeptLogits(device)

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
            self._grow(body + n_main)
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

    def _grow(self, n_bytes: int) -> None:
        if n_bytes > self._host.array.nbytes:
            # first: if it fails, the old memory stays usable
            larger = self._device.host_buffer(n_bytes)
            self._device.synchronize()
            smaller, self._host = self._host, larger
            smaller.close()

    def read(self, kind: Results, n_out: int) -> tuple[Output, npt.NDArray[np.bool_]]:
        """Return the first n_out rows that have arrived, and which of them are finite."""
        finite = np.isfinite(self._check[:n_out])
        if kind is _ARGMAX:
            return Output(argmax=self._main[:n_out].copy()), finite
        rows = self._main.reshape(len(self._check), -1)[:n_out].copy()
        if kind is _LOGITS:
            logits = rows.view(np.float32)
            return Output(logits=logits), finite & np.isfinite(logits.sum(axis=1))
        finite &= np.isfinite(rows[:, TOTAL_WORD].view(np.float32))
        return Output(candidates=rows), finite

    def keep(self) -> bool:
        """Have `logits` know the rows of now until `release`; return whether there is memory."""
        return self._head is not None and self._kept.keep(self._head.logits)

    def release(self) -> None:
        """End what `keep` began."""
        self._kept.n_rows = 0

    @property
    def is_kept(self) -> bool:
        """Whether `logits` returns rows that were kept."""
        return self._kept.n_rows > 0

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return the logits of a row that was kept, or else of the head that was launched last.

        F32 [n_vocab]. The memory is used again by the next call.
        """
        if self._logits is None:
            self._logits = self._device.host_buffer(4 * self._n_vocab)
        if 0 <= row < self._kept.n_rows:
            self._kept.read(row, self._logits)
            return self._logits.array.view(np.float32)
        head, n_vocab = self._head, self._n_vocab
        if head is None or not 0 <= row < head.logits.ne[1]:
            raise InternalError(f"the logits of row {row} are not on the device any more")
        compute = self._device.compute.ptr
        C.ggml_backend_tensor_get_async(
            compute, head.logits, self._logits.address(), row * 4 * n_vocab, 4 * n_vocab
        )
        self._device.finish()
        return self._logits.array.view(np.float32)

    def close(self) -> None:
        """Free the memory."""
        self._host.close()
        if self._logits:
            self._logits.close()
        self._kept.close()
