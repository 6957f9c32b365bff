"""What a device can do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .lib import C, ffi

if TYPE_CHECKING:
    from . import _native


@dataclass(frozen=True)
class Capabilities:
    """What a device can do; code asks for these, not for the kind of device.

    streams: a launch returns before its work is done; uploads have a stream of their own, and
        events order the two.
    own_memory: its memory is not the host's. Weights are copied there, through pinned memory;
        otherwise they stay where the file is mapped.
    host_access: graphs can read and write memory of this host. Without it no expert may be missing,
        and one graph computes a pass.
    exact_sums: its results equal llama.cpp's bit for bit if sums have llama.cpp's order.
    cpu_threads: graphs run on CPU threads. Their number and their way of waiting can change between
        two graphs, and a flag stops them between two nodes.
    """

    streams: bool
    own_memory: bool
    host_access: bool
    exact_sums: bool
    cpu_threads: bool

    @classmethod
    def of(cls, dev: _native.ggml_backend_device_ptr) -> Capabilities:
        """Return what ggml says of a device."""
        props = ffi.new("struct ggml_backend_dev_props *")
        C.ggml_backend_dev_get_props(dev, props)
        is_cpu = props.type == C.GGML_BACKEND_DEVICE_TYPE_CPU
        return cls(
            streams=bool(getattr(props.caps, "async")) and bool(props.caps.events),
            own_memory=not props.caps.buffer_from_host_ptr,
            host_access=True,
            exact_sums=is_cpu,
            cpu_threads=is_cpu,
        )

    def on_worker(self, kind: str) -> Capabilities:
        """Return what the device can do from here, if it is a worker's; kind: 'cpu' or another."""
        return replace(self, host_access=False, exact_sums=kind == "cpu")
