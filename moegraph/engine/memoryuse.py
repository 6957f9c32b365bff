"""What a loaded model takes, in bytes."""

from __future__ import annotations

import resource
import sys

from ..runner import LayeredRunner
from .loader import LoadedModel


def memory_use(model: LoadedModel) -> dict[str, int]:
    """Return bytes: peaks of device and host, parts on the host, and parts on the device."""
    stages, runner = model.stages, model.runner
    misses = [part.misses for part in runner.parts if isinstance(part, LayeredRunner)]
    rings = [part.sweeps.ring for part in runner.parts]  # experts pass through them
    scale = 1 if sys.platform == "darwin" else 1024
    return {
        "device_peak_bytes": _peak(model),
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale,
        "host_mapped_bytes": sum(stage.mapped_bytes for stage in stages),
        "host_pinned_bytes": sum(one.store.pinned_bytes for one in misses if one),
        "weights_bytes": sum(s.weights.n_bytes + s.banks.n_bytes for s in stages)
        + sum(ring.n_bytes for ring in rings if ring),
        "kv_bytes": sum(s.state.kv_bytes for s in stages),
        "state_bytes": sum(s.state.recurrent_bytes + s.state.drafts.n_bytes for s in stages),
        "compute_bytes": sum(part.compute_bytes for part in runner.parts),
        "drafters_bytes": sum(drafter.n_bytes for drafter in model.drafters)
        + sum(stage.taps.n_bytes for stage in stages),
    }


def _peak(model: LoadedModel) -> int:
    """Return the peak of all devices; several stages on one device measure the same memory."""
    peaks = {device.name: device.note_peak() for device in model.devices}
    return sum(peaks.values())
