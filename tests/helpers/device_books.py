"""Device memory in use, by the books of what is allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

import pytest

if TYPE_CHECKING:  # they need the native libraries
    from moegraph.engine import Engine
    from moegraph.ggml.device import Device
    from moegraph.ggml.handles import Buffer


class Books:
    """Counts the bytes of device buffers that are open; peak: the most at any time."""

    def __init__(self) -> None:
        self._open: WeakSet[Buffer] = WeakSet()
        self._sizes: dict[int, int] = {}
        self.peak = 0

    def add(self, buffer: Buffer, size: int) -> Buffer:
        """Note a new buffer."""
        self._open.add(buffer)
        self._sizes[id(buffer)] = size
        self.peak = max(self.peak, self.n_bytes)
        return buffer

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the open buffers."""
        return sum(self._sizes[id(buffer)] for buffer in self._open if not buffer.is_closed)


def keep_books(patch: pytest.MonkeyPatch) -> Books:
    """Keep books of all device buffers; the shared block of graphs is not one of them."""
    from moegraph.ggml.device import Device

    found, real = Books(), Device.buffer

    def buffer(self: Device, size: int, what: str, remedy: str) -> Buffer:
        return found.add(real(self, size, what, remedy), size)

    patch.setattr(Device, "buffer", buffer)
    return found


def planned(engine: Engine) -> int:
    """Return what the plan grants to buffers: on the CPU, weights stay where the file is mapped."""
    plan = engine.plan.bytes
    return engine.plan.total - plan["weights"] - plan["other"] - plan["pinned"]
