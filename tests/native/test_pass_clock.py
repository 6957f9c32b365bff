"""The time of a pass, without the time of its caller."""

from __future__ import annotations

import time

import pytest

from moegraph.runner.layered import PassClock


def test_the_time_of_the_caller_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = PassClock()
    for away in (0.0, 60.0):  # the pause of one pass is not that of the next
        assert clock.start() == now
        now += 1.0
        clock.leave()
        now += away
        clock.back()
        now += 2.0
        assert clock.seconds() == 3.0


def test_a_pass_that_nobody_asks_for_stops_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = PassClock()
    clock.start()
    clock.leave()
    now += 10.0
    clock.start()
    now += 1.0
    clock.back()
    assert clock.seconds() == 1.0
