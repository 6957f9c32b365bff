"""The cost model and the simulator: curves, splits, machines, replays against counting by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moegraph.errors import RequestError
from moegraph.experts.cost import (
    Curve,
    Machine,
    best_split,
    choose_ways,
    machine_costs,
    streams_rare_misses,
)
from moegraph.experts.machines import MACHINES, find_machine, machine_fields
from moegraph.experts.policy import (
    Frequency,
    LayerPolicy,
    Lfu,
    Lru,
    Recency,
    Static,
    parse_policy,
)
from moegraph.placement.generator import generate_trace
from moegraph.placement.identity import RouterShape
from moegraph.placement.profile import Profile
from moegraph.placement.simulate import Simulation, even_slots, simulate
from moegraph.placement.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
US = 1e-6
# One expert streams in 10 us, takes the CPU 30 us for the first and 5 us for each further one.
SIMPLE = Machine(
    "simple", 1, 1000, whole=1000 * US, host_layer=1 * US, fixed=2 * US, overlap=4 * US,
    stream=Curve(((1, 10 * US), (2, 20 * US))), cpu=Curve(((1, 30 * US), (2, 35 * US))),
    fetch_layer=0.5 * US, fetch=Curve(((1, 9 * US), (2, 17 * US))),
)  # fmt: skip


def explicit(rows: list[list[int]], n_prompt: int = 0) -> Trace:
    """A trace of one layer of eight experts."""
    ids = np.array(rows, dtype=np.uint8)[:, None, :]
    return Trace(RouterShape(1, 8, ids.shape[2]), ids, n_prompt)


def test_a_curve_is_straight_between_points_and_beyond_the_last() -> None:
    curve = Curve(((1, 91.0), (2, 124.0), (4, 183.0), (8, 285.0)))
    assert [curve(n) for n in (0, 1, 2, 4, 8)] == [0, 91, 124, 183, 285]
    assert curve(3) == pytest.approx(153.5) and curve(6) == pytest.approx(234)
    assert curve(16) == pytest.approx(285 + 8 * 102 / 4)
    single = Curve(((2, 10.0),))
    assert (single(1), single(2), single(6)) == (10.0, 10.0, 30.0)


def test_a_layer_waits_for_the_slower_path_less_what_overlaps() -> None:
    assert SIMPLE.stall(0, 0) == 0
    assert SIMPLE.stall(0, 3) == pytest.approx((2 + 30 - 4) * US)
    assert SIMPLE.stall(1, 2) == pytest.approx((2 + 30 - 4) * US)
    patient = replace(SIMPLE, overlap=1.0)
    assert patient.stall(2, 2) == 2 * US, "B hides all of it"


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


def test_equal_times_are_streamed_because_that_can_stay() -> None:
    assert best_split([0.0, 1.0, 2.0], [0.0, 1.0, 2.0]) == [0, 0, 1]


def test_rare_misses_are_streamed_where_the_cpu_is_not_much_quicker() -> None:
    assert not streams_rare_misses(60e-6, 90e-6, 255, 256), "1.5 times as long"
    assert streams_rare_misses(60.1e-6, 90e-6, 128, 256)
    assert not streams_rare_misses(60.1e-6, 90e-6, 127, 256), "less than half is resident"


@pytest.mark.parametrize(
    ("name", "times_as_long", "n_on_cpu_of_8", "fetches_from"),
    [("h200", 1.05, 5, 20), ("desktop", 1.39, 6, 42)],
)
def test_the_built_in_machines_do_what_the_documentation_says(
    name: str, times_as_long: float, n_on_cpu_of_8: int, fetches_from: int
) -> None:
    """docs/residency.md has these numbers."""
    machine = MACHINES[name]
    one = machine.cpu(1), machine.stream(1)
    assert round(one[1] / one[0], 2) == times_as_long
    assert streams_rare_misses(*one, 128, 256) and not streams_rare_misses(*one, 127, 256)
    split = split_for(machine, "auto", 8)
    assert (split[1], split[8]) == (1, n_on_cpu_of_8)
    costs = machine_costs(machine, 8)
    by_slots = [choose_ways("auto", costs, [n], 8, 256).fetch_rows > 0 for n in range(256)]
    assert by_slots.index(True) == fetches_from and all(by_slots[fetches_from:])
    text = (ROOT / "docs" / "residency.md").read_text("utf-8")
    for number in (times_as_long, fetches_from):
        assert re.search(rf"\b{re.escape(str(number))}\b", text), f"the page no longer has {number}"


def test_a_machine_scales_with_layers_and_the_size_of_experts() -> None:
    half = SIMPLE.scaled(3, 500)
    assert half is not None
    assert (half.n_layer, half.expert_bytes, half.host_layer) == (3, 500, SIMPLE.host_layer)
    assert half.whole == pytest.approx(3 * SIMPLE.whole)
    assert half.stream(3) == pytest.approx(15 * US) and half.cpu(1) == pytest.approx(15 * US)
    assert half.fetch(2) == pytest.approx(8.5 * US) and half.fetch_layer == SIMPLE.fetch_layer
    fewer = MACHINES["h200"].scaled(20, 1_900_000)
    assert fewer is not None and fewer.whole == pytest.approx(MACHINES["h200"].whole / 2)
    assert SIMPLE.scaled(1, 3000) is not None
    assert SIMPLE.scaled(1, 3001) is None and SIMPLE.scaled(1, 333) is None


def test_machines_come_back_from_their_file(tmp_path: Path) -> None:
    for machine in (*MACHINES.values(), SIMPLE):
        path = tmp_path / f"{machine.name}.json"
        path.write_text(json.dumps(machine_fields(machine)))
        back = find_machine(str(path))
        assert (back.name, back.about) == (machine.name, machine.about)
        assert back.expert_bytes == machine.expert_bytes
        for n in (1, 2, 5, 9):
            assert back.stall(n, n) == pytest.approx(machine.stall(n, n))
            assert back.fetch(n) == pytest.approx(machine.fetch(n))
        assert (back.prompt is None) == (machine.prompt is None)
        if back.prompt and machine.prompt:
            assert back.prompt(700) == pytest.approx(machine.prompt(700))
        for name in ("whole", "host_layer", "fetch_layer"):
            assert getattr(back, name) == pytest.approx(getattr(machine, name))
    assert find_machine("h200") is MACHINES["h200"]


def test_files_need_not_say_how_graphs_fetch(tmp_path: Path) -> None:
    fields = machine_fields(SIMPLE)
    del fields["fetch_layer_us"], fields["fetch_us"], fields["about"]
    (tmp_path / "m").write_text(json.dumps(fields))
    machine = find_machine(str(tmp_path / "m"))
    assert machine.fetch_layer == 0 and machine.fetch == machine.stream


@pytest.mark.parametrize(
    ("change", "say"),
    [({"n_layer": None}, "n_layer is None; expected a positive integer"),
     ({"expert_bytes": 0}, "expert_bytes is 0; expected a positive integer"),
     ({"expert_bytes": True}, "expert_bytes is True"), ({"name": 5}, "name is 5"),
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


def test_a_replay_counted_by_hand() -> None:
    """Slots start with 0, 1, 2; LRU."""
    trace = explicit([[0, 1], [3, 1], [3, 4], [0, 4], [0, 4]])
    found = run(trace, [3])
    assert found.missing[:, 0].tolist() == [0, 1, 1, 1, 0]
    assert (found.n_tokens, found.n_streamed, found.n_cpu, found.n_promoted) == (5, 3, 0, 0)
    assert found.hit_rate == pytest.approx(0.7)
    hit, miss = 1001 * US, (1001 + 2 + 10 - 4) * US
    assert found.step_s == pytest.approx([hit, miss, miss, miss, hit])
    assert found.tokens_per_s == pytest.approx(5 / (2 * hit + 3 * miss))
    assert found.uploaded_bytes == 3000 and found.bytes_per_token == 600
    assert found.quarters() == [0.5, 1.0, 1.0, 0.0]


def test_what_the_cpu_computed_is_resident_from_the_next_token_on() -> None:
    trace = explicit([[5, 6], [5, 6], [5, 6]])
    found = run(trace, [4], "cpu")
    assert found.missing[:, 0].tolist() == [2, 0, 0]
    assert (found.n_cpu, found.n_promoted, found.uploaded_bytes) == (2, 2, 2000)
    assert found.step_s[0] == pytest.approx((1001 + 2 + 35 - 4) * US)


def test_nothing_resident_and_everything_resident_are_the_ends_of_the_range() -> None:
    trace = generate_trace(RouterShape(4, 32, 4), 40)
    cold, full = run(trace, [0] * 4), run(trace, [32] * 4)
    assert cold.hit_rate == 0 and (cold.missing == 4).all()
    assert full.hit_rate == 1 and full.missing.sum() == 0
    assert full.step_s == pytest.approx([SIMPLE.whole] * 40), "no layer needs a look"
    assert cold.step_s == pytest.approx([SIMPLE.whole + 4 * (1 + 2 + 36) * US] * 40)
    assert full.tokens_per_s > run(trace, [16] * 4).tokens_per_s > cold.tokens_per_s


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
def test_a_last_row_of_a_prompt_may_be_fetched(n_prompt: int) -> None:
    """A run's graphs fetch for it; the replay must take the same way."""
    rows = [[0, 1]] * (n_prompt - 1) + [[6, 7]]
    found = run(explicit([*rows, [6, 7]], n_prompt), [3], is_pinned=True)
    assert found.missing[:, 0].tolist() == [0], "the row of the prompt brought them"


class DistinctRecency(Recency):
    """Without ties, so that any two ways to sort agree."""

    def touch(self, ids: Sequence[int]) -> None:
        super().touch(ids)
        for expert in ids:
            self.score[expert] += expert / 1000


class DistinctFrequency(Frequency):
    """Without ties, so that any two ways to sort agree."""

    def touch(self, ids: Sequence[int]) -> None:
        super().touch(ids)
        for expert in ids:
            self.score[expert] += 1e-6 * expert * self._weight


class Distinct:
    """A policy for tests."""

    name = "distinct"

    def __init__(self, of: str) -> None:
        self.of = of

    def layer(self, n_expert: int, n_slots: int, n_expert_used: int) -> LayerPolicy:
        if self.of == "lru":
            return DistinctRecency(n_expert)
        return DistinctFrequency(n_expert, 96.0, 1.1, 8.0)

    def problems(self) -> list[str]:
        return []

    def score(self, expert: int, n_slots: int, times: list[int]) -> float:
        """Return the score of an expert that was chosen at times, in a replay from scratch."""
        if self.of == "lru":
            return times[-1] + expert / 1000 if times else -expert - 1.0
        start = 0.5 * (1 - expert / n_slots) if expert < n_slots else 0.0
        return start + sum(2.0 ** (t / 96) * (1 + 1e-6 * expert) for t in times)


def misses_of_a_layer(rows: list[list[int]], n_slots: int, policy: Distinct) -> list[int]:
    """Replay the rule for one layer: the lowest of all slots go, unless the row chose them."""
    slots = list(range(n_slots))
    times: dict[int, list[int]] = {}
    found = []
    for now, ids in enumerate(rows, 1):
        scores = {e: policy.score(e, n_slots, times.get(e, [])) for e in slots}
        losers = [e for e in sorted(slots, key=scores.__getitem__)[: len(ids)] if e not in ids]
        missing = [e for e in ids if e not in slots]
        for expert, loser in zip(missing, losers):
            slots[slots.index(loser)] = expert
        found.append(len(missing))
        for expert in ids:
            times.setdefault(expert, []).append(now)
    return found


@pytest.mark.parametrize("of", ["lru", "lfu"])
def test_what_graphs_fetch_is_what_the_rule_says(of: str) -> None:
    trace, policy = generate_trace(RouterShape(5, 64, 6), 250), Distinct(of)
    n_slots = [6, 7, 12, 30, 64]
    found = run(trace, n_slots, policy=policy, is_pinned=True)
    for il, n in enumerate(n_slots):
        rows = trace.ids[:, il].tolist()
        expected = misses_of_a_layer(rows, n, policy)
        assert found.missing[:, il].tolist() == expected, f"layer {il}"
    assert found.stats.missing[:4].min() > 50 and found.stats.missing[4] == 0
    assert found.n_streamed == found.missing.sum() == found.stats.admitted.sum()
    stalls = np.array([0.0, *(SIMPLE.fetch(n) for n in range(1, 7))])[found.missing].sum(axis=1)
    assert found.step_s == pytest.approx(SIMPLE.whole + 4 * SIMPLE.fetch_layer + stalls)


def test_only_layers_with_slots_for_a_row_fetch_by_themselves() -> None:
    trace = generate_trace(RouterShape(4, 32, 4), 40)
    found = run(trace, [0, 3, 4, 32], is_pinned=True)
    stalls = [
        sum(SIMPLE.stall(0, n) for n in row[:2]) + SIMPLE.fetch(row[2])
        for row in found.missing.tolist()
    ]
    base = SIMPLE.whole + 2 * SIMPLE.host_layer + SIMPLE.fetch_layer
    assert found.step_s == pytest.approx(base + np.array(stalls))
    static = run(trace, [8] * 4, policy=Static(), is_pinned=True)
    assert static.stats.admitted.sum() == 0, "no slot changes"
    assert static.step_s.min() >= SIMPLE.whole + 4 * SIMPLE.host_layer


def test_the_mode_and_the_machine_decide_who_fetches() -> None:
    trace, slots = generate_trace(RouterShape(4, 32, 4), 60), [8] * 4

    def fetches(mode: str, machine: Machine = SIMPLE, is_pinned: bool = True) -> bool:
        slow = replace(machine, fetch_layer=1.0)
        return run(trace, slots, mode, machine=slow, is_pinned=is_pinned).step_s.min() > 4

    assert fetches("stream") and not fetches("cpu") and not fetches("stream", is_pinned=False)
    assert fetches("auto")
    slow = Curve(((1, 500 * US), (2, 1000 * US)))
    assert not fetches("auto", replace(SIMPLE, stream=slow, cpu=Curve(((4, 1 * US),))))


@pytest.mark.parametrize(
    ("is_pinned", "n_slots", "tokens_per_s"),
    [(True, 10185, 422.1), (True, 8137, 408.2), (True, 6088, 383.5), (True, 4041, 335.4),
     (True, 2505, 260.9), (True, 970, 151.0), (True, 0, 108.1), (False, 10185, 360.6),
     (False, 6088, 321.8), (False, 2505, 207.2), (False, 970, 130.5)],
)  # fmt: skip
def test_measured_speeds_follow_from_the_built_in_machine(
    is_pinned: bool, n_slots: int, tokens_per_s: float
) -> None:
    """The second half by builds whose graphs did not fetch by themselves."""
    trace = generate_trace(RouterShape(40, 256, 8), 64 + 384)
    slots = even_slots(40, 256, n_slots / (40 * 256))
    found = simulate(trace, slots, Lfu(), MACHINES["h200"], skip=64, is_pinned=is_pinned)
    assert found.tokens_per_s == pytest.approx(tokens_per_s, rel=0.1)


def test_prompt_and_skipped_tokens_warm_up_and_are_not_counted() -> None:
    trace = generate_trace(RouterShape(3, 32, 4), 90)
    with_prompt = Trace(trace.shape, trace.ids, 30)
    found = run(with_prompt, [12] * 3, policy=Lfu(), skip=20)
    assert found.n_tokens == 40 and found.stats.n_steps == 40
    assert found.stats.hits.sum() + found.stats.misses.sum() == 40 * 3 * 4
    assert found.n_streamed == found.missing.sum() == found.stats.missing.sum()


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_exchanging_experts_after_a_prompt_saves_the_warm_up(policy: str) -> None:
    generated = generate_trace(RouterShape(6, 128, 8), 230)
    trace = Trace(generated.shape, generated.ids, 200)
    slots = even_slots(6, 128, 0.5)
    without = run(trace, slots, policy=parse_policy(policy), exchange=False)
    with_it = run(trace, slots, policy=parse_policy(policy))
    assert with_it.missing.sum() < 0.75 * without.missing.sum()
    assert with_it.n_streamed == with_it.missing.sum(), "the exchange is not counted"


def test_slot_bytes_of_mixed_types_are_counted_by_layer() -> None:
    ids = np.array([[[5], [1]], [[6], [1]], [[7], [6]]], dtype=np.uint8)
    trace = Trace(RouterShape(2, 8, 1), ids)
    found = run(trace, [2, 2], slot_bytes=[10, 100])
    assert found.uploaded_bytes == 3 * 10 + 1 * 100


def test_a_profile_warms_the_start_and_static_needs_it() -> None:
    trace = generate_trace(RouterShape(4, 64, 4), 100)
    profile = Profile(trace.shape)
    profile.add("same", trace.counts(), 100)
    slots = even_slots(4, 64, 0.3)
    for policy in (Lfu(), Static(), parse_policy("adaptive")):
        warm = run(trace, slots, policy=policy, profile=profile, profile_class="same")
        cold = run(trace, slots, policy=policy)
        assert warm.missing[:20].sum() < 0.9 * cold.missing[:20].sum(), policy
    static = run(trace, slots, policy=Static(), profile=profile)
    best = -np.sort(-trace.counts(), axis=1)
    expected = sum(best[il, : slots[il]].sum() for il in range(4)) / best.sum()
    assert static.hit_rate == pytest.approx(expected)


def test_published_hit_rates_of_a_layered_lru_are_met() -> None:
    """128 experts, 8 used, 256 cold tokens, LRU by layer: .741 .894 .962 with 24, 49, 81 slots."""
    trace = generate_trace(RouterShape(24, 128, 8), 256)
    for n_slots, rate, tolerance in ((24, 0.741, 0.08), (49, 0.894, 0.03), (81, 0.962, 0.02)):
        found = run(trace, [n_slots] * 24)
        assert found.hit_rate == pytest.approx(rate, abs=tolerance), n_slots


def test_lfu_beats_lru_at_a_quarter_of_the_experts() -> None:
    trace = generate_trace(RouterShape(8, 256, 8), 400)
    slots = even_slots(8, 256, 0.25)
    lfu = run(trace, slots, policy=Lfu(), skip=150).missing.sum()
    assert lfu < 0.85 * run(trace, slots, skip=150).missing.sum()


def test_traces_that_do_not_fit_or_are_too_short_are_refused() -> None:
    trace = explicit([[0, 1], [3, 1]], n_prompt=1)
    with pytest.raises(RequestError, match="the trace has 1 layers, the placement 2"):
        run(trace, [4, 4])
    with pytest.raises(RequestError, match="first 2 are not counted .prompt 1, skipped 1."):
        run(trace, [4], skip=1)


def test_even_slots_cover_the_share() -> None:
    assert even_slots(40, 256, 0.25) == [64] * 40
    assert even_slots(3, 10, 0.5) == [5, 5, 5] and even_slots(3, 10, 0.35) == [4, 3, 3]
    assert even_slots(2, 8, 1.0) == [8, 8] and even_slots(2, 8, 0.0) == [0, 0]
