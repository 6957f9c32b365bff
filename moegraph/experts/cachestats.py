"""Counters of the expert cache, as values that can be subtracted."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

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
        rates: list[float] = np.where(chosen > 0, self.hits / np.maximum(chosen, 1), 1.0).tolist()
        return rates

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


@dataclass(frozen=True)
class ExpertStats:
    """What the expert cache did, and what it cost.

    n_bytes_to_device: expert bytes sent to the device, the first filling of the slots included.
    n_cpu_experts: experts computed on the CPU, one for each layer and pass. n_fetching: layers
    whose graphs fetch by themselves in passes of one row, as things stand. prefetch: experts
    guessed, guessed right and fetched ahead, from the start on; None where nobody guesses.
    phases_s: seconds of the host by phase: launch, wait, resolve. guard: what the guard over the
    cache found, from the start on; None where no slot can change.
    """

    cache: CacheStats
    n_bytes_to_device: int
    n_cpu_experts: int
    n_fetching: int
    prefetch: dict[str, int] | None
    phases_s: dict[str, float]
    guard: dict[str, Any] | None = None

    def since(self, earlier: ExpertStats) -> ExpertStats:
        """Return what happened after earlier."""
        return ExpertStats(
            self.cache.since(earlier.cache),
            self.n_bytes_to_device - earlier.n_bytes_to_device,
            self.n_cpu_experts - earlier.n_cpu_experts,
            self.n_fetching,
            self.prefetch,
            {name: s - earlier.phases_s[name] for name, s in self.phases_s.items()},
            self.guard,
        )

    def report(self) -> dict[str, Any]:
        """Return plain numbers for JSON; a pass is one forward pass, of a token or of many."""
        steps, cache = max(self.cache.n_steps, 1), self.cache
        return {
            "n_passes": cache.n_steps,
            "hits": int(cache.hits.sum()),
            "misses": int(cache.misses.sum()),
            "missing": int(cache.missing.sum()),
            "admitted": int(cache.admitted.sum()),
            "evicted": int(cache.evicted.sum()),
            "declined": int(cache.declined.sum()),
            "hit_rate": round(cache.hit_rate, 5),
            "hit_rate_by_layer": [round(rate, 4) for rate in cache.hit_rates],
            "fetched_bytes": self.n_bytes_to_device,
            "fetched_bytes_per_pass": round(self.n_bytes_to_device / steps),
            "n_cpu_experts": self.n_cpu_experts,
            "n_fetching_layers": self.n_fetching,
            "prefetch": self.prefetch,
            "phases_us_per_pass": {
                name: round(1e6 * s / steps, 2) for name, s in self.phases_s.items()
            },
            "guard": self.guard,
        }
