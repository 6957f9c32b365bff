"""What counts as the time of a pass."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moegraph.kinds import SweepStep
from moegraph.loop import costs as measured
from moegraph.loop.costs import Costs, Tally, decode_pass


@pytest.mark.parametrize("is_reading", [False, True])
def test_time_in_which_nothing_is_computed_does_not_count(
    monkeypatch: pytest.MonkeyPatch, is_reading: bool
) -> None:
    now = 1.0
    monkeypatch.setattr(measured.time, "perf_counter", lambda: now)
    costs = Costs()
    told = Tally(costs, SimpleNamespace(n_built=0))  # type: ignore[arg-type]
    if is_reading:  # steps run meanwhile, and are measured together with the pass
        told.stepped(SweepStep("recurrent", 512))
    now += 0.004
    told.pause()
    now += 0.006
    seconds = told.end_round(8)
    told.learn()
    expected_s = 0.01 if is_reading else 0.006
    assert seconds == (None if is_reading else pytest.approx(expected_s))
    assert costs.pass_s(8) == pytest.approx(expected_s)
    assert told.counts.prompt_s + told.counts.decode_s == pytest.approx(expected_s)


def test_what_a_pass_took_is_learned_at_leisure_and_never_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1.0
    monkeypatch.setattr(measured.time, "perf_counter", lambda: now)
    costs = Costs()
    told = Tally(costs, SimpleNamespace(n_built=0))  # type: ignore[arg-type]
    for n_rows, seconds in ((1, 0.01), (8, 0.02)):
        now += seconds
        told.end_round(n_rows)
    assert (costs.pass_s(1), costs.pass_s(8)) == (pytest.approx(0.01), pytest.approx(0.045))
    told.learn()
    told.learn()
    assert costs.pass_s(8) == pytest.approx(0.02)


def test_a_pass_that_took_very_long_or_no_time_by_chance_changes_little() -> None:
    costs = Costs()
    costs.note([decode_pass(8)], 0.01)
    costs.note([decode_pass(8)], 10.0)
    assert costs.pass_s(8) == pytest.approx(0.017)
    costs.note([decode_pass(8)], 1e-9)
    assert costs.pass_s(8) == pytest.approx(0.017 / 8), "never zero: nothing would bring it back"
