"""Where graphs tell the host what the router chose, while they run.

A copy in the graph writes a layer's ids into pinned memory of the host. On CUDA it runs beside the
layer's experts (patch 0017), and the host watches the memory: a copy by the driver and an event
would cost the device a boundary between two graphs, and the host some 10 us of every miss.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import NativeError
from ..ggml.device import Device
from ..ggml.lib import C, ffi
from ..ggml.ops import I32, Builder, Tensor
from ..weights import place


class HostIds(NamedTuple):
    """ids: I32, valid once they were waited for; address: of the first, for the native side."""

    ids: npt.NDArray[np.int32]
    address: Any


class RoutingReadback:
    """Pinned host memory for the ids of every layer, chosen and predicted.

    The CPU device computes a graph before its launch returns, so there is nothing to wait for.
    """

    def __init__(self, device: Device, n_layer: int, n_expert_used: int, max_rows: int) -> None:
        """Make room for passes of max_rows rows.

        Raises:
            NativeError: the memory cannot be pinned, so the device could not write into it.
        """
        self._device = device
        self._n_used = n_expert_used
        self._stride, self._prediction_stride = 4 * n_expert_used * max_rows, 4 * n_expert_used
        self._predictiones_at = self._stride * n_layer
        size = self._predictiones_at + self._prediction_stride * n_layer
        self._host = device.host_buffer(size, must_pin=True)
        words = self._host.array[:size].view(np.int32)
        self._ids = words[: self._predictiones_at // 4].reshape(n_layer, -1)
        self._predictiones = words[self._predictiones_at // 4 :].reshape(n_layer, -1)
        self.reset(max_rows)

    def export(self, b: Builder, ids: Tensor, il: int) -> None:
        """Append the copy of a layer's ids I32 [n_expert_used, n_tokens] to the host."""
        self._copy(b, ids, il * self._stride)

    def export_prediction(self, b: Builder, ids: Tensor, il: int) -> None:
        """Append the copy of what layer il is expected to choose, I32 [n_expert_used, 1]."""
        self._copy(b, ids, self._predictiones_at + il * self._prediction_stride)

    def _copy(self, b: Builder, ids: Tensor, at: int) -> None:
        target = b.leaf(I32, (ids.ne[0], ids.ne[1]), "ids_host")
        place(self._host, target, at)
        b.expand(b.cpy(ids, target))

    def of(self, il: int, n_tokens: int) -> HostIds:
        """Return where a layer's ids arrive: I32 [n_tokens * n_expert_used]."""
        n = n_tokens * self._n_used
        return HostIds(self._ids[il, :n], self._address(il * self._stride))

    def prediction_of(self, il: int) -> HostIds:
        """Return where the guess about a layer arrives: I32 [n_expert_used]."""
        at = self._predictiones_at + il * self._prediction_stride
        return HostIds(self._predictiones[il], self._address(at))

    def _address(self, at: int) -> Any:
        return ffi.cast("int32_t *", self._host.address(at))

    def reset(self, n_tokens: int) -> None:
        """Mark all ids of passes of so many rows as not yet there; before every pass they are."""
        self._ids[:, : n_tokens * self._n_used] = C.MG_NO_ID
        self._predictiones[:] = C.MG_NO_ID

    def wait(self, host_ids: HostIds) -> None:
        """Block until ids are there.

        Raises:
            NativeError: the device came to rest without having written them.
        """
        if not C.mg_wait_ids(self._device.compute.ptr, host_ids.address, host_ids.ids.size):
            raise NativeError(f"{self._device.name} did not deliver the router's choice")

    def close(self) -> None:
        """Free the memory."""
        self._host.close()
