"""Whether graphs should fetch what they miss by themselves: the rule, for runs and for replays."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegraph.experts.cost import (
    Curve,
    FetchChoice,
    Machine,
    MissSplit,
    MissWays,
    choose_ways,
    expected_missing,
    fetch_limit,
    fetches_in_graph,
    machine_costs,
)
from moegraph.experts.machines import MACHINES

N_EXPERT = 256


def line(first: float, slope: float, n: int = 8) -> list[float]:
    """Return microseconds for 0 .. n experts, in seconds."""
    return [0.0] + [(first + slope * i) * 1e-6 for i in range(n)]


SERVER_CPU, SERVER_PCIE = line(42, 27), line(45, 37)


def fetches(
    on_cpu: list[float], bus: list[float], n_slots: float, n_expert: int, n_rows: int = 1
) -> bool:
    """Return whether graphs fetch, as far as one can tell in advance."""
    n_missing = expected_missing(n_slots, n_expert, len(on_cpu) - 1, n_rows)
    return fetches_in_graph(on_cpu, bus, n_missing, n_rows)


def curves() -> st.SearchStrategy[list[float]]:
    """Curves of eight experts: any first step, any further ones."""
    steps = st.lists(st.floats(0.1, 300.0), min_size=8, max_size=8)
    return steps.map(lambda found: [1e-6 * sum(found[:n]) for n in range(9)])


@given(on_cpu=curves(), streamed=curves(), n_slots=st.integers(0, N_EXPERT),
       factor=st.floats(1.01, 10.0))  # fmt: skip
def test_a_slower_cpu_and_a_faster_bus_speak_for_the_graph(
    on_cpu: list[float], streamed: list[float], n_slots: int, factor: float
) -> None:
    if not fetches(on_cpu, streamed, n_slots, N_EXPERT):
        return
    slower = [factor * seconds for seconds in on_cpu]
    assert fetches(slower, streamed, n_slots, N_EXPERT)
    faster = [seconds / factor for seconds in streamed]
    assert fetches(on_cpu, faster, n_slots, N_EXPERT)


def test_modes_and_curves_of_a_machine_decide_as_in_a_run() -> None:
    def is_chosen(machine: Machine, mode: str, n_slots: int) -> bool:
        costs = machine_costs(machine, 8)
        ways = choose_ways(mode, costs, [n_slots], 8, N_EXPERT)
        return ways.expected[0] <= ways.fetch_limits[0]

    server = MACHINES["h200"]
    for mode, expected in (("cpu", False), ("stream", True)):
        assert is_chosen(server, mode, 0) is expected
    assert [is_chosen(server, "auto", n) for n in (0, 24, 200)] == [False, True, True]
    on_cpu = [server.cpu(n) for n in range(9)]
    for first in (45e-6, 90e-6, 200e-6, 400e-6):
        bus = Curve(((1, first), (2, 2 * first)))
        for n_slots in range(0, N_EXPERT, 16):
            assert is_chosen(replace(server, stream=bus), "auto", n_slots) == fetches(
                on_cpu, [bus(n) for n in range(9)], n_slots, N_EXPERT
            )


@pytest.mark.parametrize("bus", [line(45, 37), line(86, 76), line(300, 300)])
@pytest.mark.parametrize("n_rows", [1, 2, 8, 32])
def test_a_limit_parts_what_is_fetched_from_what_is_not(bus: list[float], n_rows: int) -> None:
    limit = fetch_limit(SERVER_CPU, bus, n_rows, N_EXPERT)
    assert 0 < limit < N_EXPERT
    assert fetches_in_graph(SERVER_CPU, bus, limit, n_rows)
    assert not fetches_in_graph(SERVER_CPU, bus, 1.02 * limit, n_rows)
    assert fetch_limit([0.0] + [1.0] * 8, bus, n_rows, N_EXPERT) == math.inf, "no use of the CPU"


class Clock:
    """Passes of one row, which miss about two experts a layer, and what they take by each way."""

    def __init__(self, fetch: float, host: float, limit: float, expected: float) -> None:
        self.ways = MissWays(MissSplit.fixed(8, True), True, [limit] * 32, [expected] * 32)
        self.choice, self.seconds = FetchChoice(self.ways, 32), {True: fetch, False: host}
        self.rng, self.built, self.changes = np.random.default_rng(0), set[bool](), 0

    def run(self, n: int) -> float:
        """Return the mean seconds; the first pass of each way builds graphs, for eight passes."""
        total = 0.0
        for _ in range(n):
            way = self.choice.fetches(1)
            seconds = self.seconds[way] * self.rng.normal(1.0, 0.05)
            seconds += 8.0 * (way not in self.built)
            self.built.add(way)
            self.choice.observe(1, self.rng.normal(2.0, 0.4), seconds)
            self.changes += way != self.choice.fetches(1)
            total += seconds
        return total / n


@pytest.mark.parametrize(("fetch", "host"), [(1.0, 1.15), (1.5, 1.0), (1.0, 1.01)])
@pytest.mark.parametrize(("limit", "expected"), [(2.0, 1.0), (1.5, 1.0), (3.0, 4.0), (1.0, 3.0)])
def test_the_clock_decides_who_handles_misses_whatever_the_law_says(
    fetch: float, host: float, limit: float, expected: float
) -> None:
    clock = Clock(fetch, host, limit, expected)
    clock.run(1200)  # until 1 % of the time has paid for a trial
    clock.changes = 0
    assert clock.run(6000) < 1.01 * min(fetch, host) + 8.0 / 6000
    assert clock.changes <= 2 * 6000 / 400 + 1, "it does not flap"
    if abs(fetch - host) > 0.1:
        ways = [clock.run(1) and clock.choice.fetches(1) for _ in range(1000)]
        assert np.mean(np.array(ways) == (fetch < host)) > 0.9
        clock.seconds = {True: host, False: fetch}  # other work has come or gone
        clock.run(3000)
        assert clock.run(2000) < 1.02 * min(fetch, host)


def test_what_can_only_be_worse_is_never_tried() -> None:
    for limit, way in ((math.inf, True), (-1.0, False), (9.0, True), (0.4, False)):
        clock = Clock(1.0, 1.0, limit, 2.0)
        clock.run(4000)
        assert clock.changes == 0 and clock.choice.fetches(1) is way
