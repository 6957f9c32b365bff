"""What a sweep computes, and how its rows are cut into chunks and parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..ggml.ops import Tensor
from ..graphs.head import Results

Tap = Callable[[Tensor, int, int], None]


@dataclass(frozen=True)
class SweepBatch:
    """What a sweep computes.

    tokens: I32 numpy [n]. slot: the sequence that they continue. all_rows, greedy, draws: as in
    `Batch`; draws only without all_rows.
    cuts: positions at which chunks are cut and the recurrent states copied to host memory: they are
    in `Sweep.saved` once it has ended, as far as there was memory for them.
    as_pass: compute it as one pass.
    max_rows: most rows of a chunk, if fewer than there is memory for; 0: as many as that.
    taps: layer -> called with the outputs of that layer for some rows: F32 [n_embd, at least n], n,
    and the position of the first row. The call enqueues on the compute stream what it wants of
    them, because the next layer overwrites them.
    """

    tokens: npt.NDArray[np.int32]
    slot: int = 0
    all_rows: bool = False
    greedy: bool = False
    draws: npt.NDArray[np.int32] | None = None
    cuts: Sequence[int] = ()
    as_pass: bool = False
    max_rows: int = 0
    taps: Mapping[int, Tap] = field(default_factory=dict)

    @property
    def results(self) -> Results:
        """What the prompt returns for each row that has results."""
        if self.greedy:
            return Results.ARGMAX
        return Results.LOGITS if self.draws is None else Results.CANDIDATES


@dataclass(frozen=True)
class Chunk:
    """Rows [row, row + n) of a part of the prompt; first: position of the first."""

    row: int
    n: int
    first: int


def cut_chunks(n: int, first: int, max_rows: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """Return (position, rows) of the chunks of n tokens from position first on."""
    ends = sorted({cut for cut in cuts if first < cut < first + n} | {first + n})
    found, at = [], first
    for end in ends:
        while at < end:
            found.append((at, min(max_rows, end - at)))
            at += found[-1][1]
    return found


def cut_parts(chunks: Sequence[tuple[int, int]], n_rows: int, n_chunks: int) -> list[list[Chunk]]:
    """Return the chunks of as few parts as possible, of at most n_rows rows in n_chunks chunks."""
    parts: list[list[Chunk]] = []
    n_used = n_rows
    for first, n in chunks:
        if n_used + n > n_rows or len(parts[-1]) == n_chunks:
            parts.append([])
            n_used = 0
        parts[-1].append(Chunk(n_used, n, first))
        n_used += n
    return parts
