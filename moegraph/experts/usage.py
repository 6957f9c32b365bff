"""How often the router chose each expert."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import InternalError


class ExpertUsage:
    """Counts of chosen experts, numpy shape [n_layer, n_expert]."""

    def __init__(self, n_layer: int, n_expert: int) -> None:
        self.counts = np.zeros((n_layer, n_expert), dtype=np.int64)

    def observe(self, il: int, ids: npt.NDArray[np.int32]) -> None:
        """Count the ids that layer il chose for one pass.

        Raises:
            InternalError: an id is out of range, which only a broken router can produce.
        """
        row = self.counts[il]
        if ids.size <= 16:
            # numpy's own overhead is larger than this loop for one token
            for expert in ids.tolist():
                if not 0 <= expert < row.size:
                    raise InternalError(f"layer {il}: router chose expert {expert} of {row.size}")
                row[expert] += 1
            return
        if ids.min() < 0 or ids.max() >= row.size:
            raise InternalError(f"layer {il}: router chose an expert outside 0..{row.size - 1}")
        row += np.bincount(ids, minlength=row.size)

    def busiest_quarter_share(self) -> list[float]:
        """Return, for each layer, the share of choices that its busiest quarter of experts took."""
        n_expert = self.counts.shape[1]
        top = np.sort(self.counts, axis=1)[:, -max(1, n_expert // 4) :].sum(axis=1)
        return (top / np.maximum(self.counts.sum(axis=1), 1)).tolist()

    def reset(self) -> None:
        """Start counting anew."""
        self.counts[:] = 0
