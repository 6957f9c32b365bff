"""Parts of the controller: rates of acceptance, costs of passes and drafts, shapes, statistics."""

from __future__ import annotations

import pytest

from moegraph.draft.estimates import PassTimes
from moegraph.draft.plan import SpecStats, Step, expected_tokens

WIDTHS = (2, 3, 4, 6, 8, 16)


@pytest.mark.parametrize("most", [0, 2, 9])
def test_tokens_that_a_chain_is_expected_to_give(most: int) -> None:
    found = expected_tokens((0.9, 0.5, 0.2), most)
    assert found == pytest.approx([1.0, 1.9, 2.35, 2.44][: most + 1])


def test_measured_times_replace_the_law_also_at_widths_nearby() -> None:
    times = PassTimes(WIDTHS)
    for _ in range(4):
        times.observe(1, 2e-3, 0)
    for at in range(40):
        times.observe(8, 500.0 if at == 20 else 6e-3, 0)  # once the process slept
    times.update()
    assert times.seconds[8] == pytest.approx(6e-3, rel=0.06)
    by_law = 2e-3 * 1.795  # six rows
    assert by_law * 1.1 < times.seconds[6] < by_law * 1.57
    assert times.seconds[16] > 2e-3 * 2.7 * 1.2
    assert times.seconds[2] == pytest.approx(2.56e-3, rel=0.15)


def test_statistics_are_sums_and_rates_of_steps() -> None:
    stats = SpecStats()
    stats.add(Step("", 2e-3), 0.0)
    stats.add(Step("mtp", 6e-3, 3, 5, 4, 4, 2, (0, 0, -1), (), 1e-3, 4e-3, 0.5e-3), 2e-3)
    before = stats.copy()
    stats.add(Step("mtp", 4e-3, 2, 4, 2, 2, 1, (1,), (), 1e-3, 3e-3, 0.5e-3), 2e-3)
    stats.add(Step("dflash", 0.0, 1, 3, 2, 2, 0, (-1,)), 2e-3)  # its time is not known
    stats.add(Step("mtp", 2.5e-3, 1, 1, 2), 2e-3)  # not worth a row
    assert stats.report() == {
        "source": "mtp", "steps": 3, "plain_steps": 2, "drafted": 9, "accepted": 3,
        "tokens_per_step": 2.0, "accepted_by_position": [0.3333, 0.3333, 0.0, 0.0],
        "drafter_ms": 1.0, "verify_ms": 3.5, "commit_ms": 0.5,
        "speedup": round(12 / 12.5, 4), "chosen": {"dflash": {"3": 1}, "mtp": {"4": 1, "5": 1}},
    }  # fmt: skip
    later = stats.since(before)
    assert (later.steps, later.tokens, later.accepted, later.plain_steps) == (2, 3, 1, 1)
    assert later.accepted_by_position == [0.0, 0.0]
    assert later.chosen == {("mtp", 4): 1, ("dflash", 3): 1}
    assert stats.since(stats) == SpecStats(verified_at=(0,) * 4, accepted_at=(0,) * 4)
    assert SpecStats().report()["source"] is None and SpecStats().report()["speedup"] is None
