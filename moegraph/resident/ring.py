"""The ring: device memory through which the experts that a prompt misses pass."""

from __future__ import annotations

from collections.abc import Hashable

from ..ggml.device import Device
from ..ggml.handles import Context
from ..ggml.lib import C
from ..ggml.memory import place
from ..ggml.ops import F32
from ..modelfile import TensorInfo
from .bank import TAIL, Bank, strided_stack
from .layout import Packing, group_bytes, stack_kind
from .store import ExpertStore


class Ring:
    """n_groups groups of n_each slots, in memory that layers of all kinds share.

    A group holds experts of one layer at a time. Its bytes are the same for every kind of layer, so
    that groups of two layers can be filled at once.
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
        self._context = Context(8 * len(kinds))
        self._banks = {kind: self._bank(packings[kind], infos) for kind, infos in kinds.items()}
        self._strides = {kind: packing.stride for kind, packing in packings.items()}

    def _bank(self, packing: Packing, infos: dict[str, TensorInfo]) -> Bank:
        n_slots = (self.n_bytes - TAIL) // packing.stride
        parts = {
            part: strided_stack(self._context, info, n_slots, packing.stride)
            for part, info in infos.items()
        }
        for part, tensor in parts.items():
            place(self._buffer, tensor, packing.offsets[part])
        memory = C.ggml_new_tensor_1d(self._context.ptr, F32, self.n_bytes // 4)
        place(self._buffer, memory, 0)
        return Bank(n_slots, parts, memory)

    def kind(self, il: int) -> Hashable:
        """Return what layers must have in common to be read by the same graphs."""
        return self._kind_of[il]

    def bank(self, il: int) -> Bank:
        """Return the slots of all groups, as layer il uses them."""
        return self._banks[self._kind_of[il]]

    def first(self, il: int, group: int) -> int:
        """Return the first slot of a group, as layer il uses it."""
        return -(-group * self._step // self._strides[self._kind_of[il]])

    def close(self) -> None:
        """Free the memory."""
        self._buffer.close()
        self._context.close()
