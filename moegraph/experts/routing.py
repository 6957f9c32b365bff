"""What the router chose: how often each expert of each layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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

    def add_batch(self, il: int, ids: npt.NDArray[np.int32]) -> None:
        """Do as `add` for the ids of many rows."""
        counts = self.counts[il]
        self.counts[il] = (np.bincount(ids.reshape(-1), minlength=len(counts)) + counts).tolist()
