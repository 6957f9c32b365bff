"""Log probabilities of tokens, from a row of logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .requests import TokenLogprobs


def token_logprobs(logits: npt.NDArray[np.float32], token: int, n_top: int) -> TokenLogprobs:
    """Return the log probability of a token and of the n_top likeliest ones, before sampling.

    logits: F32 [n_vocab], finite. Of equally likely tokens the smaller id comes first.
    """
    largest = logits.max()
    below = float(largest) + float(np.log(np.exp(logits - largest, dtype=np.float64).sum()))
    top: list[tuple[int, float]] = []
    if n_top:
        floor = np.partition(logits, logits.size - n_top)[logits.size - n_top]
        ids = np.flatnonzero(logits >= floor)
        order = ids[np.argsort(-logits[ids], kind="stable")][:n_top]
        top = [(int(i), float(logits[i]) - below) for i in order]
    return TokenLogprobs(token, float(logits[token]) - below, tuple(top))
