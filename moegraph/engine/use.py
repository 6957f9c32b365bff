"""What a loaded model takes of the memory, and what its expert caches did."""

from __future__ import annotations

import resource
import sys

import numpy as np
import numpy.typing as npt

from ..experts.cachestats import ExpertStats
from ..experts.policy import few_slots_warning
from ..runner import AnyRunner, LayeredRunner
from ..runner.misses import MissHandler
from .loader import LoadedModel


def memory_use(model: LoadedModel) -> dict[str, int]:
    """Return bytes: peaks of device and host, parts on the host, and parts on the device."""
    stages, runner = model.stages, model.runner
    misses = [part.misses for part in runner.parts if isinstance(part, LayeredRunner)]
    rings = [part.sweeps.ring for part in runner.parts]  # experts pass through them
    # several stages on one device measure the same memory
    peaks = {stage.device.name: stage.device.note_peak() for stage in stages}
    scale = 1 if sys.platform == "darwin" else 1024
    return {
        "device_peak_bytes": sum(peaks.values()),
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale,
        "host_mapped_bytes": sum(stage.mapped_bytes for stage in stages),
        "host_pinned_bytes": sum(one.store.pinned_bytes for one in misses if one)
        + model.sequences.copies.pinned_bytes,
        "weights_bytes": sum(s.weights.n_bytes + s.banks.n_bytes for s in stages)
        + sum(ring.n_bytes for ring in rings if ring),
        "kv_bytes": sum(s.state.kv_bytes for s in stages),
        "state_bytes": sum(s.state.recurrent_bytes + s.state.drafts.n_bytes for s in stages),
        "compute_bytes": sum(part.compute_bytes for part in runner.parts),
        "drafters_bytes": sum(drafter.n_bytes for drafter in model.drafters)
        + sum(stage.hidden_states.n_bytes for stage in stages),
    }


class ExpertUse:
    """What the expert caches of all stages did, as one: a layer's numbers are those of its stage.

    misses: of the stages where experts can be missing.
    """

    def __init__(self, runner: AnyRunner) -> None:
        self._layered = [part for part in runner.parts if isinstance(part, LayeredRunner)]
        self.misses: list[MissHandler] = [one.misses for one in self._layered if one.misses]

    def stats(self) -> ExpertStats | None:
        """Return the counters; None if every stage computes a pass as one graph."""
        found = []
        for part in self._layered:
            phases = dict(part.phases)
            if part.misses:
                found.append(part.misses.stats(phases))
            else:
                found.append(ExpertStats(part.cache.stats, 0, 0, 0, phases))
        return ExpertStats.joined(found) if found else None

    def counts(self) -> npt.NDArray[np.int64] | None:
        """Return how often each expert was chosen, [n_layer, n_expert]; None if none can miss."""
        each = [np.array(one.residency.routing.counts, dtype=np.int64) for one in self.misses]
        return np.sum(each, axis=0) if each else None

    @property
    def warnings(self) -> list[str]:
        """Return warnings about pinned memory and slots, one line each, or ''."""
        if not self.misses:
            return []
        caches = [one.residency.cache for one in self.misses]
        # in its cache, the layers of other stages count as full
        n_slots = np.min([cache.n_slots for cache in caches], axis=0).tolist()
        few = few_slots_warning(n_slots, caches[0].n_expert_used)
        return [*dict.fromkeys(one.store.warning for one in self.misses), few]
