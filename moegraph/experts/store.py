"""Host bytes of every expert: pinned copies, or the file itself.

From pinned memory a device copies at full PCIe speed without the host's help. Where pinning is not
wanted or fails, bytes are read from the file into a small pinned ring first; a file that was cut
short is then an error and not a signal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import NativeError
from ..ggml.device import Device, HostBuffer
from ..modelfile import ModelFile, TensorInfo

PARTS = ("gate", "up", "gate_up", "down")
# Experts fetched at a time: slots of a spare bank, and blocks of the ring.
N_SPARE = 16


def expert_tensors(model: ModelFile, il: int) -> dict[str, TensorInfo]:
    """Return a layer's expert stacks by part: gate, up and down, or gate_up and down."""
    names = {part: f"blk.{il}.ffn_{part}_exps.weight" for part in PARTS}
    return {part: model.tensors[n] for part, n in names.items() if n in model.tensors}


def expert_bytes(info: TensorInfo) -> int:
    """Return the bytes of one expert of a stack."""
    return info.nbytes // info.ne[2]


class ExpertStore:
    """Serves one expert's parts as host addresses that a copy stream may read.

    pin: 'all' or 'auto' copies the cold layers into pinned memory at start, 'none' never; with
    'auto', layers that cannot be pinned are read from the file instead and `note` says so.
    """

    def __init__(self, device: Device, model: ModelFile, layers: Sequence[int], pin: str) -> None:
        self._device = device
        self._model = model
        self._infos = {il: expert_tensors(model, il) for il in layers}
        self._pinned: dict[tuple[int, str], HostBuffer] = {}
        self._ring: list[HostBuffer] = []
        self._turn = 0
        self.note = ""
        if pin != "none" and not device.is_cpu:
            self._pin_all(pin)
        if any(not self._is_pinned(il) for il in layers):
            size = max(sum(map(expert_bytes, infos.values())) for infos in self._infos.values())
            self._ring = [device.host_buffer(size) for _ in range(N_SPARE)]

    @property
    def layers(self) -> list[int]:
        """Layers this store serves."""
        return list(self._infos)

    def stacks(self, il: int) -> dict[str, tuple[TensorInfo, int, Any]]:
        """Return (info, address, owner) of a layer's whole stacks in host memory.

        The address is pinned memory, or the mapped file.
        """
        found = {}
        for part, info in self._infos[il].items():
            if (il, part) in self._pinned:
                owner = self._pinned[il, part]
                found[part] = (info, owner.base, owner)
            else:
                found[part] = (info, self._model.map(info).ctypes.data, self._model)
        return found

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned host memory held for experts."""
        return sum(buffer.array.nbytes for buffer in self._pinned.values())

    @property
    def uses_ring(self) -> bool:
        """Whether some experts pass through the ring."""
        return bool(self._ring)

    def _is_pinned(self, il: int) -> bool:
        return all((il, part) in self._pinned for part in self._infos[il])

    def _pin_all(self, pin: str) -> None:
        for il, infos in self._infos.items():
            try:
                for part, info in infos.items():
                    self._pinned[il, part] = self._device.host_buffer(info.nbytes, must_pin=True)
            except NativeError as error:
                if pin == "all":
                    raise
                self.note = f"{error}; layers from {il} on are read from the file"
                for part in infos:
                    if (il, part) in self._pinned:
                        self._pinned.pop((il, part)).close()
                return
            for part, info in infos.items():
                self._model.read(info, self._pinned[il, part].array[: info.nbytes])

    def sources(self, il: int, expert: int) -> dict[str, tuple[Any, int]]:
        """Return (address, bytes) of each part of an expert.

        An address in the ring is overwritten after N_SPARE more experts: with `uses_ring`, wait for
        the copies of one batch before asking for the next.
        """
        infos = self._infos[il]
        if self._is_pinned(il):
            sizes = {part: expert_bytes(info) for part, info in infos.items()}
            return {
                part: (self._pinned[il, part].address(expert * size), size)
                for part, size in sizes.items()
            }
        block = self._ring[self._turn]
        self._turn = (self._turn + 1) % N_SPARE
        found, offset = {}, 0
        for part, info in infos.items():
            size = expert_bytes(info)
            self._model.read(info, block.array[offset : offset + size], expert * size)
            found[part] = (block.address(offset), size)
            offset += size
        return found

    def expert_bytes(self, il: int) -> int:
        """Return the bytes of one expert of a layer, all parts."""
        return sum(map(expert_bytes, self._infos[il].values()))

    def close(self) -> None:
        """Free the host memory. Nothing may be on its way."""
        for handle in (*self._pinned.values(), *self._ring):
            handle.close()
        self._pinned.clear()

