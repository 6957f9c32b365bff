"""Whether graphs should fetch what they miss by themselves: the rule, for runs and for replays."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegraph.experts.cost import (
    Curve,
    FetchChoice,
    Machine,
    MissCosts,
    choose_ways,
    expected_missing,
    fetch_limit,
    fetches_in_graph,
    machine_costs,
    streams_rare_misses,
)
from moegraph.experts.machines import MACHINES
from moegraph.kinds import MAX_FETCH_ROWS

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
        return choose_ways(mode, costs, [n_slots], 8, N_EXPERT).fetch_rows > 0

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


@pytest.mark.parametrize("mode", ["auto", "cpu", "stream"])
@pytest.mark.parametrize("n_slots", [[0, 20], [128, 256], [127, 200]])
def test_the_cpu_computes_by_mode_and_by_how_rarely_it_would(mode: str, n_slots: list[int]) -> None:
    costs = MissCosts(tuple(SERVER_CPU), tuple(SERVER_PCIE), per_row=0.5)
    ways = choose_ways(mode, costs, n_slots, 8, N_EXPERT)
    is_rare = streams_rare_misses(SERVER_CPU[1], SERVER_PCIE[1], min(n_slots), N_EXPERT)
    assert ways.cpu == (mode != "stream")
    assert any(ways.split.decode) == any(ways.split.bypassed) == ways.cpu
    assert ways.cpu_from == (2 if mode == "auto" and is_rare else 1), "no export for one row"
    assert choose_ways(mode, MissCosts(), n_slots, 8, N_EXPERT).cpu == (mode == "cpu")


def test_the_more_rows_miss_the_sooner_the_host_helps() -> None:
    """Each further row misses more, and the CPU and the bus together are faster than the bus."""
    costs = MissCosts(tuple(SERVER_CPU), tuple(SERVER_PCIE))
    rows = [choose_ways("auto", costs, [n], 8, N_EXPERT).fetch_rows for n in range(0, 256, 8)]
    assert rows == sorted(rows) and rows[0] == 0 and rows[-1] == MAX_FETCH_ROWS
    for n, known in zip(range(0, 256, 8), rows):
        found = [fetches(SERVER_CPU, SERVER_PCIE, n, N_EXPERT, at) for at in range(1, 33)]
        assert found == [at <= known for at in range(1, 33)], "one border"


@pytest.mark.parametrize("bus", [line(45, 37), line(86, 76), line(300, 300)])
@pytest.mark.parametrize("n_rows", [1, 2, 8, 32])
def test_a_limit_parts_what_is_fetched_from_what_is_not(bus: list[float], n_rows: int) -> None:
    limit = fetch_limit(SERVER_CPU, bus, n_rows, N_EXPERT)
    assert 0 < limit < N_EXPERT
    assert fetches_in_graph(SERVER_CPU, bus, limit, n_rows)
    assert not fetches_in_graph(SERVER_CPU, bus, 1.02 * limit, n_rows)
    assert fetch_limit([0.0] + [1.0] * 8, bus, n_rows, N_EXPERT) == math.inf, "no use of the CPU"


def test_what_several_rows_miss_decides_how_the_next_such_pass_computes_it() -> None:
    costs = MissCosts(tuple(SERVER_CPU), tuple(SERVER_PCIE))
    ways = choose_ways("auto", costs, [154], 8, N_EXPERT)
    choice = FetchChoice(ways, MAX_FETCH_ROWS)
    limit, expected = ways.fetch_limits[7], ways.expected[7]
    assert expected < limit and choice.fetches(8), "in advance"
    assert [choice.learns(n) for n in (1, 2, 32, 33)] == [False, True, True, False]
    choice.observe(8, 3 * limit)
    assert choice.fetches(8), "a single pass is no rule"
    for _ in range(20):
        choice.observe(8, 3 * limit)
    assert not choice.fetches(8) and choice.fetches(7), "other numbers of rows, other texts"
    for _ in range(20):
        choice.observe(8, 0.95 * limit)
    assert not choice.fetches(8), "what is hardly better changes nothing"
    for _ in range(20):
        choice.observe(8, 0.5 * limit)
    assert choice.fetches(8)
    assert not FetchChoice(choose_ways("auto", costs, [0], 8, N_EXPERT), 32).learns(8)
    fixed = FetchChoice(choose_ways("stream", costs, [154], 8, N_EXPERT), 16)
    assert fixed.fetches(16) and not fixed.fetches(17) and not fixed.learns(8)
