"""Measures how fast a device reads its memory, and how fast bytes come to it from the host."""

from __future__ import annotations

import math
import time
from contextlib import closing

from ..ggml.device import Device
from ..ggml.handles import Context
from ..ggml.lib import C
from ..ggml.memory import place
from ..ggml.ops import F32

_BYTES = 64 << 20
_N_COPIES = 8
# The first measurement is slow, and another program may disturb any.
_N_TIMES = 4


def measure_rates(device: Device) -> tuple[float, float]:
    """Return bytes a second out of a device's memory, and from pinned host memory to it.

    It takes some hundredths of a second. The second is infinite for a device on another machine:
    it has all experts of its layers, so no pass waits for any.
    """
    with (
        Context(1) as context,
        closing(device.buffer(_BYTES, "measuring its speed", "free some of it")) as memory,
        closing(device.host_buffer(_BYTES // 2)) as host,
    ):
        words = C.ggml_new_tensor_1d(context.ptr, F32, _BYTES // 4)
        place(memory, words, 0)
        stream, half = device.compute.ptr, _BYTES // 2

        def seconds(n: int, copies_inside: bool) -> float:
            device.synchronize()
            start = time.perf_counter()
            for _ in range(n):
                if copies_inside:
                    C.mg_copy_bytes(stream, words, 0, words, half, half)
                else:
                    C.ggml_backend_tensor_set_async(stream, words, host.address(), 0, half)
            device.synchronize()
            return time.perf_counter() - start

        def least(n: int, copies_inside: bool) -> float:
            return min(seconds(n, copies_inside) for _ in range(_N_TIMES))

        # a copy reads and writes
        inside = 2 * _N_COPIES * half / least(_N_COPIES, True)
        if not device.can.host_access:
            return inside, math.inf
        return inside, 2 * half / least(2, False)
