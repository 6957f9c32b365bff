"""Where the results of a drafter's graph arrive in host memory, and drafts of races' winners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ggml.choose import TOTAL_WORD, likeliest_rows, winners
from ..ggml.device import HostBuffer
from ..ggml.lib import C, ffi
from ..ggml.ops import Tensor
from .drafter import Draft, Ids


class Readback:
    """Copies of tensors into host memory, which the next launch overwrites.

    rows: I32 numpy [n, words] of each of the tensors [words, n]. confidence: F32 numpy [n], or
    None. reads: the copies, n_reads of them.
    """

    def __init__(
        self, host: HostBuffer, tensors: Sequence[Tensor], confidence: Tensor | None = None
    ) -> None:
        copies, parts, at = list[dict[str, Any]](), list[npt.NDArray[np.uint8]](), 0
        for tensor in (*tensors, *([] if confidence is None else [confidence])):
            n_bytes = C.ggml_nbytes(tensor)
            copies.append({"src": tensor, "dst": host.address(at), "size": n_bytes})
            parts.append(host.array[at : at + n_bytes])
            at += n_bytes
        self.rows: list[Ids] = [
            part.view(np.int32).reshape(tensor.ne[1], -1) for part, tensor in zip(parts, tensors)
        ]
        self.confidence = None if confidence is None else parts[-1].view(np.float32)
        self.n_reads = len(copies)
        self.reads = ffi.new("struct mg_readback[]", copies)


def drawn(rows: Ids, n_top: int) -> Draft:
    """Return the draft of rows of candidates: winners first, then the likeliest others.

    rows: I32 numpy [n, words], see `likeliest_rows`. The draft may be shorter: it ends before a row
    with a logit that is not finite. If that is the first, its probabilities are NaN, so that
    `Draft.problem` says so.
    """
    is_bad = ~np.isfinite(rows.view(np.float32)[:, TOTAL_WORD])
    if len(rows) and is_bad[0]:
        nothing = np.full((1, n_top), np.nan, dtype=np.float32)
        return Draft(np.zeros((1, n_top), dtype=np.int32), nothing)
    if is_bad.any():
        rows = rows[: int(is_bad.argmax())]
    won, won_log_p = winners(rows)
    ids, log_p = likeliest_rows(rows[: len(won)], n_top)
    n = len(ids)
    tokens, logs = np.empty((n, n_top), dtype=np.int32), np.empty((n, n_top), dtype=np.float32)
    tokens[:, 0], logs[:, 0] = won[:n], won_log_p[:n]
    for at in range(n):
        others = np.flatnonzero(ids[at] != won[at])[: n_top - 1]
        tokens[at, 1:], logs[at, 1:] = ids[at, others], log_p[at, others]
    return Draft(tokens, logs)
