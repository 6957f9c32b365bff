"""The share of time that the choice of threads loses while other programs come and go."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from moegraph.threads import SLEEP, SPIN, Threads, Tuner, ways

Busy = Callable[[float], int]
# Seconds a token of the shipped model takes with so many threads, each on a core of its own.
SMALL = {1: 0.00066, 2: 0.00054, 3: 0.00050, 4: 0.00047}
# The load is the mean of the time between two looks.
LAG_S = 0.1
SPANS = (0.2, 2.0, 20.0)


class Machine:
    """Computes tokens on cores of which other programs take some, and keeps the time."""

    def __init__(
        self, n_cores: int, busy: Busy, is_known: bool = True, token_s: dict[int, float] = SMALL
    ) -> None:
        self.n_cores, self.busy, self.token_s = n_cores, busy, token_s
        self.rng = random.Random(n_cores)
        self.now = self.ideal = 0.0
        self.used: list[Threads] = []
        choices = ways(n_cores)
        self.choices = choices
        self.tuner = Tuner(choices, self.free) if is_known else Tuner(choices)

    def free(self) -> int:
        """Return the free cores as they were a moment ago."""
        return max(1, self.n_cores - self.busy(max(0.0, self.now - LAG_S)))

    def seconds(self, way: Threads) -> float:
        """Return the time of a token as it was measured beside programs that keep cores busy."""
        alone, n_busy = self.token_s[way.n], self.busy(self.now)
        if way.n <= max(1, self.n_cores - n_busy):  # alone on these cores, or one with a half
            shared = 1.0 if way.n + n_busy <= self.n_cores else 2.0
            asleep = 0.009 if way.poll == SLEEP and not n_busy else 0.0
            return alone * shared + asleep
        return 1.3 * alone + (0.003 if way.poll == SLEEP else self.rng.uniform(0.03, 0.08))

    def lost(self, span: float) -> float:
        """Compute tokens for so many seconds; return the share lost against the best way."""
        start, ideal = self.now, 0.0
        while self.now < start + span:
            way = self.tuner.current
            took = self.seconds(way)
            ideal += min(took, *(self.seconds(other) for other in self.choices))
            self.now += took
            self.used.append(way)
            self.tuner.took(took)
        return 1 - ideal / (self.now - start)

    def load(self) -> None:
        """Finish the trial that the engine makes at load."""
        while not self.tuner.is_settled:
            self.lost(1e-9)


CONSTANT = [(2, 0), (2, 1), (2, 2), (4, 0), (4, 1), (4, 2), (4, 4)]


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize(("n_cores", "n_busy"), CONSTANT)
def test_after_the_load_nothing_is_lost(n_cores: int, n_busy: int, span: float) -> None:
    machine = Machine(n_cores, lambda now: n_busy)
    machine.load()
    assert machine.lost(span) < 0.01


@pytest.mark.parametrize(("span", "limit"), [(0.2, 0.8), (2.0, 0.2), (20.0, 0.02)])
@pytest.mark.parametrize(("n_cores", "n_busy"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_a_program_that_comes_is_noticed(
    n_cores: int, n_busy: int, span: float, limit: float
) -> None:
    machine = Machine(n_cores, lambda now: n_busy if now > 3.5 else 0)
    machine.load()
    while machine.now < 3.45:
        machine.lost(0.001)
    assert machine.lost(span) < limit
    if span > 0.2:
        assert machine.tuner.current == Threads(max(1, n_cores - n_busy), SPIN)


@pytest.mark.parametrize(("span", "limit"), [(0.2, 0.2), (2.0, 0.02), (20.0, 0.002)])
@pytest.mark.parametrize(("n_cores", "n_busy"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_a_program_that_goes_is_noticed(
    n_cores: int, n_busy: int, span: float, limit: float
) -> None:
    machine = Machine(n_cores, lambda now: n_busy if now < 3.5 else 0)
    machine.load()
    while machine.now < 3.45:
        machine.lost(0.001)
    assert machine.lost(span) < limit
    if span > 0.2:
        assert machine.tuner.current == Threads(n_cores, SPIN)


@pytest.mark.parametrize(("period", "limit"), [(0.3, 0.25), (1.0, 0.15), (4.0, 0.06), (10.0, 0.02)])
@pytest.mark.parametrize("n_cores", [2, 4])
def test_programs_that_come_and_go_cost_little(n_cores: int, period: float, limit: float) -> None:
    machine = Machine(n_cores, lambda now: int(now % period > period / 2))
    machine.load()
    assert machine.lost(20.0) < limit
    assert {way.n for way in machine.used} >= {n_cores - 1, n_cores}
