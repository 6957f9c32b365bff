"""Opens the devices of a model, and says what memory and speed each has for its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..config import EngineConfig
from ..errors import ConfigError, MoegraphError
from ..ggml.device import Device, gpu_names
from ..placement.split import LINK_RATE, MEMORY_RATE, Place, evened
from ..resident.rates import measure_rates
from ..units import parse_bytes

# Bytes a second out of host memory with two channels.
_HOST_RATE = 50e9
_RATES = ("memory_rate", "link_rate")
# Device memory left free with --vram auto, for other programs and for CUDA graphs.
_MARGIN_BYTES = 256 << 20


def open_device(name: str, config: EngineConfig) -> Device:
    """Open one device of a configuration.

    Raises:
        ConfigError: there is no such device, or a setting does not suit it.
    """
    device = Device(name, config.n_threads, config.cpu_reference, config.deterministic)
    if device.is_invariant and config.miss == "cpu":
        device.close()
        raise ConfigError(
            "--deterministic computes every expert on the GPU, because the CPU rounds "
            "otherwise; drop --miss cpu or --deterministic"
        )
    return device


def open_more(
    devices: Sequence[Device], config: EngineConfig, own: Callable[[Device], Device]
) -> list[Device]:
    """Open the other GPUs where `auto` has taken the first; one that fails is left out."""
    more = list(devices)
    for name in gpu_names():
        if name != devices[0].name:
            try:
                more.append(own(open_device(name, config)))
            except MoegraphError:
                continue
    return more


def places_of(devices: Sequence[Device], config: EngineConfig) -> list[Place]:
    """Return the memory that the plan may use on each device, and the speed of each.

    Speeds are measured where there are several devices with memory of their own, unless decisions
    must not depend on times.

    Raises:
        OutOfDeviceMemory, NativeError: as in `measure_rates`.
    """
    names = [device.name for device in devices]
    sizes = config.vram.split(",")
    sizes = sizes * len(devices) if len(sizes) == 1 else sizes
    found = []
    for device, size in zip(devices, sizes):
        budget, source = _budget(device, size, names.count(device.name))
        if len(devices) > 1:
            source = f"{source} of {device.name}"
        needs_all = not device.can.host_access
        rates = MEMORY_RATE, LINK_RATE
        if not device.can.own_memory:
            rates = _HOST_RATE, LINK_RATE
        elif len(set(names)) > 1 and not config.deterministic:
            rates = measure_rates(device)
        found.append(Place(budget, source, needs_all, *rates))
    memory, link = (evened([getattr(p, name) for p in found]) for name in _RATES)
    return [replace(place, memory_rate=a, link_rate=b) for place, a, b in zip(found, memory, link)]


def _budget(device: Device, size: str, n_stages: int) -> tuple[int | None, str]:
    """Return the device memory that a stage may use, None without a limit, and what says so.

    n_stages: how many stages are on this device.
    """
    if size != "auto":
        return parse_bytes(size, "g") - device.context_bytes, "--vram"
    if not device.can.own_memory:
        return None, "--vram"
    free = device.memory()[0]
    return (free - max(_MARGIN_BYTES, free // 50)) // n_stages, "the memory that is free"


def joined_name(devices: Sequence[Device]) -> str:
    """Return the names of devices as --device takes them."""
    return ",".join(device.name for device in devices)
