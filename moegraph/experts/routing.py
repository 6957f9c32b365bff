"""What the router chose: how often each expert of each layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class RoutingCounts:
    """Sums over all passes; counts [n_layer][n_expert]: how often each expert was chosen."""

    def __init__(self, n_layer: int, n_expert: int) -> None:
        self.counts = [[0] * n_expert for _ in range(n_layer)]

    def add(self, il: int, ids: Sequence[int]) -> None:
        """Count the choice of a few rows of layer il; every id names an expert."""
        counts = self.counts[il]
        for expert in ids:
            counts[expert] += 1

    def add_batch(self, il: int, ids: npt.NDArray[np.int32]) -> None:
        """Do as `add` for the ids of many rows."""
        counts = self.counts[il]
        self.counts[il] = (np.bincount(ids.reshape(-1), minlength=len(counts)) + counts).tolist()
