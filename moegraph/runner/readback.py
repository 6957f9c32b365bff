"""The router's choice: graphs copy it to the host while they run, or a trace replaces it.

A copy node writes a layer's ids into pinned memory, and the host watches that memory. On CUDA the
copy runs beside the layer's experts (native/README.md: publish). A driver copy and an event would
instead cost the device a boundary between two graphs, and the host about 10 us per miss.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, NativeError
from ..ggml.handles import Context
from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import I32, Builder, Tensor
from ..resident.stage import Stage


class HostIds(NamedTuple):
    """Where ids arrive: I32 numpy array, valid after `RoutingReadback.wait`, and its address."""

    ids: npt.NDArray[np.int32]
    address: Any


class RoutingReadback:
    """Pinned host memory for the chosen ids of every layer of a stage.

    On the CPU device a launch returns after its graph is computed, so waits end at once.
    """

    def __init__(self, stage: Stage, max_rows: int) -> None:
        """Allocate memory for passes of at most max_rows rows."""
        self._device, self._first = stage.device, stage.layers.start
        n_layer, n_expert_used = len(stage.layers), stage.hp.n_expert_used
        self._n_used = n_expert_used
        self._stride = 4 * n_expert_used * max_rows
        size = self._stride * n_layer
        self._host = stage.device.host_buffer(size, must_pin=True)
        self._ids = self._host.array[:size].view(np.int32).reshape(n_layer, -1)
        self._max_rows, self._is_reset = max_rows, False
        self._stream: Any = None

    def begin_pass(self) -> None:
        """Reset all ids, unless that was done after the last pass; call it before every pass."""
        if not self._is_reset:
            self.reset(self._max_rows)
        self._is_reset = False
        self._stream = self._device.compute.ptr  # looked up once a pass, not once a layer

    def export(self, b: Builder, ids: Tensor, il: int) -> None:
        """Append the copy of layer il's chosen ids, I32 [n_expert_used, n_tokens]."""
        target = b.leaf(I32, (ids.ne[0], ids.ne[1]), "ids_host")
        place(self._host, target, (il - self._first) * self._stride)
        b.expand(b.publish(ids, target))

    def of(self, il: int, n_tokens: int) -> HostIds:
        """Return where layer il's chosen ids arrive: I32 [n_tokens * n_expert_used]."""
        at, n = il - self._first, n_tokens * self._n_used
        address = ffi.cast("int32_t *", self._host.address(at * self._stride))
        return HostIds(self._ids[at, :n], address)

    def reset(self, n_tokens: int) -> None:
        """Set the ids to MG_NO_ID; the last pass had n_tokens rows, and all its ids were read."""
        self._ids[:, : n_tokens * self._n_used] = C.MG_NO_ID
        self._is_reset = True

    def has(self, host_ids: HostIds) -> bool:
        """Return whether these ids seem to have been written; `wait` makes sure of it."""
        return not (host_ids.ids == C.MG_NO_ID).any()

    def wait(self, host_ids: HostIds) -> None:
        """Block until the device has written all these ids."""
        if not C.mg_wait_ids(self._stream, host_ids.address, host_ids.ids.size):
            raise NativeError(
                f"{self._device.name} finished a pass without writing the router's choice"
            )

    def close(self) -> None:
        """Free the memory."""
        self._host.close()


class Replay:
    """Feeds recorded expert ids to the layers of a stage.

    ids: of the whole model, numpy shape [n_steps, n_layer, n_expert_used].
    """

    def __init__(self, stage: Stage, ids: npt.NDArray[np.int32]) -> None:
        """Check the recording and upload its first step."""
        device, hp, layers = stage.device, stage.hp, stage.layers
        wanted = (hp.n_layer, hp.n_expert_used)
        if ids.ndim != 3 or ids.shape[1:] != wanted or ids.shape[0] == 0:
            raise ConfigError(
                f"the routing trace has shape {ids.shape}; this model needs steps of "
                f"{wanted[0]} layers with {wanted[1]} experts"
            )
        if ids.min() < 0 or ids.max() >= hp.n_expert:
            raise ConfigError(
                f"the routing trace has ids {ids.min()} to {ids.max()}; "
                f"this model has experts 0 to {hp.n_expert - 1}"
            )
        self._device = device
        self._recorded = np.ascontiguousarray(ids[:, layers.start : layers.stop], dtype=np.int32)
        self._first = layers.start
        self._n_used = hp.n_expert_used
        self._context = Context(1)
        self._all = C.ggml_new_tensor_1d(self._context.ptr, I32, len(layers) * hp.n_expert_used)
        n_bytes = C.ggml_nbytes(self._all)
        self._buffer = device.buffer(n_bytes, "the routing trace", "drop --routing")
        place(self._buffer, self._all, 0)
        C.ggml_backend_tensor_set(self._all, ffi.from_buffer(self._recorded), 0, n_bytes)
        self._host = device.host_buffer(n_bytes)
        self._step = 0

    def leaf(self, b: Builder, il: int) -> Tensor:
        """Return a leaf that reads the current step's ids of layer il: I32 [n_expert_used, 1]."""
        tensor = b.leaf(I32, (self._n_used, 1), "ids_replayed")
        place(self._buffer, tensor, 4 * self._n_used * (il - self._first))
        return tensor

    def advance(self) -> None:
        """Enqueue the upload of the next step's ids, after the pass that uses the current ones."""
        self._step += 1
        ids = self._recorded[self._step % len(self._recorded)]
        self._host.array[: ids.nbytes].view(np.int32)[:] = ids.reshape(-1)
        self._device.send(self._all, self._host, 0, ids.nbytes)

    def close(self) -> None:
        """Free the device and host memory."""
        for handle in (self._host, self._buffer, self._context):
            handle.close()
