"""Copies of experts in pinned host memory, made with all cores.

Threads read the experts of a few layers straight into their places, in huge pages; meanwhile the
layers before them are pinned. Where the system cannot pin memory that it has given out (WSL, some
virtual machines), the driver allocates the blocks, which takes several times as long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from ..arch import ModelFile
from ..errors import ConfigError, NativeError
from ..ggml.device import Device, HostBuffer, HostPages
from ..ggml.free_memory import host_memory
from ..gguf import TensorInfo
from ..units import MiB, format_bytes
from .layout import Packing
from .reading import Readers

# Layers that are read at the same time.
_N_AT_ONCE = 4


@dataclass(frozen=True)
class Layer:
    """A layer whose experts are copied: its stacks, and how an expert is packed."""

    infos: Mapping[str, TensorInfo]
    packing: Packing


class ExpertCopies:
    """The packed experts of layers, in host memory that the device can read.

    blocks: by layer; expert e begins at byte e * stride. why: why not all layers are here, or ''.
    """

    def __init__(
        self,
        device: Device,
        model: ModelFile,
        layers: Mapping[int, Layer],
        pin: str,
        beside: int,
        report: Callable[[int], None],
    ) -> None:
        """Copy and pin; pin: 'all', or 'auto' for as many layers as leave the host some memory.

        beside: bytes of host memory that are needed too if some layer is not copied. report: called
        with the bytes of each layer.
        """
        self.blocks: dict[int, HostBuffer] = {}
        self.why = ""
        self._device, self._layers, self._must = device, layers, pin == "all"
        self._n_expert = model.hparams.n_expert
        self._report, self._beside = report, beside
        if self._must:
            short = shortage(sum(map(self._size, layers)), host_memory().available)
            if short:
                raise ConfigError(f"host_pin 'all' needs {short}; use --host-pin auto or none")
        self._registers = _registers(device)
        begun: deque[tuple[int, HostBuffer, list[Future[None]]]] = deque()
        readers = Readers(model)
        try:
            self._copy(readers, begun)
        except BaseException:
            self.close()
            raise
        finally:
            readers.close()  # before the memory goes that they read into
            for _, block, _ in begun:
                block.close()

    def _copy(
        self, readers: Readers, begun: deque[tuple[int, HostBuffer, list[Future[None]]]]
    ) -> None:
        """Copy layer by layer until all are done or one cannot be."""
        taken, free = 0, host_memory().available
        for n_seen, (il, layer) in enumerate(self._layers.items(), 1):
            size = self._size(il)
            # count what we took as well: a control group may not see what the driver pins
            at_most = None if free is None else free - taken
            wanted = size + (self._beside if n_seen < len(self._layers) else 0)
            short = "" if self._must else shortage(wanted, at_most)
            if short:
                self.why = f"the next layer needs {short}"
                break
            if len(begun) == _N_AT_ONCE and not self._finish(begun):
                return
            block = self._allocate(size)
            if block is None:
                break
            taken += size
            rows = block.array.reshape(self._n_expert, layer.packing.stride)
            if not self._registers:  # what the driver gives may hold anything
                layer.packing.clear_gaps(rows)
            begun.append((il, block, readers.read_experts(layer.infos, layer.packing, rows)))
        while begun and self._finish(begun):
            pass

    def _size(self, il: int) -> int:
        return self._layers[il].packing.stride * self._n_expert

    def _allocate(self, size: int) -> HostBuffer | None:
        """Return memory for a layer, or None if there is none."""
        try:
            if self._registers:
                return HostPages(size)
            return self._device.host_buffer(size, must_pin=True)
        except NativeError as error:
            self._refused(error)
            return None

    def _finish(self, begun: deque[tuple[int, HostBuffer, list[Future[None]]]]) -> bool:
        """Wait for the first layer of `begun` and pin it; return whether that worked."""
        il, block, reads = begun[0]
        for read in reads:
            read.result()
        try:
            if isinstance(block, HostPages):
                self._device.pin(block)
        except NativeError as error:
            self._refused(error)
            return False
        self.blocks[il] = block
        begun.popleft()
        self._report(sum(info.nbytes for info in self._layers[il].infos.values()))
        return True

    def _refused(self, error: NativeError) -> None:
        if self._must:
            raise error
        self.why = str(error)

    def close(self) -> None:
        """Free the memory. No copy from it may be under way."""
        for block in self.blocks.values():
            block.close()
        self.blocks.clear()


def _registers(device: Device) -> bool:
    """Return whether the device can pin memory that the system has given out."""
    try:
        probe = HostPages(2 * MiB)
    except NativeError:
        return False
    try:
        device.pin(probe)
    except NativeError:
        return False
    finally:
        probe.close()
    return True


def shortage(size: int, at_most: int | None) -> str:
    """Return why taking size bytes would leave too little host memory; empty if it would not.

    at_most: upper limit of the available bytes by our own count; None if unknown.
    """
    memory = host_memory()
    if memory.available is None or at_most is None:
        return ""
    available = max(0, min(memory.available, at_most))
    if size + memory.reserve <= available:
        return ""
    limit = memory.limit
    of = "" if limit is None else f" (the control group may use {format_bytes(limit)})"
    return (
        f"{format_bytes(size)} of host memory, {format_bytes(available)} are available{of}, and "
        f"{format_bytes(memory.reserve)} of them stay free"
    )
