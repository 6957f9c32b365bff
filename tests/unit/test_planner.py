"""The planner: budgets to slots, with numbers where it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegraph.cli.budget import resident_text
from moegraph.errors import ConfigError, OutOfDeviceMemory
from moegraph.placement.planner import Footprint, Plan, make_plan, pin_order, upstream_cpu_layers
from moegraph.placement.split import StagePlan, merged
from moegraph.units import GiB, MiB

# 35B-A3B with experts of mixed types: down is Q6_K in every fourth layer.
SIZES = tuple(2 * MiB if il % 4 == 3 else 2 * MiB - 200_000 for il in range(40))
BIG = Footprint(
    256, 8, SIZES, weights=2 * GiB, kv=80 * MiB, state=63 * MiB, compute=300 * MiB,
    other=400 * MiB, staging=64 * MiB,
)  # fmt: skip
SMALL = Footprint(8, 2, (10, 10, 10, 10), weights=100, kv=20, state=10, compute=30)


def test_everything_resident_when_it_fits_and_staging_is_then_not_needed() -> None:
    exact = BIG.fixed + BIG.experts
    plan = make_plan(BIG, exact)
    assert plan.all_resident and plan.margin == 0 and plan.resident_share == 1.0
    assert plan.n_slots == (256,) * 40 and plan.pinned == tuple(range(40))
    assert plan.bytes["staging"] == plan.bytes["slots"] == 0
    assert not make_plan(BIG, exact - 1).all_resident
    assert make_plan(BIG, exact, pin_layers=40).all_resident
    assert max(make_plan(BIG, 2 * exact, pin_layers=1).n_slots) == 256, "no more than experts"
    with pytest.raises(ConfigError, match="at most 39 layers fit"):
        make_plan(BIG, exact - 1, pin_layers=40)


def unpinned(plan: Plan) -> int:
    """Return the slots of all layers that are not pinned."""
    return sum(n for il, n in enumerate(plan.n_slots) if il not in plan.pinned)


def test_the_ring_is_twice_as_large_where_experts_have_32_times_its_memory() -> None:
    need = replace(SMALL, slot_bytes=(0, 10, 6, 10), ring=4, ring_groups=3)
    enough = need.fixed + 33 * need.ring
    plans = [make_plan(need, budget) for budget in (enough - 1, enough)]
    assert [(plan.ring_groups, plan.bytes["staging"]) for plan in plans] == [(3, 4), (6, 8)]
    plans = [make_plan(need, None, 1, n_slots) for n_slots in (4, 5)]  # 8 experts of 10 bytes
    assert [plan.ring_groups for plan in plans] == [3, 6]
    assert make_plan(need, None).ring_groups == 3, "all is resident"


def test_a_budget_becomes_even_slots_whatever_the_types() -> None:
    plan = make_plan(BIG, 14 * GiB)
    assert plan.pinned == ()
    assert max(plan.n_slots) - min(plan.n_slots) <= 1
    assert plan.n_slots == tuple(sorted(plan.n_slots, reverse=True))
    assert plan.margin is not None and 0 <= plan.margin < max(SIZES) * 40
    assert plan.resident_share == pytest.approx(plan.bytes["slots"] / BIG.experts)


def test_first_and_last_layer_are_pinned_first_then_from_layer_1() -> None:
    assert pin_order(range(6)) == [0, 5, 1, 2, 3, 4]
    assert pin_order([1]) == [1] and pin_order([2, 4]) == [2, 4]
    plan = make_plan(BIG, 14 * GiB, pin_layers=3)
    assert plan.pinned == (0, 1, 39)
    assert min(plan.n_slots) > 100, "the rest of the budget becomes slots"
    assert plan.bytes["pinned"] == 256 * (SIZES[0] + SIZES[1] + SIZES[39])


def test_a_dense_layer_costs_nothing_and_is_no_full_one() -> None:
    need = replace(SMALL, slot_bytes=(0, 10, 0, 10, 10))
    rest = need.fixed + need.staging
    assert make_plan(need, rest + 120).n_slots == (8, 4, 8, 4, 4)
    plan = make_plan(need, None, pin_layers=1, cache_slots=6)
    assert plan.n_slots == (8, 8, 8, 3, 3) and (plan.pinned, plan.dense) == ((1,), (0, 2))
    assert resident_text(plan).endswith(" resident, 3 slots a layer, 1 full layer")
    whole = StagePlan(range(5), plan)
    assert merged([whole], need.slot_bytes, 8) == plan
    assert make_plan(need, None, pin_layers=3).all_resident
    demand = [[1.0] * 8, [0.0] * 8, [1.0] * 8, [9.0] * 8, [0.0] * 8]
    assert make_plan(need, rest + 120, demand=demand).n_slots == (8, 2, 8, 8, 2)
    with pytest.raises(ConfigError, match="--pin-layers is 4; allowed for this model: 0 to 3"):
        make_plan(need, None, pin_layers=4)
    with pytest.raises(ConfigError, match="--cache-slots is 25; allowed for this model: 0 to 24"):
        make_plan(need, None, cache_slots=25)
    dense = make_plan(replace(need, slot_bytes=(0, 0)), need.fixed, cache_slots=0)
    assert dense.all_resident and dense.bytes["staging"] == 0


def test_a_dense_part_that_does_not_fit_is_refused_with_numbers_and_remedies() -> None:
    need = replace(BIG, staging=24 * MiB, ring=40 * MiB)
    with pytest.raises(OutOfDeviceMemory, match="without its experts needs 2.89 GiB") as caught:
        make_plan(need, need.fixed + 64 * MiB - 1)
    text = str(caught.value)
    for part in ("weights 2.00 GiB", "KV cache 80.0 MiB", "--vram allows 2.89 GiB", "-ctk q8_0"):
        assert part in text
    assert "staging 64.0 MiB)" in text


def test_pins_over_the_budget_are_refused_and_told_how_many_fit() -> None:
    with pytest.raises(ConfigError, match="at most 23 layers fit") as caught:
        make_plan(BIG, 14 * GiB, pin_layers=30)
    assert "--pin-layers 30 needs 14.0 GiB" in str(caught.value)
    assert "--vram leaves 11.1 GiB" in str(caught.value)
    assert len(make_plan(BIG, 14 * GiB, pin_layers=23).pinned) == 23
    with pytest.raises(ConfigError, match="at most 24 layers fit"):
        make_plan(BIG, 14 * GiB + 490 * MiB, pin_layers=30)


def test_slots_over_the_budget_are_refused_and_told_how_many_fit() -> None:
    most = unpinned(make_plan(BIG, 14 * GiB, pin_layers=1))
    with pytest.raises(ConfigError, match=f"at most {most} slots fit"):
        make_plan(BIG, 14 * GiB, pin_layers=1, cache_slots=most + 200)
    with pytest.raises(ConfigError, match="free memory allows 14.0 GiB"):
        make_plan(BIG, 14 * GiB, cache_slots=9000, source="free memory")
    mixed = replace(SMALL, slot_bytes=(10, 30, 10, 10))
    plan = make_plan(mixed, mixed.fixed + 170, cache_slots=8)
    assert plan.n_slots == (2, 2, 2, 2), "a full layer would take the place of slots"


@pytest.mark.parametrize(
    ("pins", "slots", "say"),
    [(41, None, "--pin-layers is 41; allowed for this model: 0 to 40"),
     (None, 10241, "--cache-slots is 10241; allowed for this model: 0 to 10240"),
     (-2, None, "--pin-layers is -2")],
)  # fmt: skip
def test_impossible_wishes_are_refused(pins: int | None, slots: int | None, say: str) -> None:
    with pytest.raises(ConfigError, match=say):
        make_plan(BIG, None, pins, slots)


def test_upstream_needs_as_many_cpu_layers_as_the_budget_lacks() -> None:
    everything = SMALL.fixed + SMALL.experts
    assert upstream_cpu_layers(SMALL, everything) == 0
    assert upstream_cpu_layers(SMALL, everything - 1) == 1
    assert upstream_cpu_layers(SMALL, everything - 81) == 2
    assert upstream_cpu_layers(SMALL, SMALL.fixed) == 4
    assert upstream_cpu_layers(SMALL, SMALL.fixed - 1) is None


def test_with_a_profile_flat_layers_get_more_slots() -> None:
    steep, flat = [0.9, 0.8, 0.15, 0.1, 0, 0, 0, 0], [0.3, 0.3, 0.3, 0.3, 0.2, 0.2, 0.2, 0.2]
    demand = [steep, flat, steep, flat]
    for plan in (
        make_plan(SMALL, SMALL.fixed + 165, demand=demand),
        make_plan(SMALL, None, cache_slots=16, demand=demand),
    ):
        assert plan.n_slots == (2, 6, 2, 6)
    unseen = make_plan(SMALL, None, cache_slots=22, demand=[[1.0] * 2 + [0.0] * 6] * 4)
    assert unseen.n_slots == (6, 6, 5, 5)
    steep = [[9.0] * 8, *[[0.1] * 8] * 3]
    assert make_plan(SMALL, None, cache_slots=9, demand=steep).n_slots == (3, 2, 2, 2)
    mixed = replace(SMALL, slot_bytes=(30, 10, 30, 10))
    rest = make_plan(mixed, mixed.fixed + 185, demand=[[9.0] * 8, [1.0] * 8] * 2)
    assert rest.n_slots == (2, 3, 2, 3), "smaller ones take what is too little for a large one"
    with pytest.raises(ConfigError, match="at most 16 slots fit"):
        make_plan(SMALL, SMALL.fixed + 165, 0, 17, demand=demand)


footprints = st.builds(
    Footprint, n_expert=st.integers(1, 32), n_expert_used=st.just(1),
    slot_bytes=st.lists(st.integers(1, 50), min_size=1, max_size=8).map(tuple),
    weights=st.integers(0, 500), kv=st.integers(0, 100), state=st.integers(0, 10),
    compute=st.integers(0, 10), other=st.integers(0, 10), staging=st.integers(0, 30),
    ring=st.integers(0, 10),
)  # fmt: skip
wishes = st.none() | st.integers(0, 40)


@given(footprints, st.integers(0, 20_000), wishes, wishes, st.integers(0, 3))
def test_every_plan_keeps_its_budget_and_every_refusal_is_justified(
    need: Footprint, budget: int, pins: int | None, slots: int | None, steepness: int
) -> None:
    curves = [[(at + 1.0) ** -(steepness + il % 3) for at in range(need.n_expert)]
              for il in range(need.n_layer)]  # fmt: skip
    try:
        plan = make_plan(need, budget, pins, slots, demand=curves if steepness else None)
    except OutOfDeviceMemory:
        assert need.fixed + need.staging + need.ring > budget
        return
    except ConfigError:
        assert pins is not None or slots is not None
        return
    assert plan.total <= budget
    assert_consistent(need, plan)
    if pins is not None:
        assert set(pin_order(need.routed)[:pins]) <= set(plan.pinned)
    if pins is None and slots is None and not plan.all_resident:
        small = [il for il, n in enumerate(plan.n_slots) if n < need.n_expert]
        left = budget - plan.total
        assert left < sum(need.slot_bytes[il] for il in small), "a round of slots was left over"
    if slots is not None and pins is not None:
        assert unpinned(plan) <= slots


def assert_consistent(need: Footprint, plan: Plan) -> None:
    assert all(0 <= n <= need.n_expert for n in plan.n_slots)
    assert plan.all_resident == (set(plan.n_slots) == {need.n_expert})
    assert plan.bytes["pinned"] + plan.bytes["slots"] == sum(
        n * size for n, size in zip(plan.n_slots, need.slot_bytes)
    )
    assert (plan.bytes["staging"] > 0) == (not plan.all_resident and need.staging + need.ring > 0)
