"""What several devices or machines in a row do to the speed of answers: the law, as numbers. Pure.

A token passes all stages in turn. One sequence therefore keeps one stage busy at a time, and each
boundary adds a hop. Several sequences divide into groups, and stages work on different groups at
once. A smaller group costs more for each of its rows, because a pass reads its weights for fewer of
them; so the best number of groups is found by trying all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..experts.rowlaw import pass_time

# From a stage to the next one on two cards of one machine, through host memory (two H200).
HOP_S = 50e-6


@dataclass(frozen=True)
class Throughput:
    """Tokens a second of all sequences, and how it comes about.

    n_groups: groups of sequences in the stages at once. busy: share of the time in which a stage
    computes, the mean of all.
    """

    tokens_per_s: float
    n_groups: int
    busy: float


def throughput(
    stage_seconds: Sequence[float], hop_s: float, n_seq: int, n_groups: int = 0,
    rows_time: Callable[[int], float] = pass_time,
) -> Throughput:  # fmt: skip
    """Return what n_seq sequences get from stages in a row.

    stage_seconds: of each stage, for a pass of one row. hop_s: from a stage to the next, and from
    the last one's results back to the first. n_groups: 0 for the best number. rows_time: seconds of
    a pass of so many rows, in passes of one row.
    """
    if n_groups:
        return _of_groups(stage_seconds, hop_s, n_seq, n_groups, rows_time)
    each = (
        _of_groups(stage_seconds, hop_s, n_seq, n, rows_time)
        for n in range(1, min(n_seq, 4 * len(stage_seconds)) + 1)
    )
    return max(each, key=lambda found: found.tokens_per_s)


def _of_groups(
    stage_seconds: Sequence[float], hop_s: float, n_seq: int, n_groups: int,
    rows_time: Callable[[int], float],
) -> Throughput:  # fmt: skip
    n_rows = -(-n_seq // n_groups)
    scale = rows_time(n_rows)
    through = scale * sum(stage_seconds) + hop_s * len(stage_seconds)
    # a group comes back after it has been through; a stage takes the groups one after another
    round_s = max(through, n_groups * scale * max(stage_seconds))
    busy = n_groups * scale * sum(stage_seconds) / (len(stage_seconds) * round_s)
    return Throughput(n_seq / round_s, n_groups, busy)
