"""The cost model and the simulator: curves, splits, machines, replays against counting by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moegraph.errors import RequestError
from moegraph.experts.cost import (
    LAUNCH_S,
    Curve,
    Machine,
    choose_ways,
    machine_costs,
)
from moegraph.experts.machines import MACHINES, find_machine, machine_fields
from moegraph.experts.policy import (
    Lfu,
    Lru,
)
from moegraph.placement.generator import PRESETS, generate_trace
from moegraph.placement.identity import RouterShape
from moegraph.placement.simulate import Simulation, even_slots, simulate
from moegraph.placement.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
US = 1e-6
# One expert streams in 10 us, takes the CPU 30 us for the first and 5 us for each further one.
SIMPLE = Machine(
    "simple", 1, 1000, 8000, 9000, 10, whole=1000 * US, host_layer=1 * US, fixed=2 * US,
    overlap=4 * US, stream=Curve(((1, 10 * US), (2, 20 * US))),
    cpu=Curve(((1, 30 * US), (2, 35 * US))),
    fetch_layer=0.5 * US, fetch=Curve(((1, 9 * US), (2, 17 * US))),
)  # fmt: skip


def explicit(rows: list[list[int]], n_prompt: int = 0) -> Trace:
    """A trace of one layer of eight experts."""
    ids = np.array(rows, dtype=np.uint8)[:, None, :]
    return Trace(RouterShape(1, 8, ids.shape[2]), ids, n_prompt)


def split_for(machine: Machine, mode: str, n: int) -> list[int]:
    """Return how many of 0 .. n missing experts the CPU takes, where few are resident."""
    return choose_ways(mode, machine_costs(machine, n), [0], n, 256).split.decode


def test_best_split_is_the_best_of_all_splits() -> None:
    for machine in (*MACHINES.values(), SIMPLE):
        split = split_for(machine, "auto", 12)
        for n, c in enumerate(split):
            times = [max(machine.cpu(i), machine.stream(n - i)) for i in range(n + 1)]
            assert times[c] == min(times)
    assert split_for(SIMPLE, "auto", 5) == [0, 0, 0, 0, 1, 2]
    assert split_for(SIMPLE, "cpu", 3) == [0, 1, 2, 3]
    assert split_for(SIMPLE, "stream", 3) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("name", "n_on_cpu_of_8", "fetches_from"), [("h200", 5, 20), ("desktop", 6, 42)]
)
def test_the_built_in_machines_do_what_the_documentation_says(
    name: str, n_on_cpu_of_8: int, fetches_from: int
) -> None:
    """docs/residency.md has these numbers."""
    machine = MACHINES[name]
    split = split_for(machine, "auto", 8)
    assert (split[1], split[8]) == (1, n_on_cpu_of_8)
    costs = machine_costs(machine, 8)
    for n in (0, fetches_from - 1, fetches_from, 2 * fetches_from, 128, 255):
        way = choose_ways("auto", costs, [n], 8, 256)
        assert (way.expected[0] <= way.fetch_limits[0]) == (n >= fetches_from), n
    text = (ROOT / "docs" / "residency.md").read_text("utf-8")
    assert re.search(rf"\b{fetches_from}\b", text), f"the page no longer has {fetches_from}"


def test_what_a_further_expert_takes_is_bandwidth_and_the_rest_is_latency() -> None:
    """PCIe 5 copied 51 GB/s, and 16 threads read 89 GB/s of host memory."""
    machine = MACHINES["h200"]
    assert [round(c.latency / US) for c in (machine.stream, machine.cpu)] == [7, 25]
    for curve, rate in ((machine.stream, 51e9), (machine.cpu, 89e9)):
        assert machine.expert_bytes / (curve(9) - curve(8)) == pytest.approx(rate, rel=0.05)
    other = machine.scaled(40, 7 * machine.expert_bytes)
    assert other.stream.latency == pytest.approx(machine.stream.latency)
    assert other.stream(9) - other.stream(8) == pytest.approx(7 * (306 - 82) / 6 * US)
    assert Curve(((1, 3.0), (2, 4.0), (3, 4.5))).latency == 3.0, "no more than one expert takes"
    assert Curve(((1, 3.0), (2, 9.0))).latency == Curve(((4, 3.0),)).latency == 0.0


def test_a_machine_for_its_own_model_is_the_same() -> None:
    for machine in (*MACHINES.values(), SIMPLE):
        token = machine.token_bytes, machine.token_params, machine.token_launches
        for same in (token, None):
            found = machine.scaled(machine.n_layer, machine.expert_bytes, same)
            assert machine_fields(found) == machine_fields(machine)


def test_a_token_takes_its_launches_and_reads_its_bytes() -> None:
    machine, size = MACHINES["desktop"], MACHINES["desktop"].expert_bytes
    wholes = [
        machine.scaled(40, size, (n_bytes, machine.token_params, n)).whole
        for n, n_bytes in ((430, machine.token_bytes), (860, machine.token_bytes), (430, 10**9))
    ]
    assert wholes[1] - wholes[0] == pytest.approx(430 * LAUNCH_S)
    read = (machine.token_bytes - 10**9) / (wholes[0] - wholes[2])
    assert 0.6 < read / 936e9 < 0.75
    prompt = machine.scaled(80, 5 * size, (10**9, machine.token_params // 2, 430)).prompt
    assert prompt and machine.prompt
    assert prompt(512) == pytest.approx(machine.prompt(512) / 2)


@pytest.mark.parametrize(
    ("change", "say"),
    [({"n_layer": None}, "n_layer is None; expected a positive integer"),
     ({"expert_bytes": 0}, "expert_bytes is 0; expected a positive integer"),
     ({"expert_bytes": True}, "expert_bytes is True"), ({"name": 5}, "name is 5"),
     ({"token_bytes": None}, "token_bytes is None"), ({"token_params": 0}, "token_params is 0"),
     ({"token_launches": 1.5}, "token_launches is 1.5"),
     ({"whole_us": 0}, "whole_us is 0"), ({"whole_us": "x"}, "whole_us is 'x'"),
     ({"host_layer_us": -1}, "host_layer_us is -1"), ({"overlap_us": None}, "overlap_us is None"),
     ({"stream_us": []}, "stream_us is []; expected [[n, microseconds], ...], both rising"),
     ({"fetch_layer_us": -1}, "fetch_layer_us is -1; expected microseconds"),
     ({"fetch_layer_us": "2"}, "fetch_layer_us is '2'"), ({"about": 3}, "about is 3"),
     ({"look_us": 1}, "unknown field 'look_us'; known: about"),
     ({"fetch_us": None}, "fetch_us is None; expected"),
     ({"fetch_us": 9}, "fetch_us is 9; expected [[n, microseconds], ...], both rising"),
     ({"fetch_us": [[2, 5], [1, 6]]}, "fetch_us is"),
     ({"cpu_us": [[1, 5], [1, 6]]}, "cpu_us is"), ({"cpu_us": [[1, 5], [2, 4]]}, "cpu_us is"),
     ({"cpu_us": [[0, 5]]}, "cpu_us is"), ({"cpu_us": [[1, 0]]}, "cpu_us is"),
     ({"cpu_us": [[1, float("nan")]]}, "cpu_us is"), ({"cpu_us": [1, 2]}, "cpu_us is"),
     ({"speed": 1}, "unknown field 'speed'; known: about")],
)  # fmt: skip
def test_wrong_machine_files_are_refused(tmp_path: Path, change: dict[str, Any], say: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps({**machine_fields(SIMPLE), **change}))
    with pytest.raises(RequestError) as caught:
        find_machine(str(path))
    assert say in str(caught.value) and str(path) in str(caught.value)


def test_what_is_no_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match="not a built-in machine .h200, rtx2060, .*, desktop., and cannot read"
    ):
        find_machine("z80")
    for text in ("", "[]", "{", "[" * 70_000, " " * 70_000 + "{}"):
        (tmp_path / "m").write_text(text)
        with pytest.raises(RequestError, match="not a machine file"):
            find_machine(str(tmp_path / "m"))


def run(trace: Trace, n_slots: list[int], mode: str = "stream", **more: Any) -> Simulation:
    """Replay with the host seeing to what is missing, but for is_pinned=True."""
    settings = {"policy": Lru(), "machine": SIMPLE, "is_pinned": False, **more}
    return simulate(trace, n_slots, mode=mode, **settings)


def test_a_dense_layer_misses_nothing_and_is_not_counted() -> None:
    one = explicit([[0, 1], [2, 3], [4, 5]])
    both = Trace(RouterShape(2, 8, 2), np.repeat(one.ids, 2, axis=1), slot_bytes=(0, 1000))
    found, alone = run(both, [3, 3]), run(one, [3], slot_bytes=[1000])
    assert found.missing.tolist() == [[0, n] for (n,) in alone.missing.tolist()]
    assert (found.stats.hit_rate, found.uploaded_bytes) == (
        alone.stats.hit_rate, alone.uploaded_bytes,
    )  # fmt: skip


def test_a_replay_counted_by_hand() -> None:
    """Slots start with 0, 1, 2; LRU."""
    trace = explicit([[0, 1], [3, 1], [3, 4], [0, 4], [0, 4]])
    found = run(trace, [3])
    assert found.missing[:, 0].tolist() == [0, 1, 1, 1, 0]
    assert (found.n_tokens, found.n_streamed, found.n_cpu, found.n_promoted) == (5, 3, 0, 0)
    assert found.stats.hit_rate == pytest.approx(0.7)
    hit, miss = 1001 * US, (1001 + 2 + 10 - 4) * US
    assert found.step_s == pytest.approx([hit, miss, miss, miss, hit])
    assert found.tokens_per_s == pytest.approx(5 / (2 * hit + 3 * miss))
    assert found.uploaded_bytes == 3000 and found.bytes_per_token == 600
    assert found.quarters() == [0.5, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("mode", ["stream", "cpu"])
def test_only_counted_tokens_count(mode: str) -> None:
    trace = generate_trace(RouterShape(4, 32, 4), 60)
    whole, rest = (run(trace, [12] * 4, mode, policy=Lfu(), skip=n) for n in (0, 40))
    n_missing = int(rest.missing.sum())
    assert n_missing and rest.missing.tolist() == whole.missing[40:].tolist()
    assert (rest.n_streamed, rest.n_cpu) == ((n_missing, 0) if mode == "stream" else (0, n_missing))
    assert (rest.n_promoted > 0) == (mode == "cpu") and rest.n_promoted < whole.n_promoted + 1
    assert rest.uploaded_bytes == 1000 * (rest.n_streamed + rest.n_promoted)


def test_a_replay_of_graphs_that_fetch_counted_by_hand() -> None:
    """Slots start with 0, 1, 2; LRU; what the next token gives up is known before it."""
    trace = explicit([[0, 1], [3, 1], [3, 4], [0, 5], [0, 5], [1, 2]])
    found = run(trace, [3], is_pinned=True)
    # given up: 2; 0; 1 and one of the equals 3 and 4; the other of these and one of 0 and 5
    assert found.missing[:, 0].tolist() == [0, 1, 1, 2, 0, 2]
    assert (found.n_streamed, found.n_cpu, found.n_promoted) == (6, 0, 0)
    assert found.stats.evicted.sum() == 6 and found.uploaded_bytes == 6000
    stalls = [0, 9, 9, 17, 0, 17]
    assert found.step_s == pytest.approx([(1000.5 + stall) * US for stall in stalls])


@pytest.mark.parametrize("n_prompt", [1, 513])
def test_what_the_last_row_of_a_prompt_chose_is_there(n_prompt: int) -> None:
    """A run fetches it for a short prompt, and keeps it of a long one; so does the replay."""
    rows = [[0, 1]] * (n_prompt - 1) + [[6, 7]]
    found = run(explicit([*rows, [6, 7]], n_prompt), [3], is_pinned=True)
    assert found.missing[:, 0].tolist() == [0], "the row of the prompt brought them"


@pytest.mark.parametrize(
    ("whole_ms", "is_pinned", "n_slots", "tokens_per_s"),
    [(1.672, True, 10240, 598), (1.672, True, 6144, 538), (1.672, True, 2560, 312),
     (2.334, True, 10185, 422.1), (2.334, True, 8137, 408.2), (2.334, True, 6088, 383.5),
     (2.334, True, 4041, 335.4), (2.334, True, 2505, 260.9), (2.334, True, 970, 151.0),
     (2.334, True, 0, 108.1), (2.334, False, 10185, 360.6), (2.334, False, 6088, 321.8),
     (2.334, False, 2505, 207.2), (2.334, False, 970, 130.5)],
)  # fmt: skip
def test_measured_speeds_follow_from_the_built_in_machine(
    whole_ms: float, is_pinned: bool, n_slots: int, tokens_per_s: float
) -> None:
    """A token took 2.334 ms before; the last ones by builds whose graphs could not fetch."""
    machine = MACHINES["h200"]
    assert whole_ms > 2 or machine.whole == pytest.approx(whole_ms / 1000)
    trace = generate_trace(RouterShape(40, 256, 8), 64 + 384)
    slots = even_slots([True] * 40, 256, n_slots / (40 * 256))
    machine = replace(machine, whole=whole_ms / 1000)
    found = simulate(trace, slots, Lfu(), machine, skip=64, is_pinned=is_pinned)
    assert found.tokens_per_s == pytest.approx(tokens_per_s, rel=0.1)


def test_a_host_that_stalls_longer_than_the_law_says_does_not_keep_the_misses() -> None:
    """A 30B-A3B at 25 %: the host is tried, as the law says, and takes 75 tok/s; graphs take 93."""
    trace = generate_trace(RouterShape(48, 128, 8), 64 + 150, model=PRESETS["flat"])
    machine = replace(MACHINES["h200"].scaled(48, 2_950_000), fixed=130e-6)
    slots = even_slots([True] * 48, 128, 0.25)
    speeds = {
        mode: simulate(trace, slots, Lfu(), machine, mode=mode, skip=64)
        for mode in ("stream", "auto")
    }
    auto, stream = speeds["auto"].tokens_per_s, speeds["stream"].tokens_per_s
    assert auto == pytest.approx(stream, rel=0.01) and speeds["auto"].n_cpu == 0
    machine = replace(machine, fixed=20e-6)
    quick = simulate(trace, slots, Lfu(), machine, skip=64)
    assert quick.tokens_per_s > 1.2 * stream and quick.n_cpu > 1000


def test_slots_are_spread_over_layers_with_experts() -> None:
    assert even_slots([False, True, False, True, True], 8, 0.45) == [8, 4, 8, 4, 3]
    assert even_slots([True] * 2, 8, 1.0) == [8, 8]


def test_traces_that_do_not_fit_or_are_too_short_are_refused() -> None:
    trace = explicit([[0, 1], [3, 1]], n_prompt=1)
    with pytest.raises(RequestError, match="the trace has 1 layers, the placement 2"):
        run(trace, [4, 4])
    with pytest.raises(RequestError, match="first 2 are not counted .prompt 1, skipped 1."):
        run(trace, [4], skip=1)
