"""How long lists of victims are, and when another one is due."""

from __future__ import annotations

import numpy as np

from moegraph.experts.cache import ExpertCache
from moegraph.experts.cost import MissSplit, MissWays
from moegraph.experts.passplan import PassPlan
from moegraph.experts.policy import Lru
from moegraph.experts.residency import Residency
from moegraph.kinds import MAX_FETCH_ROWS, Kind

N_EXPERT, N_USED = 16, 4


def fetching(n_slots: list[int]) -> Residency:
    """Return a residency whose graphs fetch; the slots hold the experts of the lowest ids."""
    cache = ExpertCache(N_EXPERT, n_slots, Lru(), N_USED)
    for layer in cache.layers:
        layer.preload()
    ways = MissWays(MissSplit.fixed(N_USED, False), False, MAX_FETCH_ROWS)
    return Residency(cache, ways, fetchable=range(len(n_slots)))


def test_lists_stay_long_while_passes_of_many_and_of_few_rows_take_turns() -> None:
    residency = fetching([14, 14])

    def n_planned(n_tokens: int) -> int:
        plan = residency.begin_pass(Kind.DECODE, n_tokens)
        residency.begin_fetch(plan.mode.fetch_layers)
        for il, layer in enumerate(residency.cache.layers):
            first = [expert for _, expert in layer.victims[: 2 * N_USED]]
            chosen = [e for e in range(14) if e not in first][:N_USED]
            if il == 0:
                chosen[0] = first[0]  # so that another list is due
            residency.fetched(il, np.array(chosen * n_tokens, np.int32))
        residency.end_pass(1e-3)
        return len(plan.rows)

    assert n_planned(1) == 2
    assert n_planned(3) == 2, "longer lists"
    assert [n_planned(n) for n in (1, 3, 1, 1, 3)] == [0] * 5
    assert [n_planned(1) for _ in range(20)] == [0] * 20
    lengths = [len(layer.victims) for layer in residency.cache.layers]
    assert lengths == [N_USED, 3 * N_USED], "where another list was due, it is a short one"
    assert n_planned(3) == 1


def test_passes_between_the_steps_of_a_prompt_exchange_nothing_and_keep_their_lists() -> None:
    residency = fetching([6, 6, 6])

    def decode() -> PassPlan:
        plan = residency.begin_pass(Kind.DECODE, 2, n_seqs=2)
        residency.begin_fetch(plan.mode.fetch_layers)
        for il in plan.mode.fetch_layers:
            residency.fetched(il, np.array([5, 4, 5, 4] * 2, np.int32))
        residency.end_pass(1e-3)
        return plan

    assert [il for il, *_ in decode().rows] == [0, 1, 2]
    for il in range(3):
        residency.begin_pass(Kind.PREFILL, 40)
        residency.routed(il, np.array([9, 8, 7, 1] * 40, np.int32))
        plan = decode()
        assert plan.exchanged == [] and [row[0] for row in plan.rows] == [il]
        assert plan.rows[0][2], "victims, by what the prompt chose too"
        residency.begin_pass(Kind.PREFILL, 40)
        assert decode().rows == [], "no list is due while nothing has changed"
    residency.begin_pass(Kind.PREFILL, 40)
    residency.end_pass(0.0)
    assert decode().exchanged == [], "other sequences decode, which choose other experts"
    assert residency.begin_pass(Kind.DECODE, 1).exchanged == [], "too late"
