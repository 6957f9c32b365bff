"""What NVIDIA's driver says of its cards, without a CUDA context and without a native library."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

# Bytes a second of one lane by PCIe generation, and the share of it that copies reach.
_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_COPIED = 0.8
# 8-bit operations of one core in one cycle on tensor cores, by compute capability; 16 for others.
_OPERATIONS = {(7, 5): 32, (8, 0): 64, (9, 0): 64, (10, 0): 64}
# Cards do not hold their highest clock under load.
_HELD_CLOCK = 0.8
_SM_CLOCK, _MEMORY_CLOCK = 1, 2
# Attributes of a device: the two parts of its compute capability.
_CAPABILITY = (75, 76)


@dataclass(frozen=True)
class Card:
    """A card as its driver describes it.

    n_bytes: memory. memory_rate: bytes a second out of it. link_rate: bytes a second that a copy
    from the host reaches. link: the PCIe generation and the number of lanes that card and slot
    share. arithmetic: 8-bit operations a second.
    """

    name: str
    n_bytes: int
    memory_rate: float
    link_rate: float
    link: str
    arithmetic: float


@dataclass(frozen=True)
class CudaDriver:
    """What CUDA's driver says.

    version: of the newest CUDA that it supports, such as (12, 4). cards: name, compute capability
    and bytes of each that it shows to this process, in its order.
    """

    version: tuple[int, int]
    cards: tuple[tuple[str, tuple[int, int], int], ...]


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Pci(ctypes.Structure):
    _fields_ = [
        ("legacy", ctypes.c_char * 16), ("domain", ctypes.c_uint), ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint), ("ids", ctypes.c_uint * 2), ("name", ctypes.c_char * 32),
    ]  # fmt: skip


def gpu_used_bytes() -> dict[str, int]:
    """Return the bytes in use by all processes on each GPU, by PCI address such as 0000:c1:00.0.

    The driver tells it without a CUDA context. A context takes some hundred MiB, which CUDA cannot
    report: its own figures exist only once the context is open. The driver and CUDA may number GPUs
    differently, but the address is the same. Empty if there is no driver or it does not tell.
    """
    with _devices() as (nvml, handles):
        memory = _Memory()
        return {
            address: memory.used
            for handle in handles
            if (address := _address(nvml, handle))
            and _call(nvml, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        }


def gpu_card() -> Card | None:
    """Return the card of CUDA's first device, which `--device auto` takes; None without one.

    CUDA is asked for it because CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are for it to read.
    None also if the driver does not describe it in full, or if it is divided (MIG) and a program
    gets a part of it.
    """
    first = _first_address()
    with _devices() as (nvml, handles):
        mine = [handle for handle in handles if first and _address(nvml, handle) == first]
        return _card(nvml, mine[0]) if mine else None


@cache
def cuda_driver() -> CudaDriver | None:
    """Ask CUDA's driver, which takes some tenths of a second at first; None if there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None

    def number(function: str, *args: Any) -> int:
        found = ctypes.c_int()
        return found.value if _call(cuda, function, ctypes.byref(found), *args) else 0

    def card(index: int) -> tuple[str, tuple[int, int], int]:
        name, device = ctypes.create_string_buffer(96), number("cuDeviceGet", index)
        _call(cuda, "cuDeviceGetName", name, len(name), device)
        n_bytes = ctypes.c_size_t()
        _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(n_bytes), device)
        high, low = (number("cuDeviceGetAttribute", which, device) for which in _CAPABILITY)
        return name.value.decode(errors="replace"), (high, low), n_bytes.value

    version = number("cuDriverGetVersion")
    n_cards = number("cuDeviceGetCount") if _call(cuda, "cuInit", 0) else 0
    return CudaDriver((version // 1000, version % 1000 // 10), tuple(map(card, range(n_cards))))


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, such as 580.65.06; None if it is not known."""
    found = ctypes.create_string_buffer(96)
    with _devices() as (nvml, _):
        ok = nvml is not None and _call(nvml, "nvmlSystemGetDriverVersion", found, len(found))
    return found.value.decode(errors="replace") if ok else None


def _first_address() -> str:
    """Return the PCI address of CUDA's first device, without a context; empty if it shows none."""
    try:
        cuda, found = ctypes.CDLL("libcuda.so.1"), ctypes.create_string_buffer(32)
    except OSError:
        return ""
    device = ctypes.c_int()
    is_found = (
        _call(cuda, "cuInit", 0)  # fails if all are hidden
        and _call(cuda, "cuDeviceGet", ctypes.byref(device), 0)
        and _call(cuda, "cuDeviceGetPCIBusId", found, len(found), device)
    )
    return found.value.decode().lower() if is_found else ""


@contextmanager
def _devices() -> Iterator[tuple[Any, list[ctypes.c_void_p]]]:
    """Open the driver's library; no handles if there is none, or one that is too old."""
    nvml: Any = None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        is_open = nvml.nvmlInit_v2() == 0
    except (OSError, AttributeError):
        is_open = False
    if not is_open:
        yield None, []
        return
    try:
        yield nvml, _handles(nvml)
    finally:
        nvml.nvmlShutdown()


def _handles(nvml: Any) -> list[ctypes.c_void_p]:
    count = ctypes.c_uint()
    if not _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count)):
        return []
    found = [(index, ctypes.c_void_p()) for index in range(count.value)]
    name = "nvmlDeviceGetHandleByIndex_v2"
    return [handle for index, handle in found if _call(nvml, name, index, ctypes.byref(handle))]


def _call(library: Any, name: str, *args: Any) -> bool:
    """Call a function and return whether it succeeded; an old driver lacks some."""
    try:
        return bool(getattr(library, name)(*args) == 0)
    except AttributeError:
        return False


def _address(nvml: Any, handle: ctypes.c_void_p) -> str:
    """Return the PCI address such as 0000:c1:00.0; empty if the driver does not tell."""
    pci = _Pci()
    ok = _call(nvml, "nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci))
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0" if ok else ""


def _card(nvml: Any, handle: ctypes.c_void_p) -> Card | None:
    name, memory = ctypes.create_string_buffer(96), _Memory()
    major, minor = ctypes.c_int(), ctypes.c_int()

    def number(function: str, *args: int) -> int:
        found = ctypes.c_uint()
        return found.value if _call(nvml, function, handle, *args, ctypes.byref(found)) else 0

    bus = number("nvmlDeviceGetMemoryBusWidth")
    memory_mhz = number("nvmlDeviceGetMaxClockInfo", _MEMORY_CLOCK)
    generation = number("nvmlDeviceGetMaxPcieLinkGeneration")
    width = number("nvmlDeviceGetMaxPcieLinkWidth")
    cores, mhz = number("nvmlDeviceGetNumGpuCores"), number("nvmlDeviceGetMaxClockInfo", _SM_CLOCK)
    known = all((bus, memory_mhz, generation in _LANE, width, cores, mhz))
    if not (
        known
        and not _is_divided(nvml, handle)
        and _call(nvml, "nvmlDeviceGetName", handle, name, ctypes.c_uint(len(name)))
        and _call(nvml, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        and _call(
            nvml, "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major),
            ctypes.byref(minor),
        )
    ):  # fmt: skip
        return None
    operations = _OPERATIONS.get((major.value, minor.value), 16)
    return Card(
        name.value.decode(errors="replace"), memory.total, 2 * memory_mhz * 1e6 * bus / 8,
        _LANE[generation] * width * _COPIED, f"PCIe {generation}.0 x{width}",
        cores * mhz * 1e6 * operations * _HELD_CLOCK,
    )  # fmt: skip


def _is_divided(nvml: Any, handle: ctypes.c_void_p) -> bool:
    now, next_start = ctypes.c_uint(), ctypes.c_uint()
    name = "nvmlDeviceGetMigMode"  # fails for a card that cannot be divided
    return _call(nvml, name, handle, ctypes.byref(now), ctypes.byref(next_start)) and now.value == 1
