"""Counters of the expert cache, as values that can be subtracted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .policy import Counts


@dataclass(frozen=True)
class CacheStats:
    """Counters since the start, each numpy [n_layer].

    n_steps: passes. hits, misses: choices of the router whose expert was, or was not, resident.
    missing: distinct missing experts, summed over passes. admitted, evicted, declined: experts that
    got a slot, lost it, or were refused one by the policy.
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
        """Return hits over all choices, full layers included; 1 if nothing was chosen."""
        chosen = int(self.hits.sum() + self.misses.sum())
        return float(self.hits.sum() / chosen) if chosen else 1.0

    @property
    def hit_rates(self) -> list[float]:
        """Return the hit rate of each layer, 1 if nothing was chosen there."""
        chosen = self.hits + self.misses
        rates: list[float] = np.where(chosen > 0, self.hits / np.maximum(chosen, 1), 1.0).tolist()
        return rates

    @property
    def missing_per_step(self) -> float:
        """Return the missing experts of all layers per pass."""
        return float(self.missing.sum() / self.n_steps) if self.n_steps else 0.0

    def _arrays(self) -> tuple[Counts, ...]:
        return self.hits, self.misses, self.missing, self.admitted, self.evicted, self.declined

    @classmethod
    def joined(cls, parts: Sequence[CacheStats]) -> CacheStats:
        """Return the counts of stages, of which each counts its own layers, as one."""
        arrays = (np.sum(each, axis=0) for each in zip(*(part._arrays() for part in parts)))
        return cls(max(part.n_steps for part in parts), parts[0].n_expert_used, *arrays)

    def since(self, earlier: CacheStats) -> CacheStats:
        """Return the counts since earlier."""
        arrays = (now - then for now, then in zip(self._arrays(), earlier._arrays()))
        return CacheStats(self.n_steps - earlier.n_steps, self.n_expert_used, *arrays)


@dataclass(frozen=True)
class ExpertStats:
    """What the expert cache did, and what it cost.

    n_bytes_to_device: expert bytes that crossed to the device, uploaded or fetched, including the
    first filling of the slots. n_cpu_experts: experts computed on the CPU, an expert of a layer
    counted once a pass. n_fetching: layers whose graphs fetch in passes of one row, at this time.
    phases_s: seconds of the host by phase: launch, wait, resolve. n_file_bytes, file_s: of experts
    that were read from the file while the model ran or its slots were filled, and seconds in which
    the host waited for them.
    """

    cache: CacheStats
    n_bytes_to_device: int
    n_cpu_experts: int
    n_fetching: int
    phases_s: dict[str, float]
    n_file_bytes: int = 0
    file_s: float = 0.0

    @classmethod
    def joined(cls, parts: Sequence[ExpertStats]) -> ExpertStats:
        """Return the counters of all stages as one."""
        return cls(
            CacheStats.joined([part.cache for part in parts]),
            phases_s={name: sum(p.phases_s[name] for p in parts) for name in parts[0].phases_s},
            **{name: sum(getattr(part, name) for part in parts) for name in _SUMS},
        )

    def since(self, earlier: ExpertStats) -> ExpertStats:
        """Return what happened since earlier."""
        return ExpertStats(
            self.cache.since(earlier.cache),
            self.n_bytes_to_device - earlier.n_bytes_to_device,
            self.n_cpu_experts - earlier.n_cpu_experts,
            self.n_fetching,
            {name: s - earlier.phases_s[name] for name, s in self.phases_s.items()},
            self.n_file_bytes - earlier.n_file_bytes,
            self.file_s - earlier.file_s,
        )

    def report(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        n_passes, cache = max(self.cache.n_steps, 1), self.cache
        names = ("hits", "misses", "missing", "admitted", "evicted", "declined")
        return {
            "n_passes": cache.n_steps,
            **{name: int(getattr(cache, name).sum()) for name in names},
            "hit_rate": round(cache.hit_rate, 5),
            "hit_rate_by_layer": [round(rate, 4) for rate in cache.hit_rates],
            "uploaded_bytes": self.n_bytes_to_device,
            "uploaded_bytes_per_pass": round(self.n_bytes_to_device / n_passes),
            "file_bytes_per_pass": round(self.n_file_bytes / n_passes),
            "file_us_per_pass": round(1e6 * self.file_s / n_passes, 2),
            "n_cpu_experts": self.n_cpu_experts,
            "n_fetching_layers": self.n_fetching,
            "phases_us_per_pass": {
                name: round(1e6 * s / n_passes, 2) for name, s in self.phases_s.items()
            },
        }


# Numbers of `ExpertStats` that stages add up.
_SUMS = ("n_bytes_to_device", "n_cpu_experts", "n_fetching", "n_file_bytes", "file_s")
# What a profile says counts as much as so many tokens.
_PRIOR_TOKENS = 256


class RoutingCounts:
    """Sums over all passes; counts [n_layer][n_expert]: how often each expert was chosen.

    expected: layer -> choices of each expert in `_PRIOR_TOKENS` tokens, as a profile has it.
    """

    def __init__(self, n_layer: int, n_expert: int) -> None:
        self.counts = [[0] * n_expert for _ in range(n_layer)]
        self.expected: dict[int, npt.NDArray[np.float64]] = {}

    def expect(self, il: int, shares: Sequence[float]) -> None:
        """Take a profile's choices of each expert per token, F64 [n_expert]."""
        self.expected[il] = _PRIOR_TOKENS * np.asarray(shares, dtype=np.float64)

    def popularity(self, il: int) -> npt.NDArray[np.float64]:
        """Return how often each expert was chosen, a profile's choices included: [n_expert]."""
        counts = np.asarray(self.counts[il], dtype=np.float64)
        return counts + self.expected[il] if il in self.expected else counts

    def add(self, il: int, ids: Sequence[int]) -> None:
        """Count the choice of a few rows of layer il; every id names an expert."""
        counts = self.counts[il]
        for expert in ids:
            counts[expert] += 1

    def add_batch(self, il: int, chosen: Counts) -> None:
        """Count the choice of many rows; chosen [n_expert]: how many of them chose each expert."""
        self.counts[il] = (chosen + self.counts[il]).tolist()
