"""Takes routing from a trace instead of the router, so that every run has the same misses.

For measuring only. One-row passes take the recorded ids step by step and start over at the end.
The router still runs, and its weights are used.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..ggml.handles import Context
from ..ggml.lib import C, ffi
from ..ggml.memory import place
from ..ggml.ops import I32, Builder, Tensor
from ..resident.stage import Stage


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
