"""The expert cache under all policies: rules for victims, tables, loading, statistics."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.shared import empty, residents

from moegraph.errors import ConfigError, InternalError
from moegraph.experts.cache import ExpertCache
from moegraph.experts.policy import (
    POLICIES,
    Adaptive,
    Lfu,
    Lru,
    Policy,
    Static,
    few_slots_warning,
    parse_policy,
)
from moegraph.experts.residency import preferred

N_EXPERT, N_USED = 16, 4


def new_cache(n_slots: list[int], policy: Policy | None = None) -> ExpertCache:
    return ExpertCache(N_EXPERT, n_slots, policy or Lru(), N_USED)


def run_step(cache: ExpertCache, ids: list[int], il: int = 0) -> list[int | None]:
    """Choose ids in a step of its own and admit what is missing."""
    cache.begin_pass()
    return [cache.layers[il].admit(expert, ids) for expert in cache.layers[il].access(ids)]


def test_a_missing_expert_is_returned_once_and_in_routing_order() -> None:
    cache = new_cache([8])
    cache.begin_pass()
    assert cache.layers[0].access([9, 3, 9, 12, 3]) == [9, 3, 12]
    assert [cache.layers[0].admit(e, [9, 3, 12]) for e in (9, 3, 12)] == [0, 1, 2]
    assert cache.layers[0].access([12, 3, 9]) == []
    assert cache.tables[0, [9, 3, 12]].tolist() == [0, 1, 2]
    assert (cache.tables[0] >= 0).sum() == 3


def test_stats_count_choices_and_distinct_missing_apart() -> None:
    cache = new_cache([8, 8])
    run_step(cache, [1, 2, 1, 2])
    before = cache.stats
    run_step(cache, [1, 2, 3, 3])
    assert before.misses.tolist() == [4, 0] and before.missing.tolist() == [2, 0]
    later = cache.stats.since(before)
    assert (later.n_steps, later.hits[0], later.misses[0], later.missing[0]) == (1, 2, 2, 1)
    assert cache.stats.hit_rate == pytest.approx(2 / 8)
    assert cache.stats.hit_rates == [0.25, 1.0]
    assert cache.stats.missing_per_step == pytest.approx(1.5)


def test_pinned_layer_is_the_identity_and_never_misses_or_changes() -> None:
    cache = new_cache([N_EXPERT, 0])
    assert cache.tables[0].tolist() == list(range(N_EXPERT))
    assert run_step(cache, [15, 0, 7, 3]) == []
    assert cache.layers[0].preload([5]) == []
    with pytest.raises(InternalError, match="resident already"):
        cache.layers[0].admit(5, [])
    cache.rollback()
    assert cache.tables[0].tolist() == list(range(N_EXPERT))


def test_a_layer_without_slots_admits_nothing() -> None:
    cache = new_cache([0])
    assert run_step(cache, [1, 2, 3, 4]) == [None] * 4
    assert cache.stats.declined.tolist() == [4]
    cache.check()


@pytest.mark.parametrize("name", POLICIES)
def test_everything_in_the_working_set_means_nothing_to_evict(name: str) -> None:
    cache = new_cache([5], parse_policy(name))
    cache.layers[0].preload([0, 1, 2, 3, 4])
    cache.begin_pass()
    ids = [0, 1, 2, 3, 4, 5, 5, 5]
    assert cache.layers[0].access(ids) == [5]
    assert cache.layers[0].admit(5, ids) is None
    assert set(residents(cache.layers[0])) == {0, 1, 2, 3, 4}
    if name == "lru":
        assert cache.layers[0].admit(5, ids[1:]) == 0, "what is no longer protected can go"


# The short half-life has scores scaled back twice.
@pytest.mark.parametrize(
    "policy", [Lru(), Lfu(half_life=5, hysteresis=1.0), Lfu(1.0, 1.0), Adaptive(0.3)]
)
def test_every_victim_has_the_lowest_score_of_all_that_may_go(policy: Policy) -> None:
    rng = np.random.default_rng(1)
    cache = new_cache([9], policy)
    cache.layers[0].preload([15, 14, 13, 12])
    layer = cache.layers[0]
    loading, n_evicted = [], 0
    for step in range(900):
        cache.begin_pass()
        if step % 7 == 0:
            cache.rollback()  # what was loading did not arrive
        else:
            for expert in loading:
                cache.layers[0].mark_resident(expert)
        loading.clear()
        if step % 11 == 0:
            cache.layers[0].preload([step % 16, (step + 5) % 16])
        ids = [int(x) for x in np.minimum(rng.geometric(0.15, N_USED) - 1, 15)]
        for expert in cache.layers[0].access(ids):
            free = any(slot >= layer.policy.n_static for slot in layer.free)
            before = dict(enumerate(layer.owner))
            score = list(layer.policy.score)
            may = [score[e] for slot, e in before.items() if slot >= layer.policy.n_static
                   and e in layer.resident and e not in ids and e not in layer.fresh]  # fmt: skip
            slot = (layer.reserve_slot if step % 3 == 0 else layer.admit)(expert, ids)
            if step % 3 == 0 and slot is not None:
                loading.append(expert)
            if slot is not None and not free:
                n_evicted += 1
                assert score[before[slot]] == min(may)
        cache.check()
    assert n_evicted == cache.stats.evicted[0] > 30


def test_an_expert_admitted_in_this_step_is_safe_even_outside_the_working_set() -> None:
    cache = new_cache([4], Lru())
    cache.begin_pass()
    cache.layers[0].access([1, 2, 3, 4, 5])
    assert [cache.layers[0].admit(expert, ()) for expert in (1, 2, 3, 4, 5)] == [0, 1, 2, 3, None]
    cache.begin_pass()
    cache.layers[0].access([5])
    assert cache.layers[0].admit(5, ()) is not None


def test_lru_gives_up_what_was_chosen_longest_ago() -> None:
    cache = new_cache([6])
    run_step(cache, [0, 1, 2, 3])
    run_step(cache, [4, 5, 0, 1])
    run_step(cache, [6, 0, 4, 5])
    assert set(residents(cache.layers[0])) in ({0, 1, 3, 4, 5, 6}, {0, 1, 2, 4, 5, 6})
    run_step(cache, [7, 8, 0, 6])
    assert 1 not in residents(cache.layers[0]) or cache.stats.evicted[0] == 3
    assert {0, 4, 5, 6, 7, 8} == set(residents(cache.layers[0]))


def test_lfu_keeps_the_frequent_through_a_single_newcomer() -> None:
    cache = new_cache([4], Lfu(half_life=100, hysteresis=1.5))
    for _ in range(10):
        run_step(cache, [0, 1, 2, 3])
    assert run_step(cache, [0, 1, 2, 9]) == [None]
    for _ in range(40):
        run_step(cache, [0, 1, 2, 9])
    assert set(residents(cache.layers[0])) == {0, 1, 2, 9}


def test_lfu_forgets_by_its_half_life() -> None:
    """30 choices long ago weigh less than 3 now when ten half-lives lie between."""
    cache = new_cache([1], Lfu(half_life=4, hysteresis=1.0))
    for _ in range(30):
        run_step(cache, [0])
    for step in range(40):
        cache.begin_pass()
        cache.layers[0].access([5 + step % 8])
    assert run_step(cache, [1]) == [0]


def test_lfu_scores_survive_any_number_of_steps() -> None:
    cache = new_cache([2], Lfu(half_life=1.0))
    for step in range(3000):
        run_step(cache, [step % 2])
    for _ in range(50):
        cache.layers[0].access_batch(np.full((4096, 1), 3, dtype=np.int32))
    run_step(cache, [5])
    score = cache.layers[0].policy.score
    assert np.isfinite(score).all() and score[3] > score[5] > score[1] > 0


def test_hysteresis_stops_two_experts_from_alternating() -> None:
    def evictions(hysteresis: float) -> int:
        cache = new_cache([1], Lfu(half_life=64, hysteresis=hysteresis))
        for step in range(100):
            run_step(cache, [step % 2])
        return int(cache.stats.evicted[0])

    assert evictions(1.0) > 20
    assert evictions(1.25) < 5


def test_static_never_admits() -> None:
    cache = new_cache([6], Static())
    assert run_step(cache, [1, 2]) == [None, None]
    assert cache.layers[0].preload([9, 8]) == [(9, 0), (8, 1)]
    assert run_step(cache, [9, 1, 8]) == [None]
    assert residents(cache.layers[0]) == [9, 8]


def test_adaptive_keeps_the_best_of_the_profile_and_exchanges_the_rest() -> None:
    cache = new_cache([8], Adaptive(static_share=0.5))
    cache.layers[0].preload(list(range(8)))
    for base in (8, 12, 8, 12):
        run_step(cache, [base, base + 1, base + 2, base + 3])
    assert set(residents(cache.layers[0])) == {0, 1, 2, 3, 12, 13, 14, 15}
    assert residents(cache.layers[0])[:4] == [0, 1, 2, 3]


def test_adaptive_without_a_profile_is_lru() -> None:
    cache = new_cache([8], Adaptive(static_share=0.5))
    cache.layers[0].preload()
    for base in (8, 12):
        run_step(cache, [base, base + 1, base + 2, base + 3])
    assert set(residents(cache.layers[0])) == set(range(8, 16))


def test_preload_takes_the_lowest_ids_or_a_ranking() -> None:
    cache = new_cache([3, 3, 3])
    assert cache.layers[0].preload() == [(0, 0), (1, 1), (2, 2)]
    assert cache.layers[1].preload([7, 7, 5, 3, 1]) == [(7, 0), (5, 1), (3, 2)]
    assert cache.layers[1].preload([2]) == []
    with pytest.raises(InternalError, match="no expert 16"):
        cache.layers[2].preload([16])


def test_preload_fills_the_lowest_free_slots_first() -> None:
    """The leading slots may be static: the best belong there."""
    cache = new_cache([4])
    cache.layers[0].preload([3, 4, 5, 6])
    empty(cache, 0, 3, 5)
    assert cache.layers[0].preload([9, 8]) == [(9, 0), (8, 2)]


def test_the_worst_of_a_ranking_goes_first() -> None:
    for policy in (Lru(), Lfu(hysteresis=1.0)):
        cache = new_cache([4], policy)
        cache.layers[0].preload([7, 5, 3, 1])
        run_step(cache, [9, 7])
        assert residents(cache.layers[0])[-2:] == [5, 3], policy
        assert 1 not in residents(cache.layers[0])


def test_shares_of_a_profile_defend_a_frequent_expert_under_lfu() -> None:
    shares = [0.0] * N_EXPERT
    shares[3], shares[1] = 0.9, 0.2
    cache = new_cache([2], Lfu(half_life=64))
    cache.layers[0].preload([3, 1], shares)
    assert run_step(cache, [9]) == [None]
    for _ in range(3):
        run_step(cache, [9])
    assert residents(cache.layers[0]) == [3, 9]


def test_reserved_slot_is_not_resident_until_published_and_nobody_takes_it() -> None:
    cache = new_cache([1])
    cache.layers[0].preload([4])
    cache.dirty.clear()
    cache.begin_pass()
    assert cache.layers[0].access([9]) == [9]
    assert cache.layers[0].reserve_slot(9, [9]) == 0
    assert cache.tables[0].tolist() == [-1] * N_EXPERT, "the victim left at once"
    assert cache.dirty == {0}
    cache.begin_pass()
    assert cache.layers[0].access([9, 2]) == [9, 2]
    assert cache.layers[0].reserve_slot(9, []) is None
    assert cache.layers[0].reserve_slot(2, []) is None
    cache.layers[0].mark_resident(9)
    assert cache.tables[0, 9] == 0 and cache.layers[0].access([9]) == []
    with pytest.raises(InternalError, match="not loading"):
        cache.layers[0].mark_resident(9)


def test_slots_given_away_in_a_step_that_failed_are_free_again() -> None:
    cache = new_cache([2])
    cache.layers[0].preload([5])
    cache.begin_pass()
    cache.layers[0].access([9, 3])
    cache.layers[0].reserve_slot(9, [9])
    cache.rollback()
    cache.check()
    assert cache.tables[0, 5] == 0 and cache.layers[0].admit(3, [3]) == 1
    cache.rollback()
    cache.check()
    assert residents(cache.layers[0]) == [5]
    assert cache.layers[0].admit(3, [3]) == 1
    cache.begin_pass()
    cache.rollback()
    assert set(residents(cache.layers[0])) == {3, 5}, "the step before had ended well"
    cache.check()


@pytest.mark.parametrize("policy", [Lru(), Adaptive()])
def test_fewer_slots_than_a_token_chooses_still_hit(policy: Policy) -> None:
    """Recency over a cycle longer than the slots never hits; frequency keeps what it has."""
    cache = new_cache([3], policy)
    for step in range(40):
        run_step(cache, [0, 1, 2, 3] if step % 2 else [4, 5, 6, 7])
    assert cache.stats.hit_rate > 0.3
    warning = few_slots_warning(cache.n_slots, N_USED)
    assert "fewer slots (least 3)" in warning and "lru and adaptive act as lfu" in warning


@pytest.mark.parametrize("n_slots", [[0, 4], [N_EXPERT, 16], [5]])
def test_no_hint_without_a_cliff(n_slots: list[int]) -> None:
    assert few_slots_warning([min(n, N_EXPERT) for n in n_slots], N_USED) == ""


@pytest.mark.parametrize("bad", [[-1], [4, 17]])
def test_impossible_slot_counts_are_refused(bad: list[int]) -> None:
    with pytest.raises(ConfigError, match="allowed: 0 to 16"):
        new_cache(bad)


@pytest.mark.parametrize("ids", [[0, 16], [-1, 0], [-5]])
def test_an_impossible_id_is_an_internal_error(ids: list[int]) -> None:
    for n_slots in (4, N_EXPERT):
        cache = new_cache([n_slots])
        cache.layers[0].preload()
        with pytest.raises(InternalError, match="router chose"):
            cache.layers[0].access(ids)
        with pytest.raises(InternalError, match="router chose"):
            cache.layers[0].access_batch(np.array(ids, dtype=np.int32))
        assert cache.stats.hits.sum() == cache.stats.misses.sum() == 0


def test_a_batch_counts_as_the_same_ids_one_by_one() -> None:
    rng = np.random.default_rng(5)
    ids = rng.integers(0, N_EXPERT, (40, N_USED)).astype(np.int32)
    one, many = new_cache([6]), new_cache([6])
    for cache in (one, many):
        cache.layers[0].preload([3, 1, 4, 15, 9, 2])
        cache.begin_pass()
    missing = one.layers[0].access(ids.reshape(-1).tolist())
    batch = many.layers[0].access_batch(ids)
    assert sorted(missing) == sorted(batch)
    counts = np.bincount(ids.reshape(-1), minlength=N_EXPERT)
    chosen = [counts[e] for e in batch]
    assert chosen == sorted(chosen, reverse=True)
    for field in ("hits", "misses", "missing"):
        assert getattr(one.stats, field).tolist() == getattr(many.stats, field).tolist()
    assert many.layers[0].access_batch(ids[:0]) == []


def test_what_is_preferred_after_a_prompt_takes_the_slots_of_the_worst() -> None:
    for policy in (Lru(), Lfu(hysteresis=1.0)):
        cache = new_cache([4], policy)
        layer = cache.layers[0]
        layer.preload()
        cache.begin_pass()
        rows = [[9, 1, 8, 7]] * 5 + [[9, 1, 8, 0]] * 3 + [[9, 6, 5, 4]]
        layer.access_batch(np.array(rows, dtype=np.int32))
        pairs = preferred(layer)
        found = [expert for expert, _ in pairs]
        if isinstance(policy, Lfu):
            assert pairs == [(9, 2), (8, 3), (7, 0)] or pairs == [(9, 3), (8, 2), (7, 0)]
        else:
            assert sorted(found) == [4, 5, 6, 9]
        for expert, slot in reversed(pairs):
            layer.take(expert, slot)
            cache.check()
        assert preferred(layer) == [] and [layer.table[e] for e in found] == [s for _, s in pairs]
        best = {9, 8, 7, 1} if isinstance(policy, Lfu) else {4, 5, 6, 9}
        assert set(residents(layer)) == best
        with pytest.raises(InternalError, match="expert 9 has a slot already"):
            layer.take(9, 0)


def test_what_is_preferred_fills_free_slots_first_and_leaves_static_ones() -> None:
    cache = new_cache([6], Adaptive(0.5))
    layer = cache.layers[0]
    layer.preload([0, 1, 2, 3])
    layer.access_batch(np.array([[8, 9, 10, 11], [12, 13, 8, 9]], dtype=np.int32))
    pairs = preferred(layer)
    assert [slot for _, slot in pairs[:2]] == [4, 5] and len(pairs) == 4
    for expert, slot in pairs:
        layer.take(expert, slot)
    cache.check()
    assert set(residents(layer)) >= {expert for expert, _ in pairs} | {0, 1}
    assert preferred(new_cache([N_EXPERT]).layers[0]) == preferred(new_cache([0]).layers[0]) == []


@pytest.mark.parametrize("policy", [Lru(), Lfu(half_life=20, hysteresis=1.0), Adaptive(0.5)])
def test_a_batch_leaves_the_policy_where_single_rows_do(policy: Policy) -> None:
    """After a prompt in one batch, the same experts are the worst and the best as row by row."""
    rng = np.random.default_rng(3)
    p = np.arange(1, N_EXPERT + 1) / np.arange(1, N_EXPERT + 1).sum()
    rows = [rng.choice(N_EXPERT, N_USED, replace=False, p=p) for _ in range(60)]
    one, many = new_cache([N_EXPERT - 1], policy), new_cache([N_EXPERT - 1], policy)
    for cache in (one, many):
        cache.layers[0].preload()
    for row in rows:
        one.layers[0].access(row.tolist())
    many.layers[0].access_batch(np.array(rows, dtype=np.int32))
    a, b = (cache.layers[0].policy.score for cache in (one, many))
    if isinstance(policy, Lfu):
        assert np.corrcoef(a, b)[0, 1] > 0.9
        assert sum(a) / sum(b) == pytest.approx(1, rel=0.05)
    else:
        assert a == b


@pytest.mark.parametrize(
    ("text", "policy"),
    [("lru", Lru()), ("static", Static()), ("lfu:half_life=32", Lfu(half_life=32)),
     ("lfu:half_life=8, hysteresis=2", Lfu(8, 2)), ("adaptive:static_share=0", Adaptive(0))],
)  # fmt: skip
def test_policies_are_written_as_text(text: str, policy: Policy) -> None:
    assert parse_policy(text) == policy


@pytest.mark.parametrize(
    ("text", "say"),
    [("mru", "allowed: lru, lfu, adaptive, static"), ("", "no policy ''"),
     ("lru:x=1", "no parameter 'x'; allowed: none"), ("lfu:half_life=z", "'z'; give a number"),
     ("lfu:half_life=0", "half_life is 0; allowed: 1 to 1e+06"),
     ("lfu:hysteresis=nan", "hysteresis is nan"), ("adaptive:static_share=1.5", "allowed: 0 to 1")],
)  # fmt: skip
def test_wrong_policies_are_refused_by_name(text: str, say: str) -> None:
    with pytest.raises(ConfigError, match=say.replace("+", r"\+")):
        parse_policy(text)


def test_check_notices_every_kind_of_damage() -> None:
    def damaged(harm: str) -> ExpertCache:
        cache = new_cache([6, N_EXPERT])
        cache.layers[0].preload([0, 1, 2])
        cache.begin_pass()
        cache.layers[0].access([8])
        cache.layers[0].reserve_slot(8, [])
        cache.check()
        exec(harm, {"cache": cache, "layer": cache.layers[0], "pinned": cache.layers[1]})
        return cache

    harms = (
        "cache.tables[0, 5] = 3", "cache.tables[0, 1] = 0", "cache.tables[0, 1] = -1",
        "layer.owner[4] = 0", "layer.free.pop()", "layer.loading[8] = 2", "layer.loading.clear()",
        "layer.resident.add(8)", "layer.fresh.add(7)", "pinned.owner.reverse()",
        "layer.owner[0], layer.owner[1] = 1, 0",
    )  # fmt: skip
    for harm in harms:
        with pytest.raises(InternalError, match="expert cache, layer"):
            damaged(harm).check()


@pytest.mark.parametrize("name", POLICIES)
def test_restoring_undoes_all_that_passes_changed(name: str) -> None:
    """The bytes of the slots too, after the uploads that are due."""
    rng = np.random.default_rng(0)
    n_slots = [0, 6, 9, N_EXPERT]
    cache, twin = (new_cache(n_slots, parse_policy(name)) for _ in range(2))
    held: dict[tuple[int, int], int] = {}  # the expert whose bytes are in a slot

    def steps(of: ExpertCache, drawn: np.random.Generator, n: int) -> None:
        for il in drawn.integers(0, 4, n).tolist():
            ids = drawn.permutation(N_EXPERT)[:N_USED].tolist()
            run_step(of, ids, il)
            if of is cache:
                owners = enumerate(of.layers[il].owner)
                held.update({(il, slot): owner for slot, owner in owners if owner >= 0})

    for each in (cache, twin):
        for layer in each.layers:
            layer.preload()
        steps(each, np.random.default_rng(1), 60)
        empty(each, 1, residents(each.layers[1])[0])
    saved = cache.save()
    steps(cache, rng, 40)
    for il, pairs in cache.restore(saved).items():
        held.update({(il, slot): expert for expert, slot in pairs})
    cache.check()
    for layer in cache.layers:
        for slot, owner in enumerate(layer.owner):
            assert owner < 0 or layer.full or held[layer.il, slot] == owner
    assert cache.stats.n_steps == twin.stats.n_steps
    for each in (cache, twin):
        steps(each, np.random.default_rng(2), 40)
    np.testing.assert_array_equal(cache.tables, twin.tables)
    np.testing.assert_array_equal(cache.stats.misses, twin.stats.misses)
