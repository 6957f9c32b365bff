"""How several devices divide the layers, and each its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moegraph.errors import ConfigError, OutOfDeviceMemory
from moegraph.placement.planner import Footprint, make_plan
from moegraph.placement.split import (
    Place,
    SplitSettings,
    StagePlan,
    by_shares,
    evened,
    merged,
    split_layers,
    stage_seconds,
)
from moegraph.units import GiB, MiB

N_LAYER, N_EXPERT = 40, 256
SIZES = tuple(2 * MiB if il % 4 == 3 else 2 * MiB - 200_000 for il in range(N_LAYER))
AUTO = SplitSettings()


def need_of(_: int, layers: range) -> Footprint:
    """A 35B-A3B: what a stage of some layers needs, with the head at the end."""
    n = len(layers)
    return Footprint(
        N_EXPERT, 8, tuple(SIZES[il] for il in layers),
        weights=n * 45 * MiB + 400 * MiB * (layers.stop == N_LAYER), kv=n * 2 * MiB,
        state=n * MiB, compute=300 * MiB, other=224 * MiB, staging=60 * MiB,
    )  # fmt: skip


def lengths(stages: tuple[StagePlan, ...]) -> list[int]:
    return [len(stage.layers) for stage in stages]


def test_equal_devices_hold_twice_the_experts_of_one() -> None:
    one = make_plan(need_of(0, range(N_LAYER)), 8 * GiB)
    stages = split_layers(N_LAYER, [Place(8 * GiB)] * 2, need_of, AUTO)
    both = merged(stages, SIZES, N_EXPERT)
    assert lengths(stages) == [22, 18]  # the second has the head
    assert both.resident_share > 2 * one.resident_share
    assert len(both.n_slots) == N_LAYER and both.budget == 16 * GiB
    assert both.total == sum(stage.plan.total for stage in stages)
    assert both.host_bytes == one.host_bytes


@pytest.mark.parametrize("budgets", [(8, 12), (12, 8), (6, 6, 24), (8, 8, 8, 8)])
def test_every_byte_of_every_device_is_used(budgets: tuple[int, ...]) -> None:
    stages = split_layers(N_LAYER, [Place(n * GiB) for n in budgets], need_of, AUTO)
    for n, stage in zip(budgets, stages):
        assert stage.plan.margin is not None
        assert stage.plan.all_resident or 0 <= stage.plan.margin < N_LAYER * max(SIZES)
        assert stage.plan.total <= n * GiB
    ordered = sorted(zip(budgets, lengths(stages)))
    assert [n for _, n in ordered] == sorted(lengths(stages)) or len(set(budgets)) < len(budgets)


def test_no_other_division_is_faster() -> None:
    places = [Place(7 * GiB, link_rate=6e9), Place(12 * GiB, memory_rate=900e9)]

    def seconds(stop: int) -> float:
        total = 0.0
        for at, layers in enumerate((range(stop), range(stop, N_LAYER))):
            need = need_of(at, layers)
            total += stage_seconds(places[at], need, make_plan(need, places[at].budget))
        return total

    stages = split_layers(N_LAYER, places, need_of, AUTO)
    best = min(range(1, N_LAYER), key=seconds)
    assert seconds(len(stages[0].layers)) == pytest.approx(seconds(best), rel=0.01)
    assert len(stages[0].layers) < N_LAYER // 2


def test_all_experts_of_a_device_that_needs_them_are_there() -> None:
    places = [Place(8 * GiB), Place(8 * GiB, needs_all=True)]
    stages = split_layers(N_LAYER, places, need_of, AUTO)
    assert stages[1].plan.all_resident and not stages[0].plan.all_resident
    assert 10 < len(stages[1].layers) < 16
    with pytest.raises(ConfigError, match="rpc: memory leaves"):
        worker = Place(8 * GiB, "rpc: memory", needs_all=True)
        split_layers(N_LAYER, [Place(8 * GiB), worker], need_of, SplitSettings(shares=(1, 1)))


def test_slots_and_full_layers_of_the_user_are_those_of_all_devices() -> None:
    settings = SplitSettings(pin_layers=4, cache_slots=1001)
    stages = split_layers(N_LAYER, [Place(None)] * 3, need_of, settings)
    plan = merged(stages, SIZES, N_EXPERT)
    assert len(plan.pinned) == 4
    assert sum(plan.n_slots) == 4 * N_EXPERT + 1001
    assert {0, stages[1].layers.start} & set(plan.pinned)


def test_devices_of_nearly_the_same_rate_count_as_equal() -> None:
    assert evened([10, 30, 12, 11, 40]) == [12, 30, 12, 12, 40]
    assert evened([]) == []


def test_one_device_without_a_limit_is_no_limit() -> None:
    places = [Place(8 * GiB), Place(None)]
    plan = merged(split_layers(N_LAYER, places, need_of, AUTO), SIZES, N_EXPERT)
    assert plan.budget is None and plan.margin is None


@pytest.mark.parametrize("n_dense", [1, 3, 20])
@pytest.mark.parametrize("pins", [1, 4, 20])
def test_dense_layers_take_no_part_of_what_the_user_set(n_dense: int, pins: int) -> None:
    def need(at: int, layers: range) -> Footprint:
        sizes = tuple(SIZES[il] * (il >= n_dense) for il in layers)
        return replace(need_of(at, layers), slot_bytes=sizes)

    settings = SplitSettings(pin_layers=pins, cache_slots=7, shares=(1, 1, 6))
    stages = split_layers(N_LAYER, [Place(None)] * 3, need, settings)
    held = [n for stage in stages for n in stage.plan.n_slots]
    assert sum(held[n_dense:]) == pins * N_EXPERT + 7 * (pins < N_LAYER - n_dense)
    places = [Place(None, needs_all=True), Place(None)]
    first, _ = split_layers(N_LAYER, places, need, replace(settings, shares=(1, 3)))
    assert first.plan.all_resident
    with pytest.raises(ConfigError, match=f"allowed for this model: 0 to {N_LAYER - n_dense}"):
        split_layers(N_LAYER, places, need, SplitSettings(pin_layers=N_LAYER - n_dense + 1))


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=8), st.integers(8, 60))
def test_shares_cover_all_layers_in_order(shares: list[float], n_layer: int) -> None:
    if sum(shares) <= 0:
        with pytest.raises(ConfigError, match="no device a share"):
            by_shares(n_layer, shares)
        return
    ranges = by_shares(n_layer, shares)
    assert len(ranges) == len(shares) and all(ranges)
    assert [il for layers in ranges for il in layers] == list(range(n_layer))


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ConfigError, match="41 devices for 40 layers"):
        split_layers(N_LAYER, [Place(None)] * 41, need_of, AUTO)
    with pytest.raises(OutOfDeviceMemory, match=r"--vram of cuda:1 allows 600 MiB"):
        places = [Place(8 * GiB), Place(600 * MiB, "--vram of cuda:1")]
        split_layers(N_LAYER, places, need_of, AUTO)
