"""Which threads compute tokens: the counts worth trying, and the choice on machines that change."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from moegraph.threads import (
    SLEEP,
    SPIN,
    Threads,
    Tuner,
    default_threads,
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


def test_the_ways_begin_with_all_cores_and_end_asleep() -> None:
    assert TWO == [SPINNING, ONE, SLEEPING]
    assert [way.n for way in ways(4)] == [4, 3, 2, 1, 4]
    assert [way.n for way in ways(16)] == [16, 11, 8, 6, 4, 3, 2, 1, 16]
    assert ways(1) == [ONE]


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


@pytest.mark.parametrize(
    ("table", "limit_s"), [(IDLE, 0.04), ({**BUSY, SPINNING: 0.04}, 0.07)], ids=["idle", "busy"]
)
def test_a_trial_of_the_shipped_model_is_short(table: dict[Threads, float], limit_s: float) -> None:
    machine = Machine(Tuner(TWO))
    while not machine.tuner.is_settled:
        machine.run(1e-6, table.__getitem__)
    assert machine.now < limit_s
    assert set(machine.tuner.measured) == set(TWO)


def test_sleeping_is_chosen_where_it_is_quickest() -> None:
    tuner = Tuner(TWO)
    Machine(tuner).run(1.0, {SPINNING: 0.1, ONE: 0.05, SLEEPING: 0.03}.__getitem__)
    assert tuner.current == SLEEPING


def test_fewer_threads_are_not_tried_once_they_are_much_slower() -> None:
    def large_model(way: Threads) -> float:
        return 0.8 / way.n if way.poll else 0.11

    tuner = Tuner(ways(8))
    Machine(tuner).run(4.0, large_model)
    assert tuner.current == Threads(8, SPIN)
    assert min(way.n for way in tuner.measured) == 4
    assert Threads(8, SLEEP) in tuner.measured


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


def test_noise_does_not_move_the_choice() -> None:
    rng = random.Random(5)
    machine = Machine(Tuner(TWO))

    def noisy(way: Threads) -> float:
        # a tenth of the tokens is interrupted
        return IDLE[way] * rng.uniform(0.9, 1.1) + (rng.random() < 0.1) * rng.uniform(0, 0.0004)

    machine.run(1, noisy)
    assert machine.run(60, noisy) > 0.95 / (1.04 * IDLE[SPINNING])
    assert machine.tuner.current == SPINNING


def test_a_longer_context_is_no_reason_to_try_again() -> None:
    machine = Machine(Tuner(TWO))
    machine.run(1, IDLE.__getitem__)
    machine.run(60, lambda way: IDLE[way] * (1 + machine.now / 20))
    assert machine.n_trials == 0


def test_a_change_to_the_same_way_becomes_usual() -> None:
    machine = Machine(Tuner(TWO))
    machine.run(2, IDLE.__getitem__)
    machine.run(60, lambda way: 2 * IDLE[way])
    assert machine.n_trials == 1 and machine.tuner.current == SPINNING


def test_default_threads_never_exceed_what_the_process_may_use() -> None:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert 1 <= default_threads() <= usable_cpus() <= (usable or 1)


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
