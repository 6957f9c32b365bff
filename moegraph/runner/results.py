"""Results of a pass or a prompt in host memory: a check of each row, then argmax or logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InternalError, NativeError
from ..ggml.device import Device
from ..ggml.lib import ffi
from ..graphs.head import HeadOutputs
from ..units import round_up

# Bytes; every result in the host block starts at a multiple.
_ALIGN = 64


@dataclass(frozen=True)
class Output:
    """Results of one pass: argmax I32 [n_out] if greedy, else logits F32, numpy shape [n_out,
    n_vocab].

    Both are copies.
    """

    argmax: npt.NDArray[np.int32] | None
    logits: npt.NDArray[np.float32] | None

    def require_logits(self) -> npt.NDArray[np.float32]:
        """Return the logits, F32, numpy shape [n_out, n_vocab].

        Raises:
            InternalError: the pass was greedy.
        """
        if self.logits is None:
            raise InternalError("a greedy pass has no logits")
        return self.logits


class NotFinite(NativeError):
    """Results of some sequences of a pass are NaN or infinite; those of the others are good.

    sequences: those with such results. output: the results of the whole pass.
    """

    def __init__(self, message: str, sequences: tuple[int, ...], output: Output) -> None:
        super().__init__(message)
        self.sequences = sequences
        self.output = output


class Results:
    """Pinned memory for the results of one pass at a time; it grows when it must."""

    def __init__(self, device: Device, n_vocab: int) -> None:
        self._device, self._n_vocab = device, n_vocab
        self._host = device.host_buffer(4096)

    def grow(self, n_out: int, greedy: bool) -> None:
        """Make room for the results of n_out rows, before the pass is launched."""
        needed = round_up(4 * n_out, _ALIGN) + self._row_bytes(greedy) * n_out
        if needed > self._host.array.nbytes:
            larger = self._device.host_buffer(
                needed
            )  # first: if it fails, the old memory stays usable
            self._device.synchronize()
            smaller, self._host = self._host, larger
            smaller.close()

    def _row_bytes(self, greedy: bool) -> int:
        return 4 if greedy else 4 * self._n_vocab

    def reads(self, n_out: int, head: HeadOutputs, greedy: bool) -> Any:
        """Return the two copies of the head's results to the host: check, then argmax or logits."""
        body = round_up(4 * n_out, _ALIGN)
        main = head.argmax if greedy else head.logits
        size = self._row_bytes(greedy) * n_out
        return ffi.new(
            "struct mg_readback[2]",
            [
                {"src": head.check, "dst": self._host.address(), "size": 4 * n_out},
                {"src": main, "dst": self._host.address(body), "size": size},
            ],
        )

    def read(self, n_out: int, greedy: bool) -> tuple[Output, npt.NDArray[np.bool_]]:
        """Return copies of the results that have arrived, and which rows are finite."""
        host = self._host.array
        check = host[: 4 * n_out].view(np.float32)
        body = host[round_up(4 * n_out, _ALIGN) :]
        finite = np.isfinite(check)
        if greedy:
            return Output(body[: 4 * n_out].view(np.int32).copy(), None), finite
        n_vocab = self._n_vocab
        logits = body[: 4 * n_out * n_vocab].view(np.float32).reshape(n_out, n_vocab).copy()
        return Output(None, logits), finite & np.isfinite(logits.sum(axis=1))

    def close(self) -> None:
        """Free the memory."""
        self._host.close()
