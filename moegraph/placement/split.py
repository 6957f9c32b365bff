"""Divides the layers of a model over several devices, and each device's memory. Pure arithmetic.

A token passes all layers in turn. So its time is a sum over the devices: what each reads of its
memory, and what crosses its link because it is not there. The division with the smallest sum is
taken; of several that are about as good, the one whose devices take equally long, because prompts
and several sequences keep all devices busy at once. On equal devices that is half of the layers
each; a larger, faster one gets more.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter

from ..errors import ConfigError, OutOfDeviceMemory
from ..experts.cost import expected_missing
from ..units import parse_bytes
from .planner import Demand, Footprint, Plan, make_plan, require_counts

# Bytes a second, where nothing was measured: only their ratio matters, which is that of _LINK in
# drafters.py.
MEMORY_RATE, LINK_RATE = 450e9, 25e9
# What a layer takes besides reading: its kernels follow one another.
_LAYER_SECONDS = 50e-6
# Rates that differ by no more than this factor are of equal devices, measured at another moment.
_EQUAL = 1.3
# What a token may take longer, at most, so that devices take equally long.
_BALANCE = 0.02
NeedOf = Callable[[int, range], Footprint]


@dataclass(frozen=True)
class Place:
    """A device that may have layers.

    budget: device bytes, None without a limit. needs_all: it must have all experts of its layers.
    memory_rate, link_rate: bytes a second out of its memory, and from the host to it. name: for
    messages.
    """

    budget: int | None
    name: str = "--vram"
    needs_all: bool = False
    memory_rate: float = MEMORY_RATE
    link_rate: float = LINK_RATE


@dataclass(frozen=True)
class StagePlan:
    """The layers of a device, and the plan for its memory, whose layers are those alone."""

    layers: range
    plan: Plan


@dataclass(frozen=True)
class SplitSettings:
    """What the user set: full layers and slots of all devices together, and shares of the layers.

    None: the planner chooses. demand: as of `make_plan`, of the whole model.
    """

    pin_layers: int | None = None
    cache_slots: int | None = None
    shares: Sequence[float] | None = None
    demand: Demand | None = None


def evened(rates: Sequence[float]) -> list[float]:
    """Return measured rates; those of devices that are probably equal are the same number.

    Even a small difference would move nearly all layers that miss experts to one of the devices.
    """
    found = list(rates)
    order = sorted(range(len(rates)), key=lambda i: rates[i])
    while order:
        alike = [i for i in order if rates[i] <= _EQUAL * rates[order[0]]]
        for i in alike:
            found[i] = max(rates[j] for j in alike)
        order = order[len(alike) :]
    return found


def split_layers(
    n_layer: int, places: Sequence[Place], need_of: NeedOf, settings: SplitSettings
) -> tuple[StagePlan, ...]:
    """Return the layers of each place, at least one, and the plans.

    need_of: (place, layers) -> what these layers need there.
    """
    if len(places) > n_layer:
        raise ConfigError(f"{len(places)} devices for {n_layer} layers; name fewer (--device)")
    whole = need_of(0, range(n_layer))
    require_counts(whole, settings.pin_layers, settings.cache_slots)
    ranges: Sequence[range] = (range(n_layer),)
    if settings.shares is not None:
        ranges = by_shares(n_layer, settings.shares)
    elif len(places) > 1:
        ranges = _fastest(whole, places, need_of, settings)
    return tuple(
        StagePlan(layers, plan_stage(place, need_of(at, layers), layers, whole.routed, settings))
        for at, (place, layers) in enumerate(zip(places, ranges))
    )


def by_shares(n_layer: int, shares: Sequence[float]) -> list[range]:
    """Return ranges of layers as near to the shares as whole layers allow, none empty."""
    total, n = sum(shares), len(shares)
    if total <= 0:
        raise ConfigError("--split gives no device a share; give at least one more than 0")
    ends = [round(n_layer * part / total) for part in accumulate(shares)]
    for at in range(n):  # at least one layer each
        ends[at] = max(ends[at], ends[at - 1] + 1 if at else 1)
    for at in reversed(range(n)):
        ends[at] = min(ends[at], n_layer - (n - 1 - at))
    return [range(first, stop) for first, stop in zip([0, *ends], ends)]


def shares_of(text: str) -> tuple[float, ...] | None:
    """Return the shares of --split: plain numbers, or bytes; None for an empty text."""
    if not text:
        return None
    parts = text.split(",")
    try:
        return tuple(float(part) for part in parts)
    except ValueError:
        return tuple(float(parse_bytes(part, "g")) for part in parts)


def plan_stage(
    place: Place, need: Footprint, layers: range, routed: Sequence[int], settings: SplitSettings
) -> Plan:
    """Return the plan for some layers in a place; errors as in `make_plan`.

    routed: the layers of the model with experts, over which numbers of the user are divided.
    """
    start, stop = (bisect_left(routed, il) for il in (layers.start, layers.stop))

    def part(total: int | None) -> int | None:
        """Return these layers' part of a number that counts for all."""
        return None if total is None else total * stop // len(routed) - total * start // len(routed)

    pins, slots = part(settings.pin_layers), part(settings.cache_slots)
    if place.needs_all:
        pins, slots = len(need.routed), None
    demand = settings.demand
    if demand is not None:
        demand = [demand[il] for il in layers]
    return make_plan(need, place.budget, pins, slots, place.name, demand)


def _fastest(
    whole: Footprint, places: Sequence[Place], need_of: NeedOf, settings: SplitSettings
) -> tuple[range, ...]:
    """Return the ranges with which a token takes least time."""
    plain, n_layer = SplitSettings(settings.pin_layers, settings.cache_slots), whole.n_layer
    alone = min(_read_seconds(place, whole) for place in places)
    failed: list[Exception] = []

    def cost(at: int, layers: range) -> float:
        """Return what these layers cost in a place: least where all places are equal."""
        need, place = need_of(at, layers), places[at]
        try:
            plan = plan_stage(place, need, layers, whole.routed, plain)
        except (ConfigError, OutOfDeviceMemory) as error:
            failed.append(error.with_traceback(None))  # its frames know us
            return math.inf
        seconds = stage_seconds(place, need, plan)
        return seconds + _BALANCE * seconds**2 / alone

    # by their first layer, the costs and ranges of the places from the last one on
    best: dict[int, tuple[float, tuple[range, ...]]] = {n_layer: (0.0, ())}
    for at in reversed(range(len(places))):
        n_after = len(places) - 1 - at
        best = {
            first: min(
                (
                    (cost(at, range(first, stop)) + more, (range(first, stop), *rest))
                    for stop, (more, rest) in best.items() if stop > first
                ),
                key=itemgetter(0),
            )
            for first in range(at, n_layer - n_after if at else 1)
        }  # fmt: skip
    seconds, ranges = best[0]
    if seconds == math.inf:
        raise failed[-1]
    return ranges


def stage_seconds(place: Place, need: Footprint, plan: Plan) -> float:
    """Return about how long a stage takes for one token: what it reads, and what it lacks."""
    missing = 0.0
    if not plan.all_resident:
        missing = sum(
            size * expected_missing(n, need.n_expert, need.n_expert_used, 1)
            for n, size in zip(plan.n_slots, need.slot_bytes)
        )
    return _read_seconds(place, need) + missing / place.link_rate


def _read_seconds(place: Place, need: Footprint) -> float:
    """Return how long a token takes to read weights and its experts out of a place's memory."""
    n_bytes = need.weights + need.n_expert_used * sum(need.slot_bytes)
    return n_bytes / place.memory_rate + _LAYER_SECONDS * need.n_layer


def merged(stages: Sequence[StagePlan], slot_bytes: Sequence[int], n_expert: int) -> Plan:
    """Return the plans of all stages as one, with the layers' numbers in the model.

    slot_bytes [n_layer]: as in `Footprint`.
    """
    n_slots = [n for stage in stages for n in stage.plan.n_slots]
    names = dict.fromkeys(name for stage in stages for name in stage.plan.bytes)
    budgets = [stage.plan.budget for stage in stages]
    held = sum(n * size for n, size in zip(n_slots, slot_bytes))
    return Plan(
        n_slots=tuple(n_slots),
        pinned=tuple(stage.layers.start + il for stage in stages for il in stage.plan.pinned),
        bytes={name: sum(s.plan.bytes.get(name, 0) for s in stages) for name in names},
        budget=None if None in budgets else sum(n for n in budgets if n is not None),
        all_resident=all(stage.plan.all_resident for stage in stages),
        resident_share=held / max(n_expert * sum(slot_bytes), 1),
        host_bytes=sum(stage.plan.host_bytes for stage in stages),
        ring_groups=max(stage.plan.ring_groups for stage in stages),
        dense=tuple(stage.layers.start + il for stage in stages for il in stage.plan.dense),
    )
