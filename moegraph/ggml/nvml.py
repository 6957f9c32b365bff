"""Device memory as the NVIDIA driver counts it, without opening a CUDA context.

A context itself takes some hundred MiB, which CUDA's own figures cannot show: they exist only once
it is open.
"""

from __future__ import annotations

import ctypes


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def used_bytes(index: int) -> int | None:
    """Return the bytes in use on a GPU by all processes; None where the driver does not tell."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device, memory = ctypes.c_void_p(), _Memory()
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
            return None
        if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != 0:
            return None
        return int(memory.used)
    finally:
        nvml.nvmlShutdown()
