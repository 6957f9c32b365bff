"""The planner: from a budget of device memory to expert slots of each layer. Pure arithmetic.

The planner first subtracts what every plan needs: weights outside the experts, KV cache, recurrent
states, compute buffers, the driver. Then it makes layers full: the first layer, the last, then from
layer 1 on. The rest of the budget becomes slots of the other layers: spread evenly, or, if a
profile tells how often each layer chooses each expert, where a byte is hit most often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from ..errors import ConfigError, OutOfDeviceMemory
from ..units import format_bytes

# The ring doubles if the memory for experts is at least so many times its bytes.
_RING_SHARE = 32
# [n_layer][n_expert]: choices per token of the most, second most, ... chosen expert, falling.
Demand = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Footprint:
    """Device bytes that a model and its context take.

    slot_bytes [n_layer]: one expert of each layer with padding; types may differ by layer, and a
    dense layer has 0. weights: all weights except routed experts. other: the driver, tables,
    alignment. staging: needed only if some layer is not full, as is ring: what prompts send experts
    through, with ring_groups groups. drafters: all that they take.
    """

    n_expert: int
    n_expert_used: int
    slot_bytes: tuple[int, ...]
    weights: int
    kv: int
    state: int
    compute: int
    other: int = 0
    staging: int = 0
    ring_groups: int = 0
    ring: int = 0
    drafters: int = 0

    @property
    def n_layer(self) -> int:
        """Return the number of layers."""
        return len(self.slot_bytes)

    @property
    def routed(self) -> list[int]:
        """Return the layers with experts."""
        return [il for il, size in enumerate(self.slot_bytes) if size]

    @property
    def fixed(self) -> int:
        """Return the bytes that every plan needs; staging comes on top unless all is resident."""
        base = self.weights + self.kv + self.state + self.compute + self.other
        return base + self.drafters

    @property
    def experts(self) -> int:
        """Return the bytes of all experts."""
        return self.n_expert * sum(self.slot_bytes)


@dataclass(frozen=True)
class Plan:
    """Expert slots of each layer, and what they take.

    n_slots [n_layer]: n_expert for a full or a dense layer, 0 for a layer without slots. pinned:
    the full layers. dense: those that have no experts. bytes: device bytes by purpose: weights, kv,
    state, compute, other, staging, pinned (the experts of full layers), slots, and drafters if
    there are any. budget: None without a limit. resident_share: share of the expert bytes that are
    resident, 0 to 1. host_bytes: host memory for copies of the experts of all layers that are not
    full, of which the device holds some too. ring_groups: groups of the ring.
    """

    n_slots: tuple[int, ...]
    pinned: tuple[int, ...]
    bytes: dict[str, int]
    budget: int | None
    all_resident: bool
    resident_share: float
    host_bytes: int
    ring_groups: int = 0
    dense: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """Return all device bytes of the plan."""
        return sum(self.bytes.values())

    @property
    def margin(self) -> int | None:
        """Return the unused bytes of the budget, None without a budget."""
        return None if self.budget is None else self.budget - self.total


def pin_order(layers: Sequence[int]) -> list[int]:
    """Return layers in the order in which they become full: first, last, then those between."""
    return [*layers[:1], *layers[1:][-1:], *layers[1:-1]]


def make_plan(
    need: Footprint, budget: int | None, pin_layers: int | None = None,
    cache_slots: int | None = None, source: str = "--vram", demand: Demand | None = None,
) -> Plan:  # fmt: skip
    """Return the plan for a budget in device bytes; None means no limit.

    pin_layers, cache_slots (sum over all layers): as the user set them. If both are None, all
    experts are resident if they fit, else the budget becomes slots. If one is None, it gets the
    rest of the budget. source: where the budget comes from, for messages.
    """
    n_layer = need.n_layer
    require_counts(need, pin_layers, cache_slots)
    # staging is not needed if every layer is full
    is_all = pin_layers is None and cache_slots is None
    is_all = is_all or (pin_layers or 0) >= len(need.routed)
    if is_all and (budget is None or need.fixed + need.experts <= budget):
        return _plan(need, [need.n_expert] * n_layer, budget)
    left = None if budget is None else budget - need.fixed - need.staging - need.ring
    n_rings = _n_rings(need, left, pin_layers or 0, cache_slots or 0)
    if left is not None:
        left -= (n_rings - 1) * need.ring
    if left is not None and left < 0:
        raise _too_small(need, budget or 0, source)
    pins = _pins(need, left, pin_layers, cache_slots, source)
    rest = [il for il in need.routed if il not in pins]
    n_slots = [need.n_expert] * n_layer
    if left is not None:
        left -= sum(need.n_expert * need.slot_bytes[il] for il in pins)
    for il, n in zip(rest, _spread(need, rest, left, cache_slots, demand)):
        n_slots[il] = n
    plan = _plan(need, n_slots, budget, n_rings)
    if plan.margin is not None and plan.margin < 0:
        raise ConfigError(
            f"--cache-slots {cache_slots} needs {format_bytes(plan.bytes['slots'])} beside "
            f"{format_bytes(plan.total - plan.bytes['slots'])} for everything else, but {source} "
            f"allows {format_bytes(budget or 0)}; at most "
            f"{sum(_spread(need, rest, left, None, None))} slots fit"
        )
    return plan


def require_counts(need: Footprint, pin_layers: int | None, cache_slots: int | None) -> None:
    """Check what the user set: layers with experts count, dense ones do not."""
    n_routed = len(need.routed)
    for name, value, most in (
        ("--pin-layers", pin_layers, n_routed),
        ("--cache-slots", cache_slots, n_routed * need.n_expert),
    ):
        if value is not None and not 0 <= value <= most:
            raise ConfigError(f"{name} is {value}; allowed for this model: 0 to {most}")


def upstream_cpu_layers(need: Footprint, budget: int) -> int | None:
    """Return the smallest N for which llama.cpp's -ncmoe N fits into budget bytes, or None.

    -ncmoe N leaves the experts of the first N layers in host memory.
    """
    for n in range(need.n_layer + 1):
        if need.fixed + need.n_expert * sum(need.slot_bytes[n:]) <= budget:
            return n
    return None


def _n_rings(need: Footprint, left: int | None, pin_layers: int, cache_slots: int) -> int:
    """Return how many times the smallest ring the plan has.

    A larger ring sends more experts ahead and needs fewer graphs, but slots make every token
    faster. left: bytes for experts.
    """
    if left is None:
        left = (pin_layers * need.n_expert + cache_slots) * max(need.slot_bytes)
    return 2 if left >= _RING_SHARE * need.ring else 1


def _pins(
    need: Footprint, left: int | None, pin_layers: int | None, cache_slots: int | None, source: str
) -> set[int]:
    """Return the layers to make full; left: bytes for experts."""
    order = pin_order(need.routed)
    if pin_layers is None:
        if cache_slots is None or left is None:
            return set()
        # the user's slots come first; their layers are not known yet, so assume the largest
        left -= cache_slots * max(need.slot_bytes)
        return set(order[: _fitting(need, order, left)])
    pins = order[:pin_layers]
    n_bytes = need.n_expert * sum(need.slot_bytes[il] for il in pins)
    if left is not None and n_bytes > left:
        raise ConfigError(
            f"--pin-layers {pin_layers} needs {format_bytes(n_bytes)} for experts, but {source} "
            f"leaves {format_bytes(left)} for them; at most {_fitting(need, order, left)} layers "
            "fit"
        )
    return set(pins)


def _fitting(need: Footprint, order: Sequence[int], left: int) -> int:
    """Return how many layers of order fit into left bytes with all their experts."""
    for n, il in enumerate(order):
        left -= need.n_expert * need.slot_bytes[il]
        if left < 0:
            return n
    return len(order)


def _spread(
    need: Footprint, layers: Sequence[int], left: int | None, cache_slots: int | None,
    demand: Demand | None,
) -> list[int]:  # fmt: skip
    """Return slots for each of layers: by demand if given, else spread evenly."""
    if not layers:
        return []
    if demand is not None and (left is not None or cache_slots is not None):
        return _by_demand(need, layers, left, cache_slots, demand)
    if cache_slots is not None:
        each, extra = divmod(min(cache_slots, need.n_expert * len(layers)), len(layers))
        return [each + (at < extra) for at in range(len(layers))]
    if left is None:
        return [0] * len(layers)
    sizes = [need.slot_bytes[il] for il in layers]
    each = min(left // max(sum(sizes), 1), need.n_expert)
    left -= each * sum(sizes)
    n_slots = []
    for size in sizes:
        more = each < need.n_expert and size <= left
        left -= size if more else 0
        n_slots.append(each + more)
    return n_slots


def _by_demand(
    need: Footprint, layers: Sequence[int], left: int | None, cache_slots: int | None,
    demand: Demand,
) -> list[int]:  # fmt: skip
    """Return slots for each of layers, given one by one to where a byte is hit most often.

    Every layer first gets n_expert_used slots. Experts that were never chosen are spread evenly.
    """

    def rank(at: int, n: int) -> tuple[bool, float, int, int]:
        il = layers[at]
        return n >= need.n_expert_used, -demand[il][n] / need.slot_bytes[il], n, at

    n_slots, n_left = [0] * len(layers), cache_slots
    queue = [rank(at, 0) for at in range(len(layers))]
    heapify(queue)
    while queue and n_left != 0:
        at = heappop(queue)[-1]
        size = need.slot_bytes[layers[at]]
        if left is not None and cache_slots is None:
            if size > left:
                continue
            left -= size
        n_left = None if n_left is None else n_left - 1
        n_slots[at] += 1
        if n_slots[at] < need.n_expert:
            heappush(queue, rank(at, n_slots[at]))
    return n_slots


def _plan(need: Footprint, n_slots: Sequence[int], budget: int | None, n_rings: int = 1) -> Plan:
    sizes = [n * size for n, size in zip(n_slots, need.slot_bytes)]
    pinned = tuple(il for il in need.routed if n_slots[il] == need.n_expert)
    dense = tuple(il for il, size in enumerate(need.slot_bytes) if not size)
    full_bytes = sum(sizes[il] for il in pinned)
    everything = len(pinned) == len(need.routed)
    by_purpose = {
        "weights": need.weights, "kv": need.kv, "state": need.state, "compute": need.compute,
        "other": need.other,
        "staging": 0 if everything else need.staging + n_rings * need.ring,
        "pinned": full_bytes, "slots": sum(sizes) - full_bytes,
    }  # fmt: skip
    if need.drafters:
        by_purpose["drafters"] = need.drafters
    share = sum(sizes) / need.experts if need.experts else 1.0
    host = need.experts - full_bytes
    groups = n_rings * need.ring_groups
    return Plan(tuple(n_slots), pinned, by_purpose, budget, everything, share, host, groups, dense)


def _too_small(need: Footprint, budget: int, source: str) -> OutOfDeviceMemory:
    parts = {
        "weights": need.weights,
        "KV cache": need.kv,
        "states": need.state,
        "compute": need.compute,
        "kernels, tables, encoder": need.other,
        "staging": need.staging + need.ring,
        "drafters": need.drafters,
    }
    needed = sum(parts.values())
    listed = ", ".join(f"{name} {format_bytes(n)}" for name, n in parts.items() if n)
    return OutOfDeviceMemory(
        f"the model without its experts needs {format_bytes(needed)} on the device ({listed}), but "
        f"{source} allows {format_bytes(budget)}; lower -c or -ub, use -ctk q8_0 -ctv q8_0, or "
        f"allow more memory"
    )
