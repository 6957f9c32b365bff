"""Where graphs tell the host what the router chose, while they run.

A copy in the graph writes a layer's ids into pinned memory of the host. On CUDA it runs beside the
layer's experts (patch 0017), and the host watches the memory: a copy by the driver and an event
would cost the device a boundary between two graphs, and the host some 10 us of every miss.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import NativeError
from ..ggml.device import Device
from ..ggml.lib import C, ffi
from ..ggml.ops import I32, Builder, Tensor
from ..weights import place


class Choices:
    """Pinned host memory for the ids of every layer, chosen and guessed.

    The CPU device computes a graph before its launch returns, so there is nothing to wait for.
    """

    def __init__(self, device: Device, n_layer: int, n_expert_used: int, max_rows: int) -> None:
        """Make room for passes of max_rows rows.

        Raises:
            NativeError: the memory cannot be pinned, so the device could not write into it.
        """
        self._device = device
        self._n_used = n_expert_used
        self._stride, self._guess_stride = 4 * n_expert_used * max_rows, 4 * n_expert_used
        self._guesses_at = self._stride * n_layer
        size = self._guesses_at + self._guess_stride * n_layer
        self._host = device.host_buffer(size, must_pin=True)
        words = self._host.array[:size].view(np.int32)
        self._ids = words[: self._guesses_at // 4].reshape(n_layer, -1)
        self._guesses = words[self._guesses_at // 4 :].reshape(n_layer, -1)

    def publish(self, b: Builder, ids: Tensor, il: int) -> None:
        """Append the copy of a layer's ids I32 [n_expert_used, n_rows] to the host."""
        self._copy(b, ids, il * self._stride)

    def publish_guess(self, b: Builder, ids: Tensor, il: int) -> None:
        """Append the copy of what layer il is expected to choose, I32 [n_expert_used, 1]."""
        self._copy(b, ids, self._guesses_at + il * self._guess_stride)

    def _copy(self, b: Builder, ids: Tensor, at: int) -> None:
        target = b.leaf(I32, (ids.ne[0], ids.ne[1]), "ids_host")
        place(self._host, target, at)
        b.expand(b.cpy(ids, target))

    def of(self, il: int, n_rows: int) -> npt.NDArray[np.int32]:
        """Return where a layer's ids arrive: I32 [n_rows * n_expert_used]."""
        return self._ids[il, : n_rows * self._n_used]

    def guess_of(self, il: int) -> npt.NDArray[np.int32]:
        """Return where the guess about a layer arrives: I32 [n_expert_used]."""
        return self._guesses[il]

    def forget(self, n_rows: int) -> None:
        """Mark all ids of passes of so many rows as not yet there. No graph may be under way."""
        self._ids[:, : n_rows * self._n_used] = C.MG_NO_ID
        self._guesses[:] = C.MG_NO_ID

    def wait(self, ids: npt.NDArray[np.int32]) -> None:
        """Block until ids from `of` are there.

        Raises:
            NativeError: the device came to rest without having written them.
        """
        where = ffi.cast("int32_t *", ids.ctypes.data)
        if not C.mg_wait_ids(self._device.compute.ptr, where, ids.size):
            raise NativeError(f"{self._device.name} did not deliver the router's choice")

    def close(self) -> None:
        """Free the memory."""
        self._host.close()
