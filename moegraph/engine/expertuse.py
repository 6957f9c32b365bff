"""What the expert caches of all stages did, as one: a layer's numbers are those of its stage."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..experts.cachestats import ExpertStats
from ..runner import AnyRunner, LayeredRunner
from ..runner.misses import MissHandler


class ExpertUse:
    """Reads the expert caches of a runner's stages.

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
        return list(dict.fromkeys(line for one in self.misses for line in one.warnings))
