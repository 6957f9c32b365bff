"""What of a step's time is the machine's pace."""

from __future__ import annotations

import pytest

from moegraph.draft.controller import Controller
from moegraph.draft.pace import Pace
from moegraph.draft.plan import DraftSettings, Source, Step

_STEP, _MTP = 2.4e-3, Source("mtp", 8, 0.02, 0.17, 0.75, 3)


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


def test_a_plain_step_after_a_draft_counts_only_if_it_is_faster() -> None:
    controller = Controller([_MTP], DraftSettings())
    passes = controller.passes
    for _ in range(3):
        controller.observe(Step("", _STEP))
    for _ in range(8):
        controller.observe(Step("mtp", 2 * _STEP, 3, 4, 3, 3, 2, (0, 0, -1), (), 0.5 * _STEP))
        controller.observe(Step("", 1.5 * _STEP))
    assert passes.plain_s == pytest.approx(_STEP)
    for _ in range(8):
        controller.observe(Step("", 1.5 * _STEP))  # one after the other
    assert passes.plain_s > 1.1 * _STEP
    controller.observe(Step("mtp", 2 * _STEP, 3, 4, 3, 3, 2, (0, 0, -1), (), 0.5 * _STEP))
    before = passes.plain_s
    controller.observe(Step("", 0.5 * _STEP))
    passes.update()
    assert passes.plain_s < 0.8 * before
