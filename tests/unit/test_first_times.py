"""Graphs that are new: what of a step's time is theirs, and how many widths there are."""

from __future__ import annotations

from moegraph.draft.firsttimes import Excused, FirstTimes
from moegraph.draft.widths import Widths

STEP = 2.0  # seconds of a plain step


def observed(
    times: FirstTimes, verify_s: float, draft_s: float = 0.5, n_rows: int = 4, n_taken: int = 1
) -> Excused:
    spent, expected = (draft_s, verify_s), (0.5, 3.0)
    return times.observe("mtp", n_rows - 1, n_rows, n_taken, spent, expected, STEP)


def test_the_first_launches_of_a_graph_are_excused_if_they_are_dear() -> None:
    times = FirstTimes()
    assert [observed(times, s).verify for s in (15.0, 3.1, 14.0, 15.0)] == [12.0, 0.0, 11.0, 0.0]
    # a path of another length is committed by another graph, and a draft has one of its own
    assert observed(times, 6.0, n_taken=2).verify == 3.0
    assert observed(times, 3.0, draft_s=4.0, n_rows=6, n_taken=2) == Excused(3.5, 0.0)
    assert observed(times, 15.0, draft_s=0.6, n_rows=6, n_taken=2) == Excused(0.0, 12.0)


def test_there_is_a_limit_that_gains_raise() -> None:
    times = FirstTimes()
    assert observed(times, 3.0 + 28 * STEP).verify == 28 * STEP
    assert not times.has_credit
    assert observed(times, 3.0 + 28 * STEP) == Excused()
    for _ in range(100):
        times.earn(1.5)
    assert times.has_credit and observed(times, 3.0 + 28 * STEP).verify == 28 * STEP


def test_widths_are_opened_one_by_one_where_they_are_missed() -> None:
    widths = Widths((2, 3, 4, 5, 6, 8), 16.0)
    assert widths.open == (4,)
    for _ in range(3):
        widths.miss(6, 4.0)
        widths.miss(2, 1.0)
        widths.miss(4, 100.0)
        widths.miss(8, -100.0)
    assert widths.open == (4,)
    widths.miss(6, 4.0)
    assert widths.open == (4, 6)
    widths.miss(2, 14.0)  # what was missed before may be no longer
    assert widths.open == (4, 6)
    widths.have([2, 6, 32])
    assert widths.open == (2, 4, 6)
    assert Widths((2, 3), 1.0).open == (3,) and Widths((8, 9), 1.0).open == (8,)
    assert Widths((2, 3, 8), 0.0).open == (2, 3, 8) and Widths((), 1.0).open == ()


def test_graphs_that_are_known_to_exist_are_not_excused() -> None:
    times = FirstTimes()
    times.know(4)
    assert observed(times, 15.0) == Excused() == observed(times, 15.0, n_taken=4)
    assert observed(times, 15.0, n_rows=5).verify == 12.0
