"""Drafts that follow the winners of races, from what the device lists of each row."""

from __future__ import annotations

import numpy as np

from ..ggml.choose import likeliest_rows, winners
from .drafter import Draft, Ids


def drawn(rows: Ids, n_top: int) -> Draft:
    """Return the draft of rows of candidates: winners first, then the likeliest others.

    rows: I32 numpy [n, words], see `likeliest_rows`. The draft may be shorter.
    """
    won, won_log_p = winners(rows)
    ids, log_p = likeliest_rows(rows[: len(won)], n_top)
    n = len(ids)
    tokens, logs = np.empty((n, n_top), dtype=np.int32), np.empty((n, n_top), dtype=np.float32)
    tokens[:, 0], logs[:, 0] = won[:n], won_log_p[:n]
    for at in range(n):
        others = np.flatnonzero(ids[at] != won[at])[: n_top - 1]
        tokens[at, 1:], logs[at, 1:] = ids[at, others], log_p[at, others]
    return Draft(tokens, logs)
