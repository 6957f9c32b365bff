"""What the candidates of drafted rows depend on: a race with its key, or none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..ggml.choose import DRAW_WORDS


def no_races(n: int) -> npt.NDArray[np.int32]:
    """Return what n rows without a temperature depend on: I32 numpy [n, DRAW_WORDS]."""
    words = np.full((n, DRAW_WORDS), -1, dtype=np.int32)
    words[:, 0] = 0
    return words


def race_words(temperature: float, keys: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return what the races of rows depend on: I32 numpy [len(keys), DRAW_WORDS]."""
    words = no_races(len(keys))
    with np.errstate(over="ignore"):
        words[:, 0] = np.float32(1.0 / temperature).view(np.int32)
    words[:, 1:3] = np.array(keys, dtype=np.uint64).view(np.int32).reshape(-1, 2)
    return words
