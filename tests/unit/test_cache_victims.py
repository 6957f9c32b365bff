"""Graphs that fetch by themselves: what they may give up, and what the cache notes afterwards."""

from __future__ import annotations

import pytest
from helpers.cache_rules import check_cache
from helpers.interrupts import interrupted
from helpers.shared import residents

from moegraph.experts.cache import ExpertCache
from moegraph.experts.policy import Lfu, Lru, Policy

N_EXPERT, N_USED = 16, 4
EXPERTS = "moegraph/experts"


def new_cache(n_slots: list[int], policy: Policy | None = None) -> ExpertCache:
    return ExpertCache(N_EXPERT, n_slots, policy or Lru(), N_USED)


def run_step(cache: ExpertCache, ids: list[int]) -> None:
    """Choose ids in a step of its own and admit what is missing."""
    cache.begin_pass()
    for expert in cache.layers[0].access(ids):
        cache.layers[0].admit(expert, ids)


def fetch(cache: ExpertCache, ids: list[int]) -> None:
    """Have the graph of layer 0 fetch what a row misses."""
    cache.begin_fetch([0], N_USED)
    cache.layers[0].commit_fetched(cache.layers[0].access(ids), ids)


def test_landing_takes_whatever_is_missing_even_against_hysteresis() -> None:
    cache = new_cache([5], Lfu(half_life=1000, hysteresis=100.0))
    cache.layers[0].preload([0, 1, 2, 3, 4])
    for _ in range(50):
        run_step(cache, [0, 1, 2, 3])
    cache.begin_pass()
    cache.layers[0].plan_victims(N_USED)
    before = cache.stats
    fetch(cache, [9, 8, 0, 1])
    assert set(residents(cache.layers[0])) == {0, 1, 2, 8, 9}
    since = cache.stats.since(before)
    assert (since.admitted[0], since.evicted[0], since.missing[0]) == (2, 2, 2)


@pytest.mark.parametrize(
    ("policy", "n_slots", "can"),
    [(Lru(), N_USED, True), (Lru(), N_USED - 1, False), (Lru(), 0, False), (Lru(), N_EXPERT, False),
     (Lfu(), N_USED, True), (Lfu(), 1, False)],
)  # fmt: skip
def test_a_layer_lands_only_where_a_whole_row_has_room(policy, n_slots: int, can: bool) -> None:
    cache = new_cache([n_slots], policy)
    assert cache.layers[0].can_fetch == can
    cache.layers[0].preload(list(range(N_EXPERT)))
    if can:
        assert len(cache.layers[0].plan_victims(N_USED)) == N_USED


def test_a_landing_is_lost_wherever_noting_it_was_interrupted() -> None:
    """Ctrl-C may come between any two lines."""
    for line in range(200):
        cache = new_cache([6, 6])
        cache.layers[0].preload([7, 5, 3, 1, 11])
        cache.layers[0].plan_victims(N_USED)
        cache.begin_pass()
        cache.begin_fetch([0], N_USED)
        ids = [8, 11, 9, 10]
        missing = cache.layers[0].access(ids)
        if not interrupted(line, lambda: cache.layers[0].commit_fetched(missing, ids), EXPERTS):
            assert line > 20 and not cache._journal.in_flight
            break
        was_noted = not cache._journal.in_flight  # only the last line but one says so
        cache.rollback()
        check_cache(cache)
        if was_noted:
            assert set(residents(cache.layers[0])) == {7, *ids, 5}
            continue
        assert residents(cache.layers[0]) == [7, 5]
        assert len(cache.layers[0].plan_victims(N_USED)) == N_USED
    else:
        raise AssertionError("it did not come to an end")


@pytest.mark.parametrize("step", ["admit", "reserve", "publish", "take"])
def test_an_exchange_is_undone_wherever_it_was_interrupted(step: str) -> None:
    for line in range(200):
        cache = new_cache([4])
        cache.layers[0].preload([7, 5, 3, 1])
        cache.begin_pass()
        cache.layers[0].access([8, 9])
        cache.layers[0].reserve_slot(9, [8, 9])
        cache.begin_pass()
        call = {
            "admit": lambda: cache.layers[0].admit(8, [8, 9]),
            "reserve": lambda: cache.layers[0].reserve_slot(8, []),
            "publish": lambda: cache.layers[0].mark_resident(9),
            "take": lambda: cache.layers[0].take(8, int(cache.tables[0, 3])),
        }[step]
        if not interrupted(line, call, EXPERTS):
            assert line > 3
            break
        cache.rollback()
        check_cache(cache)
        # published, its bytes are there: it may keep its slot
        assert set(residents(cache.layers[0])) <= ({7, 5, 3, 9} if step == "publish" else {7, 5, 3})
    else:
        raise AssertionError("it did not come to an end")


def test_a_rollback_that_was_interrupted_is_done_again() -> None:
    for line in range(400):
        cache = new_cache([8, 5])
        cache.layers[0].preload([7, 5, 3, 1, 9, 11, 13])
        cache.layers[1].preload([1, 2, 3, 4, 5])
        cache.layers[0].plan_victims(N_USED)
        cache.begin_pass()
        cache.begin_fetch([0], N_USED)
        cache.layers[1].access([8, 9])
        cache.layers[1].admit(8, [8, 9])
        cache.layers[1].reserve_slot(9, [8, 9])
        was_interrupted = interrupted(line, cache.rollback, EXPERTS)
        cache.rollback()
        check_cache(cache)
        assert sorted(residents(cache.layers[0])) == [1, 3, 5, 7]
        assert sorted(residents(cache.layers[1])) == [1, 2, 3] and cache.dirty == {0, 1}
        if not was_interrupted:
            assert line > 40
            break
    else:
        raise AssertionError("it did not come to an end")
