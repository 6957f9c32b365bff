"""Device memory as the NVIDIA driver counts it, without opening a CUDA context.

A context takes some hundred MiB. CUDA cannot report them: its own figures exist only once the
context is open.
"""

from __future__ import annotations

import ctypes


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Pci(ctypes.Structure):
    _fields_ = [
        ("legacy", ctypes.c_char * 16), ("domain", ctypes.c_uint), ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint), ("ids", ctypes.c_uint * 2), ("name", ctypes.c_char * 32),
    ]  # fmt: skip


def used_bytes() -> dict[str, int]:
    """Return the bytes in use by all processes on each GPU, by PCI address such as 0000:c1:00.0.

    The driver and CUDA may number GPUs differently, but the address is the same. Empty if there is
    no driver or it does not tell.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return {}
    try:
        if nvml.nvmlInit_v2() != 0:
            return {}
    except AttributeError:
        return {}
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return {}
        found = (_read(nvml, index) for index in range(count.value))
        return dict(filter(None, found))
    except AttributeError:  # an old driver without one of these functions
        return {}
    finally:
        nvml.nvmlShutdown()


def _read(nvml: ctypes.CDLL, index: int) -> tuple[str, int] | None:
    handle, memory, pci = ctypes.c_void_p(), _Memory(), _Pci()
    ok = (
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0
        and nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0
        and nvml.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(pci)) == 0
    )
    return (f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0", memory.used) if ok else None
