"""Who computes which missing experts when a pass has several rows."""

from __future__ import annotations

import math

import pytest
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


@pytest.mark.parametrize(("fixed", "slower"), [(50.0, 1.5), (0.0, 1.0), (0.0, 0.7), (0.0, 9.0)])
def test_a_cpu_that_is_slower_than_alone_gets_less(fixed: float, slower: float) -> None:
    split, rows, found = MissSplit(ON_CPU, STREAMED, 0.2), [3, 2, *[1] * 15], dict[int, int]()

    def took(c: int) -> float:
        load = sum(1 + 0.2 * (r - 1) for r in rows[len(rows) - c :])
        return fixed + slower * curve(ON_CPU, load) if c else 0.0

    for n_rows in [8] * 300 + [16]:
        found[n_rows] = split.n_cpu(rows, n_rows)
        split.took(n_rows, took(found[n_rows]))
        split.took(n_rows, 0.0)  # the host handled what a graph could not fetch
    waits = [max(took(c), curve(STREAMED, len(rows) - c)) for c in range(len(rows) + 1)]
    best = min(waits)
    assert waits[found[8]] <= (1.1 if slower < 4.0 else 3.0) * best, "the limit is a factor of 4"
    assert found[16] == MissSplit(ON_CPU, STREAMED, 0.2).n_cpu(rows), "other passes: not known"
    assert split.decode == MissSplit(ON_CPU, STREAMED, 0.2).decode
    if slower == 1.5:
        assert waits[found[16]] > 1.15 * best and found[8] < found[16]


@given(rows=rows_of)
def test_a_mode_is_kept_for_any_number_of_rows(rows: list[int]) -> None:
    assert MissSplit.fixed(4, on_cpu=True).n_cpu(rows) == len(rows)
    assert MissSplit.fixed(4, on_cpu=False).n_cpu(rows) == 0
