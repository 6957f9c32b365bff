"""Which threads compute tokens: the counts worth trying, and the choice on machines that change."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moegraph.threads import (
    SLEEP,
    SPIN,
    Threads,
    Tuner,
    usable_cpus,
    waiting,
    ways,
)

TWO = ways(2)
ONE, SPINNING, SLEEPING = Threads(1, SPIN), Threads(2, SPIN), Threads(2, SLEEP)
# Seconds a token of the shipped model on two cores, by how many of them are busy.
IDLE = {SPINNING: 0.00054, ONE: 0.00066, SLEEPING: 0.0115}
BUSY = {SPINNING: 0.004, ONE: 0.00072, SLEEPING: 0.0024}


class Machine:
    """Computes tokens as quickly as a table says, and keeps the time."""

    def __init__(self, tuner: Tuner) -> None:
        self.tuner = tuner
        self.now = 0.0
        self.n_trials = 0

    def run(self, seconds: float, token_s: Callable[[Threads], float]) -> float:
        """Compute tokens for so long; return tokens a second."""
        start, n = self.now, 0
        while self.now < start + seconds:
            was_settled = self.tuner.is_settled
            took = token_s(self.tuner.current)
            self.now += took
            self.tuner.took(took)
            self.n_trials += was_settled and not self.tuner.is_settled
            n += 1
        return n / (self.now - start)


def test_what_the_user_gave_is_not_tried() -> None:
    assert ways(8, n_threads=3) == [Threads(3, SPIN), Threads(3, SLEEP)]
    assert ways(3, poll=10) == [Threads(3, 10), Threads(2, 10), Threads(1, 10)]
    assert ways(8, n_threads=3, poll=10) == [Threads(3, 10)]
    tuner = Tuner(ways(8, n_threads=3, poll=10))
    tuner.took(1.0)
    assert (tuner.current, tuner.is_settled, tuner.measured) == (Threads(3, 10), True, {})


@pytest.mark.parametrize(("table", "best"), [(IDLE, SPINNING), (BUSY, ONE)])
def test_the_quickest_way_is_chosen_within_a_tenth_of_a_second(
    table: dict[Threads, float], best: Threads
) -> None:
    tuner = Tuner(TWO)
    Machine(tuner).run(0.1, table.__getitem__)
    assert tuner.is_settled and tuner.current == best
    assert set(tuner.measured) == set(TWO)


def test_a_machine_that_becomes_busy_and_idle_again_is_followed() -> None:
    tuner = Tuner(TWO)
    machine = Machine(tuner)
    machine.run(2, IDLE.__getitem__)
    machine.run(1.5, BUSY.__getitem__)
    assert tuner.current == ONE
    speed = machine.run(60, BUSY.__getitem__)
    assert speed > 0.97 / BUSY[ONE], "what is tried meanwhile costs too much"
    machine.run(4, IDLE.__getitem__)
    assert tuner.current == SPINNING


def test_trials_stop_where_nothing_changes() -> None:
    machine = Machine(Tuner(TWO))
    machine.run(1, IDLE.__getitem__)
    assert machine.run(60, IDLE.__getitem__) > 0.999 / IDLE[SPINNING]
    assert machine.n_trials == 0


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 2), ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 64), ({}, 64), ({"cpu.max": ""}, 64),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
    ],
)  # fmt: skip
def test_the_quota_of_a_control_group_limits_the_cpus(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert usable_cpus(tmp_path) == expected


def test_more_threads_than_cpus_sleep_while_they_wait() -> None:
    assert waiting(usable_cpus()) == SPIN
    assert waiting(usable_cpus() + 1) == SLEEP
