"""Counters of the expert cache, as a value that can be subtracted."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class CacheStats:
    """Counters since the start, each numpy [n_layer].

    hits, misses: choices of the router whose expert was resident or not. missing: distinct experts
    missing, summed over steps: what had to be fetched or computed elsewhere. admitted, evicted,
    declined: slots given, taken away, and refused by the policy.
    """

    n_steps: int
    n_expert_used: int
    hits: Counts
    misses: Counts
    missing: Counts
    admitted: Counts
    evicted: Counts
    declined: Counts

    @property
    def hit_rate(self) -> float:
        """Return hits over all choices, pinned layers included; 1 when nothing was chosen."""
        chosen = int(self.hits.sum() + self.misses.sum())
        return float(self.hits.sum() / chosen) if chosen else 1.0

    @property
    def hit_rates(self) -> list[float]:
        """Return the hit rate of each layer; 1 for a layer where nothing was chosen."""
        chosen = self.hits + self.misses
        return np.where(chosen > 0, self.hits / np.maximum(chosen, 1), 1.0).tolist()

    @property
    def missing_per_step(self) -> float:
        """Return distinct missing experts of all layers per step."""
        return float(self.missing.sum() / self.n_steps) if self.n_steps else 0.0

    def since(self, earlier: CacheStats) -> CacheStats:
        """Return what was counted after earlier."""
        arrays = (f.name for f in fields(self) if f.name not in ("n_steps", "n_expert_used"))
        return CacheStats(
            self.n_steps - earlier.n_steps, self.n_expert_used,
            *(getattr(self, name) - getattr(earlier, name) for name in arrays),
        )  # fmt: skip
