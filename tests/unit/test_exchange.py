"""What a prompt changes in the slots: what it keeps, what is exchanged, and what that is worth."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from helpers.cache_rules import check_layer

from moegraph.experts.cache import ExpertCache
from moegraph.experts.cost import MissSplit, MissWays
from moegraph.experts.policy import Lfu
from moegraph.experts.residency import Residency
from moegraph.kinds import MAX_FETCH_ROWS, Kind

N_EXPERT, N_USED = 16, 4


def residency_of(n_slots: list[int], fetchable: Collection[int], **more: Any) -> Residency:
    """Return a residency whose slots hold the experts of the lowest ids."""
    cache = ExpertCache(N_EXPERT, n_slots, Lfu(hysteresis=1.0), N_USED)
    for layer in cache.layers:
        layer.preload()
    ways = MissWays(MissSplit.fixed(N_USED, False), False, MAX_FETCH_ROWS)
    return Residency(cache, ways, fetchable=fetchable, **more)


def read(residency: Residency, *experts: int) -> None:
    """Compute a prompt whose rows all choose these experts."""
    residency.begin_pass(Kind.PREFILL, 40)
    for il in range(len(residency.cache.layers)):
        residency.routed(il, np.array(experts * 40, np.int32))
    residency.end_pass()


def test_layers_that_fetch_keep_what_they_hold_and_fetch_it_when_it_is_chosen() -> None:
    residency = residency_of([6, 6], fetchable=[1])
    read(residency, 9, 8, 7, 1)
    plan = residency.begin_pass(Kind.DECODE, 1)
    assert [(il, {e for e, _ in pairs}) for il, pairs in plan.exchanged] == [(0, {7, 8, 9})]
    layer = residency.cache.layers[1]
    assert layer.resident == set(range(6))
    rows = {il: victims for il, _, victims in plan.rows}
    assert {e for _, e in rows[1] or []} == {2, 3, 4, 5}, "of lowest score; the prompt chose 1"
    residency.begin_fetch(plan.mode.fetch_layers)
    assert residency.fetched(1, np.array([9, 8, 7, 1], np.int32)).experts == [9, 8, 7]
    assert layer.resident == {9, 8, 7, 1, 0, 2}
    residency.end_pass()
    assert residency.begin_pass(Kind.DECODE, 1).exchanged == []


def test_what_a_prompt_has_on_the_device_gets_slots_if_the_policy_prefers_it() -> None:
    residency = residency_of([6, 6, N_EXPERT], fetchable=[1])
    residency.begin_pass(Kind.PREFILL, 40)
    for il in (0, 1, 2):
        residency.routed(il, np.array([9, 8, 7, 1] * 40, np.int32))
    slots = [residency.preferred(il) for il in (0, 1, 2)]
    assert [set(found) for found in slots] == [{7, 8, 9}, {7, 8, 9}, set()]
    residency.keep(0, [(7, slots[0][7]), (9, slots[0][9])])
    layer = residency.cache.layers[0]
    assert layer.resident >= {7, 9, 1} and set(residency.preferred(0)) == {8}
    residency.end_pass()
    plan = residency.begin_pass(Kind.DECODE, 1)
    assert [(il, [e for e, _ in pairs]) for il, pairs in plan.exchanged] == [(0, [8])]


def test_a_prompt_that_fails_leaves_empty_slots_where_it_kept_experts() -> None:
    residency = residency_of([6], fetchable=[0])
    residency.begin_pass(Kind.PREFILL, 40)
    residency.routed(0, np.array([9, 8, 7, 1] * 40, np.int32))
    pairs = list(residency.preferred(0).items())[:2]
    slots = [slot for _, slot in pairs]
    residency.keep(0, pairs)
    residency.rollback()
    layer = residency.cache.layers[0]
    assert [layer.owner[slot] for slot in slots] == [-1, -1] and len(layer.resident) == 4
    check_layer(layer)
