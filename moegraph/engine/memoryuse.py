"""What a loaded model takes, in bytes."""

from __future__ import annotations

import resource
import sys

from ..runner import LayeredRunner
from .loader import LoadedModel


def memory_use(model: LoadedModel) -> dict[str, int]:
    """Return bytes: peaks of device and host, parts on the host, and parts on the device."""
    stage, state, runner = model.stage, model.stage.state, model.runner
    misses = runner.misses if isinstance(runner, LayeredRunner) else None
    scale = 1 if sys.platform == "darwin" else 1024
    return {
        "device_peak_bytes": stage.device.note_peak(),
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale,
        "host_mapped_bytes": stage.mapped_bytes,
        "host_pinned_bytes": misses.pinned_bytes if misses else 0,
        "weights_bytes": stage.weights.n_bytes + stage.banks.n_bytes,
        "kv_bytes": state.kv_bytes,
        "state_bytes": state.recurrent_bytes + state.drafts.n_bytes,
        "compute_bytes": runner.compute_bytes,
        "drafters_bytes": sum(drafter.n_bytes for drafter in model.drafters) + stage.taps.n_bytes,
    }
