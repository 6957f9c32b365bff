"""How long lists of victims are, and when another one is due."""

from __future__ import annotations

import numpy as np

from moegraph.experts.cache import ExpertCache
from moegraph.experts.cost import MissSplit, MissWays
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
