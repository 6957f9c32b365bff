"""The ring: device memory through which the experts that a prompt misses pass."""

from __future__ import annotations

from collections.abc import Hashable

from ..ggml.device import Device
from ..ggml.handles import Context
from ..ggml.lib import C
from ..ggml.memory import place
from ..ggml.ops import F32
from ..gguf import TensorInfo
from .bank import TAIL, Bank, strided_stack
from .layout import Packing, group_bytes, stack_kind
from .store import ExpertStore


class Ring:
    """n_groups groups of n_each slots, in memory that layers of all kinds share.

    A group holds experts of one layer at a time. Its bytes are the same for every kind of layer, so
    that groups of two layers can be filled at once. A graph over a group sees no other slots: CUDA
    divides the work of a product among all slots that it sees, also those that no row chose.
    """

    def __init__(self, device: Device, store: ExpertStore, n_groups: int, n_each: int) -> None:
        """store: holds the experts that may be missing."""
        self.n_groups, self.n_each = n_groups, n_each
        kinds: dict[Hashable, dict[str, TensorInfo]] = {}
        self._kind_of: dict[int, Hashable] = {}
        for il in store.layers:
            infos = store.infos(il)
            self._kind_of[il] = stack_kind(infos)
            kinds[self._kind_of[il]] = infos
        packings = {kind: Packing.of(infos) for kind, infos in kinds.items()}
        self._step = group_bytes([packing.stride for packing in packings.values()], n_each)
        self.n_bytes = self._step * n_groups + TAIL
        self._buffer = device.buffer(self.n_bytes, "the ring of prompts", "lower --vram or -ub")
        C.ggml_backend_buffer_set_usage(self._buffer.ptr, C.GGML_BACKEND_BUFFER_USAGE_WEIGHTS)
        # kernels may read past the last row that they need
        C.ggml_backend_buffer_clear(self._buffer.ptr, 0)
        self._context = Context(8 * n_groups * len(kinds))
        self._banks = {
            kind: [self._bank(packings[kind], infos, group) for group in range(n_groups)]
            for kind, infos in kinds.items()
        }

    def _bank(self, packing: Packing, infos: dict[str, TensorInfo], group: int) -> Bank:
        n, stride = self.n_each, packing.stride
        at = -(-group * self._step // stride) * stride
        parts = {
            part: strided_stack(self._context, info, n, stride) for part, info in infos.items()
        }
        for part, tensor in parts.items():
            place(self._buffer, tensor, at + packing.offsets[part])
        memory = C.ggml_new_tensor_1d(self._context.ptr, F32, n * stride // 4)
        place(self._buffer, memory, at)
        return Bank(n, parts, memory)

    def kind(self, il: int) -> Hashable:
        """Return what layers must have in common to be read by the same graphs."""
        return self._kind_of[il]

    def bank(self, il: int, group: int) -> Bank:
        """Return the slots of a group, as layer il uses them."""
        return self._banks[self._kind_of[il]][group]

    def close(self) -> None:
        """Free the memory."""
        self._buffer.close()
        self._context.close()
