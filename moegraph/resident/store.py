"""Experts in host memory, packed as in a device slot, so that one copy uploads an expert.

The device copies from pinned memory at full PCIe speed without the host. Layers that are not pinned
(not wanted, refused by the driver, or too little host memory) are read from the file into a small
pinned ring before an upload; `read` reports a truncated file as an error, where a mapping would
raise SIGBUS. The CPU computes experts where they are: in pinned memory or in the mapped file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, NativeError
from ..ggml.device import Device, HostBuffer
from ..ggml.free_memory import host_memory
from ..ggml.handles import Context
from ..ggml.lib import C
from ..ggml.memory import place
from ..ggml.ops import F32, Tensor
from ..modelfile import ModelFile, TensorInfo
from ..units import GiB, format_bytes, round_up
from .layout import N_STAGING, Packing, expert_tensors

# The system cannot reclaim pinned memory. 'auto' leaves this much to other processes and the page
# cache of the model file, or an eighth of the memory of the machine or container if that is less.
_RESERVE = 2 * GiB
_RESERVE_SHARE = 8


def raw_rows(context: Context, packing: Packing, n: int) -> Tensor:
    """Make a tensor F32 [bytes / 4, n] whose rows are the raw bytes of n packed experts."""
    # the kernel that fetches a row copies 16 bytes at a time
    tensor = C.ggml_new_tensor_2d(context.ptr, F32, round_up(packing.n_bytes, 16) // 4, n)
    tensor.nb[1] = packing.stride
    tensor.nb[2] = tensor.nb[3] = packing.stride * n
    return tensor


class ExpertStore:
    """The experts of layers that are not full, in host memory that the upload stream can read.

    pin: 'all' and 'auto' copy the layers into pinned memory at start, 'none' copies none. 'auto'
    stops before the host runs short of memory, and if the driver refuses to pin more; the other
    layers are read from the file, and `warning` says so. With the CPU device, 'auto' pins nothing.
    rows: the experts of each pinned layer as F32 [bytes / 4, n_expert], which a device can read.
    pinned_bytes: host memory taken, including the ring.

    Raises:
        ConfigError: pin is 'all' and the host has too little memory.
        NativeError: pin is 'all' and the driver refuses.
    """

    def __init__(self, device: Device, model: ModelFile, layers: Sequence[int], pin: str) -> None:
        self._device = device
        self._model = model
        self._infos = {il: expert_tensors(model, il) for il in layers}
        self._packing = {il: Packing.of(infos) for il, infos in self._infos.items()}
        self._pinned: dict[int, HostBuffer] = {}
        self._base: dict[int, Any] = {}
        self._ring: list[HostBuffer] = []
        self._turn = 0
        self.warning = ""
        self.rows: dict[int, Tensor] = {}
        self._context = Context(len(self._infos) + 1)
        if pin == "all" or (pin == "auto" and device.can.own_memory):
            self._pin_all(pin)
        if any(il not in self._pinned for il in layers):
            size = max(packing.n_bytes for packing in self._packing.values())
            self._ring = [device.host_buffer(size) for _ in range(N_STAGING)]
        blocks = (*self._pinned.values(), *self._ring)
        self.pinned_bytes = sum(block.array.nbytes for block in blocks)

    @property
    def layers(self) -> list[int]:
        """The layers whose experts are in this store."""
        return list(self._infos)

    def stacks(self, il: int) -> dict[str, tuple[TensorInfo, int, int, Any]]:
        """Return (info, address, bytes from expert to expert, owner) of a layer's stacks, by part.

        The addresses are in pinned memory or in the mapped file, and valid while the owner lives.
        """
        packing, pinned = self._packing[il], self._pinned.get(il)
        found: dict[str, tuple[TensorInfo, int, int, Any]] = {}
        for part, info in self._infos[il].items():
            if pinned:
                found[part] = (info, pinned.base + packing.offsets[part], packing.stride, pinned)
            else:
                address = self._model.map(info).ctypes.data
                found[part] = (info, address, packing.sizes[part], self._model)
        return found

    @property
    def is_aligned(self) -> bool:
        """Whether every expert is aligned to 32 bytes, as ggml's CPU kernels need."""
        return all(
            address % 32 == 0 for il in self._infos for _, address, _, _ in self.stacks(il).values()
        )

    @property
    def uses_ring(self) -> bool:
        """Whether experts of some layers pass through the ring."""
        return bool(self._ring)

    def infos(self, il: int) -> dict[str, TensorInfo]:
        """Return a layer's expert stacks in the file, by part."""
        return self._infos[il]

    def packing(self, il: int) -> Packing:
        """Return how an expert of a layer is packed."""
        return self._packing[il]

    def _pin_all(self, pin: str) -> None:
        n_expert = self._model.hparams.n_expert
        sizes = {il: packing.stride * n_expert for il, packing in self._packing.items()}
        if pin == "all":
            _require_memory(sum(sizes.values()))
        taken, free = 0, host_memory().available
        for il, size in sizes.items():
            # count what we took as well: a control group may not see what the driver pins
            why = "" if pin == "all" else _shortage(size, None if free is None else free - taken)
            if not why:
                try:
                    self._pin(il, self._device.host_buffer(size, must_pin=True))
                    taken += size
                    continue
                except NativeError as error:
                    if pin == "all":
                        raise
                    why = str(error)
            self.warning = (
                f"pinned host memory holds the experts of {len(self._pinned)} of {len(sizes)} "
                f"layers ({format_bytes(taken)}), the others are read from the file: {why}"
            )
            return

    def _pin(self, il: int, block: HostBuffer) -> None:
        """Fill a block with the experts of a layer."""
        packing, n_expert = self._packing[il], self._model.hparams.n_expert
        self._pinned[il], self._base[il] = block, block.address()
        self.rows[il] = raw_rows(self._context, packing, n_expert)
        place(block, self.rows[il], 0)
        for expert in range(n_expert):
            packed = block.array[expert * packing.stride : (expert + 1) * packing.stride]
            self._read(il, self._infos[il], expert, packed)
            packed[packing.n_bytes :] = 0  # the copy is rounded up to 16 bytes

    def _read(
        self, il: int, infos: dict[str, TensorInfo], expert: int, target: npt.NDArray[np.uint8]
    ) -> None:
        """Read an expert from the file and pack it."""
        packing = self._packing[il]
        for part, info in infos.items():
            at, size = packing.offsets[part], packing.sizes[part]
            self._model.read(info, target[at : at + size], expert * size)

    def source(self, il: int, expert: int) -> Any:
        """Return the address of a packed expert.

        The ring holds N_STAGING experts: if `uses_ring`, wait for the copies of N_STAGING experts
        before you ask for the next one.
        """
        base = self._base.get(il)
        if base is not None:
            return base + expert * self._packing[il].stride
        block = self._ring[self._turn]
        self._turn = (self._turn + 1) % N_STAGING
        self._read(il, self._infos[il], expert, block.array)
        return block.address()

    def close(self) -> None:
        """Free the host memory. No upload may be under way."""
        for handle in (*self._pinned.values(), *self._ring):
            handle.close()
        self._pinned.clear()
        self._context.close()


def _shortage(size: int, at_most: int | None) -> str:
    """Return why pinning size bytes would leave too little host memory; empty if it would not.

    at_most: upper limit of the available bytes by our own count; None if unknown.
    """
    memory = host_memory()
    if memory.available is None or at_most is None:
        return ""
    available = max(0, min(memory.available, at_most))
    known = [n for n in (memory.total, memory.limit) if n is not None]
    reserve = min([_RESERVE, *(n // _RESERVE_SHARE for n in known)])
    if size + reserve <= available:
        return ""
    return (
        f"the next layer takes {format_bytes(size)}, {format_bytes(available)} are available"
        f"{_of_limit(memory.limit)}, and {format_bytes(reserve)} of them stay free"
    )


def _require_memory(size: int) -> None:
    """Refuse to pin more than the host has: Linux would grant it and kill the process later."""
    memory = host_memory()
    if memory.available is not None and size > memory.available:
        raise ConfigError(
            f"host_pin 'all' needs {format_bytes(size)} of host memory, "
            f"{format_bytes(memory.available)} are available{_of_limit(memory.limit)}; "
            "use --host-pin auto or none"
        )


def _of_limit(limit: int | None) -> str:
    return "" if limit is None else f" (the control group may use {format_bytes(limit)})"
