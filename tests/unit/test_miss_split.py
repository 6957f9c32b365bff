"""Who computes which missing experts when a pass has several rows."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from moegraph.experts.cost import MissSplit

STREAMED = [0.0, 40.0, 80.0, 120.0, 160.0]
ON_CPU = [0.0, 60.0, 70.0, 80.0, 90.0]


def stall(split_rows: list[int], c: int, per_row: float) -> float:
    """Return how long c experts on the CPU and the others on the device take; rows fall."""
    on_cpu = split_rows[len(split_rows) - c :]
    load = sum(1 + per_row * (r - 1) for r in on_cpu)
    return max(curve(ON_CPU, load), curve(STREAMED, len(split_rows) - c))


def curve(points: list[float], n: float) -> float:
    if n >= len(points) - 1:
        return points[-1] * n / (len(points) - 1)
    low, high = points[math.floor(n)], points[math.floor(n) + 1]
    return low + (high - low) * (n - math.floor(n))


rows_of = st.lists(st.integers(1, 8), min_size=1, max_size=40).map(lambda r: sorted(r)[::-1])


@given(rows=rows_of, per_row=st.floats(0.0, 2.0))
def test_no_other_number_is_quicker(rows: list[int], per_row: float) -> None:
    split = MissSplit(ON_CPU, STREAMED, per_row)
    found = stall(rows, split.n_cpu(rows), per_row)
    assert found <= min(stall(rows, c, per_row) for c in range(len(rows) + 1)) + 1e-9


@given(rows=rows_of)
def test_a_mode_is_kept_for_any_number_of_rows(rows: list[int]) -> None:
    assert MissSplit.fixed(4, on_cpu=True).n_cpu(rows) == len(rows)
    assert MissSplit.fixed(4, on_cpu=False).n_cpu(rows) == 0
