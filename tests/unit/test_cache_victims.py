"""Graphs that fetch by themselves: what they may give up, and what the cache notes afterwards."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.interrupts import interrupted
from helpers.shared import empty, residents

from moegraph.errors import InternalError
from moegraph.experts.cache import ExpertCache
from moegraph.experts.policy import Adaptive, Lfu, Lru, Policy, Static

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


def test_a_landing_names_free_slots_first_and_then_the_lowest_scores() -> None:
    cache = new_cache([8])
    cache.layers[0].preload([7, 5, 3, 1, 9, 11])  # the last one is the worst
    assert cache.layers[0].plan_victims(N_USED) == [(6, -1), (7, -1), (5, 11), (4, 9)]
    run_step(cache, [11, 5])
    assert cache.layers[0].plan_victims(N_USED) == [(6, -1), (7, -1), (4, 9), (3, 1)]
    cache.begin_pass()
    fetch(cache, [0, 9, 2, 4])
    assert cache.tables[0, [0, 2, 4]].tolist() == [6, 7, 3], "9 is needed: its slot is not taken"
    assert cache.tables[0, 9] == 4 and cache.tables[0, 1] == -1
    assert cache.layers[0].plan_victims(N_USED) == [(2, 3), (0, 7), (1, 5), (5, 11)], (
        "by when they were chosen"
    )
    cache.check()


def test_a_landing_has_room_for_whatever_a_row_chooses() -> None:
    rng = np.random.default_rng(8)
    for n_slots in (N_USED, N_USED + 1, 9, N_EXPERT - 1):
        for policy in (Lru(), Lfu(half_life=5), Adaptive(1.0)):
            cache = new_cache([n_slots], policy)
            cache.layers[0].preload([3, 9, 11, 2])
            assert cache.layers[0].can_fetch
            for step in range(200):
                cache.begin_pass()
                if step % 9 == 0:  # a pass of several rows, after which the list is a new one
                    row = rng.permutation(N_EXPERT)[:6]
                    for expert in cache.layers[0].access_batch(row.astype(np.int32)):
                        cache.layers[0].admit(expert, row.tolist())
                    cache.begin_pass()
                cache.layers[0].plan_victims(N_USED)
                ids = rng.permutation(N_EXPERT)[:N_USED].tolist()
                fetch(cache, ids)
                assert (cache.tables[0, ids] >= 0).all()
                cache.check()


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
     (Lfu(), N_USED, True), (Lfu(), 1, False), (Static(), 12, False), (Adaptive(1.0), 12, True),
     (Adaptive(1.0), N_USED, True), (Adaptive(0.5), N_USED - 1, False)],
)  # fmt: skip
def test_a_layer_lands_only_where_a_whole_row_has_room(policy, n_slots: int, can: bool) -> None:
    cache = new_cache([n_slots], policy)
    assert cache.layers[0].can_fetch == can
    cache.layers[0].preload(list(range(N_EXPERT)))
    assert cache.layers[0].can_fetch == can, "what is static leaves a row its room"
    if can:
        assert len(cache.layers[0].plan_victims(N_USED)) == N_USED
        n_static = cache.layers[0].policy.n_static
        assert all(slot >= n_static for slot, _ in cache.layers[0].plan_victims(N_USED))


def test_slots_that_never_change_are_not_landed_in() -> None:
    cache = new_cache([10], Adaptive(static_share=0.5))
    cache.layers[0].preload([0, 1, 2, 3, 4, 5, 6])
    empty(cache, 0, 1, 6)  # one static slot is free now, and one that is not
    assert sorted(cache.layers[0].plan_victims(N_USED)) == [(6, -1), (7, -1), (8, -1), (9, -1)]
    for base in (8, 12, 8, 12):
        cache.begin_pass()
        cache.layers[0].plan_victims(N_USED)
        ids = [base, base + 1, base + 2, base + 3]
        fetch(cache, ids)
    assert residents(cache.layers[0])[:4] == [0, 2, 3, 4] and cache.tables[0, 1] == -1


def test_loading_slots_are_not_landed_in() -> None:
    cache = new_cache([7])
    cache.layers[0].preload([0, 1, 2, 3, 4, 5])
    cache.begin_pass()
    cache.layers[0].access([8, 9])
    assert [cache.layers[0].reserve_slot(expert, [8, 9]) for expert in (8, 9)] == [6, 5]
    assert [slot for slot, _ in cache.layers[0].plan_victims(N_USED)] == [4, 3, 2, 1]


def test_whatever_changes_a_landing_makes_its_layer_dirty() -> None:
    cache = new_cache([12, 6])
    cache.layers[0].preload(list(range(12)))

    def is_due(ids: list[int]) -> bool:
        cache.layers[0].plan_victims(N_USED)
        cache.dirty.clear()
        cache.begin_pass()
        fetch(cache, ids)
        assert cache.dirty <= {0}
        return 0 in cache.dirty

    assert not is_due([0, 1, 2, 3]), "all hit, and none was at risk"
    assert is_due([0, 1, 8, 3]), "one was at risk, and others are worse now"
    assert not is_due([0, 1, 8, 3])
    assert is_due([0, 1, 15, 3]), "one is taken"
    cache.layers[0].access([14])
    cache.layers[0].reserve_slot(14, [14])
    cache.dirty.clear()
    cache.rollback()
    assert cache.dirty == {0, 1}
    cache.dirty.clear()
    (slot, _), *_ = cache.layers[0].plan_victims(N_USED)
    assert cache.layers[0].reserve_slot(14, [14]) == slot
    assert cache.dirty == {0}, "the free slot is taken, so no graph may fetch into it"


def test_choices_of_passes_that_do_not_land_make_a_landing_due_too() -> None:
    """Passes of a few rows, and single ones while the cache is bypassed, only look."""
    cache = new_cache([8, 8])
    cache.layers[0].preload(list(range(8)))
    assert cache.layers[0].plan_victims(N_USED) == [(7, 7), (6, 6), (5, 5), (4, 4)]
    cache.dirty.clear()
    cache.layers[0].access([0, 1, 2, 3])
    assert not cache.dirty, "none was at risk"
    cache.layers[0].access([7, 6, 0, 1])
    assert cache.dirty == {0}
    assert cache.layers[0].plan_victims(N_USED)[:2] == [(5, 5), (4, 4)]
    cache.layers[1].preload()
    cache.dirty.clear()
    cache.layers[1].access([7, 6, 5, 4])
    assert not cache.dirty, "no graph fetches into this layer"


def test_what_landed_against_the_rules_is_an_internal_error() -> None:
    cache = new_cache([5])
    cache.layers[0].preload()
    cache.begin_pass()
    cache.layers[0].plan_victims(N_USED)
    ids = [8, 9, 10, 11]
    missing = cache.layers[0].access(ids)
    with pytest.raises(InternalError, match="layer 0: a fetch was recorded that no graph"):
        cache.layers[0].commit_fetched(missing, ids)
    cache.begin_fetch([0], N_USED)
    with pytest.raises(InternalError, match="5 experts for 4 slots"):
        cache.layers[0].commit_fetched([*missing, 12], ids)
    assert residents(cache.layers[0]) == [0, 1, 2, 3, 4]
    cache.layers[0].plan_victims(N_USED)
    cache.layers[0].owner[4] = -1
    with pytest.raises(InternalError, match="slot 4 no longer holds expert 4"):
        cache.layers[0].commit_fetched(missing, ids)
    cache.begin_fetch([0], N_USED)
    cache.rollback()
    cache.check()


def test_a_lost_landing_costs_the_experts_in_it_and_no_others() -> None:
    cache = new_cache([8])
    cache.layers[0].preload([7, 5, 3, 1, 9, 11, 13])
    assert cache.layers[0].plan_victims(N_USED) == [(7, -1), (6, 13), (5, 11), (4, 9)]
    cache.dirty.clear()
    cache.rollback()
    assert sorted(residents(cache.layers[0])) == [1, 3, 5, 7, 9, 11, 13], "no graph was in flight"
    assert cache.layers[0].plan_victims(N_USED) == [(7, -1), (6, 13), (5, 11), (4, 9)]
    cache.begin_fetch([0], N_USED)
    cache.rollback()
    assert sorted(residents(cache.layers[0])) == [1, 3, 5, 7] and cache.dirty == {0}
    cache.check()
    cache.layers[0].plan_victims(N_USED)
    cache.rollback()
    assert sorted(residents(cache.layers[0])) == [1, 3, 5, 7], "once is enough"
    assert sorted(cache.layers[0].plan_victims(N_USED)) == [(4, -1), (5, -1), (6, -1), (7, -1)]


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
            assert line > 20 and not cache.in_flight
            break
        was_noted = not cache.in_flight  # only the last line but one says so
        cache.rollback()
        cache.check()
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
        cache.check()
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
        cache.check()
        assert sorted(residents(cache.layers[0])) == [1, 3, 5, 7]
        assert sorted(residents(cache.layers[1])) == [1, 2, 3] and cache.dirty == {0, 1}
        if not was_interrupted:
            assert line > 40
            break
    else:
        raise AssertionError("it did not come to an end")
