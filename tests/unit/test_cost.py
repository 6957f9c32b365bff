"""Whether graphs should fetch what they miss by themselves: the rule, for runs and for replays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegraph.experts.cost import (
    MACHINES,
    Curve,
    Machine,
    MissCosts,
    best_split,
    choose_ways,
    fetches_in_graph,
    machine_costs,
    streams_rare_misses,
    usual_slots,
)
from moegraph.kinds import MAX_FETCH_ROWS

N_EXPERT = 256


def line(first: float, slope: float, n: int = 8) -> list[float]:
    """Return microseconds for 0 .. n experts, in seconds."""
    return [0.0] + [(first + slope * i) * 1e-6 for i in range(n)]


SERVER_CPU, SERVER_PCIE = line(42, 27), line(45, 37)


@pytest.mark.parametrize("n_slots", [0, 16, 32, 64])
def test_the_quicker_path_decides_where_much_is_missing(n_slots: int) -> None:
    fast, slow = line(10, 5), line(400, 400)
    assert not fetches_in_graph(fast, slow, n_slots, N_EXPERT), "a fast CPU, a slow bus"
    assert fetches_in_graph(slow, fast, n_slots, N_EXPERT), "a slow CPU, a fast bus"


def test_a_server_fetches_unless_nearly_everything_is_missing() -> None:
    by_slots = [fetches_in_graph(SERVER_CPU, SERVER_PCIE, n, N_EXPERT) for n in (0, 32, 128, 255)]
    assert by_slots == [False, True, True, True]


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.9])
def test_shares_of_the_experts_decide_and_not_their_number(share: float) -> None:
    for bus in (line(60, 60), line(90, 80), line(140, 140)):
        answers = {fetches_in_graph(SERVER_CPU, bus, round(share * n), n) for n in (100, 200, 1000)}
        assert len(answers) == 1


def test_layers_that_cannot_fetch_have_no_say() -> None:
    """Pinned ones, and those with fewer slots than a row chooses."""
    assert usual_slots([256, 0, 7, 20, 40, 256], 8, 256) == 30.0
    assert usual_slots([256, 0, 7], 8, 256) == 0.0
    assert not fetches_in_graph(SERVER_CPU, SERVER_PCIE, 0.0, N_EXPERT)


def curves() -> st.SearchStrategy[list[float]]:
    """Curves of eight experts: any first step, any further ones."""
    steps = st.lists(st.floats(0.1, 300.0), min_size=8, max_size=8)
    return steps.map(lambda found: [1e-6 * sum(found[:n]) for n in range(9)])


@given(on_cpu=curves(), streamed=curves(), n_slots=st.integers(0, N_EXPERT),
       factor=st.floats(1.01, 10.0))  # fmt: skip
def test_a_slower_cpu_and_a_faster_bus_speak_for_the_graph(
    on_cpu: list[float], streamed: list[float], n_slots: int, factor: float
) -> None:
    if not fetches_in_graph(on_cpu, streamed, n_slots, N_EXPERT):
        return
    slower = [factor * seconds for seconds in on_cpu]
    assert fetches_in_graph(slower, streamed, n_slots, N_EXPERT)
    faster = [seconds / factor for seconds in streamed]
    assert fetches_in_graph(on_cpu, faster, n_slots, N_EXPERT)


def test_where_the_bus_takes_all_anyway_the_graph_is_never_worse() -> None:
    never = [0.0] + [1.0] * 8
    for bus in (line(10, 10), line(500, 500)):
        assert best_split(never, bus) == [0] * 9
        assert all(fetches_in_graph(never, bus, n, N_EXPERT) for n in range(N_EXPERT + 1))


def test_modes_and_curves_of_a_machine_decide_as_in_a_run() -> None:
    def fetches(machine: Machine, mode: str, n_slots: int) -> bool:
        costs = machine_costs(machine, 8)
        return choose_ways(mode, costs, [n_slots], 8, N_EXPERT).fetch_rows > 0

    server = MACHINES["h200"]
    for mode, expected in (("cpu", False), ("stream", True)):
        assert fetches(server, mode, 0) is expected
    assert [fetches(server, "auto", n) for n in (0, 24, 200)] == [False, True, True]
    on_cpu = [server.cpu(n) for n in range(9)]
    for first in (45e-6, 90e-6, 200e-6, 400e-6):
        bus = Curve(((1, first), (2, 2 * first)))
        for n_slots in range(0, N_EXPERT, 16):
            assert fetches(replace(server, stream=bus), "auto", n_slots) == fetches_in_graph(
                on_cpu, [bus(n) for n in range(9)], n_slots, N_EXPERT
            )


@pytest.mark.parametrize("mode", ["auto", "cpu", "stream"])
@pytest.mark.parametrize("n_slots", [[0, 20], [128, 256], [127, 200]])
def test_the_cpu_computes_by_mode_and_by_how_rarely_it_would(mode: str, n_slots: list[int]) -> None:
    costs = MissCosts(tuple(SERVER_CPU), tuple(SERVER_PCIE), per_row=0.5)
    ways = choose_ways(mode, costs, n_slots, 8, N_EXPERT)
    is_rare = streams_rare_misses(SERVER_CPU[1], SERVER_PCIE[1], min(n_slots), N_EXPERT)
    is_late = mode == "auto" and is_rare
    assert ways.cpu == (mode != "stream" and not (is_late and ways.fetch_rows == MAX_FETCH_ROWS))
    assert any(ways.split.decode) == any(ways.split.bypassed) == ways.cpu
    assert ways.cpu_from == (ways.fetch_rows + 1 if is_late and ways.cpu else 1)
    assert choose_ways(mode, MissCosts(), n_slots, 8, N_EXPERT).cpu == (mode == "cpu")


def test_the_cpu_never_computes_what_is_rare_if_graphs_fetch_for_any_rows() -> None:
    costs = MissCosts(tuple(line(60, 60)), tuple(line(40, 30)))
    ways = choose_ways("auto", costs, [200], 8, N_EXPERT)
    assert (ways.cpu, ways.fetch_rows) == (False, MAX_FETCH_ROWS)
    assert not any(ways.split.decode)


def test_the_more_rows_miss_the_sooner_the_host_helps() -> None:
    """Each further row misses more, and the CPU and the bus together are faster than the bus."""
    costs = MissCosts(tuple(SERVER_CPU), tuple(SERVER_PCIE))
    rows = [choose_ways("auto", costs, [n], 8, N_EXPERT).fetch_rows for n in range(0, 256, 8)]
    assert rows == sorted(rows) and rows[0] == 0 and rows[-1] == MAX_FETCH_ROWS
    slow = MissCosts(tuple(line(42, 27)), tuple(line(60, 80)))
    late = choose_ways("auto", slow, [130], 8, N_EXPERT)
    assert 1 < late.fetch_rows < MAX_FETCH_ROWS and late.cpu and late.cpu_from > late.fetch_rows
    for n, known in zip(range(0, 256, 8), rows):
        fetches = [
            fetches_in_graph(SERVER_CPU, SERVER_PCIE, n, N_EXPERT, at) for at in range(1, 33)
        ]
        assert fetches == [at <= known for at in range(1, 33)], "one border"
