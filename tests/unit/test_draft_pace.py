"""What of a step's time is the machine's pace."""

from __future__ import annotations

import pytest

from moegraph.draft.pace import Pace


@pytest.mark.parametrize(
    ("draft", "verify", "expected"),
    [
        (1.0, 1.0, 1.0),
        (2.0, 1.8, 1.8),
        (0.5, 0.6, 0.6),
        (2.0, 1.0, 1.0),  # the draft alone became dear
        (1.0, 3.0, 1.0),  # the pass alone
        (0.5, 2.0, 1.0),
    ],
)
def test_what_both_parts_of_a_step_share_is_the_pace(
    draft: float, verify: float, expected: float
) -> None:
    assert Pace().of(draft, verify) == expected


def slow_for(pace: Pace, n: int) -> list[float]:
    return [pace.of(2.0, 2.0) for _ in range(n)]


def test_a_plain_step_confirms_that_the_machine_is_slow() -> None:
    pace = Pace()
    slow_for(pace, 3)
    assert not pace.is_doubted
    slow_for(pace, 1)
    assert pace.is_doubted
    pace.plain(1.9)
    assert not pace.is_doubted and slow_for(pace, 9) == [2.0] * 9
    pace.of(1.0, 1.0)  # it is fast again; the next time is another matter
    slow_for(pace, 4)
    assert pace.is_doubted


def test_drafts_that_became_dear_are_not_the_machine() -> None:
    pace = Pace()
    slow_for(pace, 4)
    pace.plain(1.0)
    assert slow_for(pace, 200) == [1.0] * 200 and not pace.is_doubted
    assert slow_for(pace, 60)[-1] == 2.0
