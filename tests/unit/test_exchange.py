"""What a prompt changes in the slots: what it keeps, what is exchanged, and what that is worth."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from moegraph.experts.cache import ExpertCache
from moegraph.experts.cost import MissSplit, MissWays
from moegraph.experts.policy import Lfu, parse_policy
from moegraph.experts.residency import Residency
from moegraph.kinds import MAX_FETCH_ROWS, Kind
from moegraph.placement.generator import generate_trace
from moegraph.placement.identity import RouterShape

N_EXPERT, N_USED = 16, 4
Ids = npt.NDArray[np.int32]


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
    residency.end_pass(0.0)


def test_layers_that_fetch_keep_what_they_hold_and_fetch_it_when_it_is_chosen() -> None:
    residency = residency_of([6, 6], fetchable=[1])
    read(residency, 9, 8, 7, 1)
    plan = residency.begin_pass(Kind.DECODE, 1)
    assert [(il, {e for e, _ in pairs}) for il, pairs in plan.exchanged] == [(0, {7, 8, 9})]
    layer = residency.cache.layers[1]
    assert layer.resident == set(range(6)) and residency.n_exchanged == 3
    rows = {il: victims for il, _, victims in plan.rows}
    assert {e for _, e in rows[1] or []} == {2, 3, 4, 5}, "of lowest score; the prompt chose 1"
    residency.begin_fetch(plan.mode.fetch_layers)
    assert residency.fetched(1, np.array([9, 8, 7, 1], np.int32)).experts == [9, 8, 7]
    assert layer.resident == {9, 8, 7, 1, 0, 2}
    residency.end_pass(1e-3)
    assert residency.begin_pass(Kind.DECODE, 1).exchanged == []


@pytest.mark.parametrize(
    ("kind", "n_tokens", "exchanging"),
    [(Kind.VERIFY, 4, []), (Kind.PREFILL, 20, []), (Kind.VERIFY, 40, [0, 1])],
)
def test_passes_that_do_not_fetch_exchange(
    kind: Kind, n_tokens: int, exchanging: list[int]
) -> None:
    residency = residency_of([6, 6], fetchable=[0, 1])
    read(residency, 9, 8, 7, 1)
    plan = residency.begin_pass(kind, n_tokens)
    assert [il for il, _ in plan.exchanged] == exchanging
    assert plan.mode.fetch_layers == {0, 1} - set(exchanging)


def test_layers_that_fetch_exchange_once_the_cache_is_no_longer_bypassed() -> None:
    residency = residency_of([6], fetchable=[0], move_s=1e-3)
    guard = residency.guard
    assert guard
    guard._settle(True, "")
    for _ in range(30):
        residency.begin_pass(Kind.DECODE, 1)
        residency.routed(0, np.array([9, 8, 7, 1], np.int32))
        residency.end_pass(1e-3)
    guard._settle(False, "")
    plan = residency.begin_pass(Kind.DECODE, 1)
    assert plan.mode.fetch_layers == {0}
    assert {e for e, _ in plan.exchanged[0][1]} == {7, 8, 9}
    residency.end_pass(1e-3)
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
    residency.end_pass(0.0)
    plan = residency.begin_pass(Kind.DECODE, 1)
    assert [(il, [e for e, _ in pairs]) for il, pairs in plan.exchanged] == [(0, [8])]
    assert residency.n_kept == 2 and residency.n_exchanged == 1


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
    layer.check()


def test_nothing_is_kept_while_the_cache_is_bypassed() -> None:
    residency = residency_of([6], fetchable=[0], move_s=1e-3)
    assert residency.guard
    residency.guard._settle(True, "")
    read(residency, 9, 8, 7, 1)
    assert residency.preferred(0) == {}


SHAPE = RouterShape(6, 128, 8)


class Texts:
    """Texts of one imaginary model, read and continued in turn; layers fetch."""

    def __init__(self, policy: str, exchanges: bool) -> None:
        cache = ExpertCache(128, [76] * 6, parse_policy(policy), 8)
        for layer in cache.layers:
            layer.preload()
        ways = MissWays(MissSplit.fixed(8, False), False, MAX_FETCH_ROWS)
        self.residency = Residency(cache, ways, fetchable=range(6))
        self._exchanges = exchanges

    def read(self, ids: Ids) -> int:
        """Compute a prompt, ids [n, n_layer, n_used]; return how many experts are exchanged."""
        residency = self.residency
        residency.begin_pass(Kind.PREFILL, len(ids))
        for il in range(6):
            residency.routed(il, ids[:, il].reshape(-1))
        residency.end_pass(0.0)
        pairs = residency._exchange(frozenset()) if self._exchanges else []
        return sum(len(found) for _, found in pairs)

    def decode(self, ids: Ids) -> list[int]:
        """Decode tokens; return how many experts each fetched."""
        residency, found = self.residency, []
        for row in ids:
            residency.begin_fetch(residency.begin_pass(Kind.DECODE, 1).mode.fetch_layers)
            found.append(sum(len(residency.fetched(il, row[il]).experts) for il in range(6)))
            residency.end_pass(1e-3)
        return found

    def residents(self) -> list[set[int]]:
        return [set(layer.resident) for layer in self.residency.cache.layers]


def text(seed: int, n: int) -> Ids:
    return generate_trace(SHAPE, n, prompt=seed).ids.astype(np.int32)


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("n_prompt", [64, 512])
def test_kept_experts_save_fetches_and_an_exchange_costs_more_than_it_saves(
    policy: str, n_prompt: int
) -> None:
    """What crosses the link after a prompt: kept experts did so before."""
    found = {}
    for name in ("exchanged", "fetched", "kept"):
        texts = Texts(policy, exchanges=name != "fetched")
        for seed in (1, 2):
            ids = text(seed, n_prompt + 384)
            n_moved = texts.read(ids[:n_prompt])
            tokens = texts.decode(ids[n_prompt:])
        found[name] = np.cumsum(tokens) + (n_moved if name == "exchanged" else 0)
    exchanged, fetched, kept = (found[name] for name in ("exchanged", "fetched", "kept"))
    assert fetched[7] < 0.75 * exchanged[7] and fetched[31] < 0.9 * exchanged[31]
    assert fetched[-1] < 1.02 * exchanged[-1]
    assert kept[7] < 0.75 * fetched[7] and kept[127] < 0.9 * fetched[127]


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_a_follow_up_leaves_the_slots_as_they_are(policy: str) -> None:
    ids = text(1, 512 + 200 + 64 + 64)
    sent = []
    for exchanges in (True, False):
        texts = Texts(policy, exchanges)
        texts.read(ids[:512])
        texts.decode(ids[512:712])
        held = texts.residents()
        n_first = texts.read(ids[712:776])
        assert (texts.residents() == held) != exchanges
        sent.append(n_first + sum(texts.decode(ids[776:])))
    assert sent[1] < sent[0]
