"""The expert cache under all policies: rules for victims, tables, loading, statistics."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
from helpers.cache_rules import check_cache
from helpers.shared import empty, residents

from moegraph.errors import ConfigError, InternalError
from moegraph.experts.cache import ExpertCache
from moegraph.experts.policy import (
    POLICIES,
    Lfu,
    Lru,
    Policy,
    few_slots_warning,
    parse_policy,
)
from moegraph.experts.slots import count

N_EXPERT, N_USED = 16, 4


def new_cache(n_slots: list[int], policy: Policy | None = None) -> ExpertCache:
    return ExpertCache(N_EXPERT, n_slots, policy or Lru(), N_USED)


def run_step(cache: ExpertCache, ids: list[int], il: int = 0) -> list[int | None]:
    """Choose ids in a step of its own and admit what is missing."""
    cache.begin_pass()
    return [cache.layers[il].admit(expert, ids) for expert in cache.layers[il].access(ids)]


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


def test_hysteresis_stops_two_experts_from_alternating() -> None:
    def evictions(hysteresis: float) -> int:
        cache = new_cache([1], Lfu(half_life=64, hysteresis=hysteresis))
        for step in range(100):
            run_step(cache, [step % 2])
        return int(cache.stats.evicted[0])

    assert evictions(1.0) > 20
    assert evictions(1.25) < 5


def test_preload_takes_the_lowest_ids_or_a_ranking() -> None:
    cache = new_cache([3, 3])
    assert cache.layers[0].preload() == [(0, 0), (1, 1), (2, 2)]
    assert cache.layers[1].preload([7, 7, 5, 3, 1]) == [(7, 0), (5, 1), (3, 2)]
    assert cache.layers[1].preload([2]) == []


def test_fewer_slots_than_a_token_chooses_still_hit() -> None:
    """Recency over a cycle longer than the slots never hits; frequency keeps what it has."""
    cache = new_cache([3], Lru())
    for step in range(40):
        run_step(cache, [0, 1, 2, 3] if step % 2 else [4, 5, 6, 7])
    assert cache.stats.hit_rate > 0.3
    warning = few_slots_warning(cache.n_slots, N_USED)
    assert "fewer slots (least 3)" in warning and "lru acts as lfu" in warning


def test_a_batch_counts_as_the_same_ids_one_by_one() -> None:
    rng = np.random.default_rng(5)
    ids = rng.integers(0, N_EXPERT, (40, N_USED)).astype(np.int32)
    one, many = new_cache([6]), new_cache([6])
    for cache in (one, many):
        cache.layers[0].preload([3, 1, 4, 15, 9, 2])
        cache.begin_pass()
    missing = one.layers[0].access(ids.reshape(-1).tolist())
    layer = many.layers[0]
    batch = layer.access_batch(ids, count(0, ids, N_EXPERT))
    assert sorted(missing) == sorted(batch)
    counts = np.bincount(ids.reshape(-1), minlength=N_EXPERT)
    chosen = [counts[e] for e in batch]
    assert chosen == sorted(chosen, reverse=True)
    for field in ("hits", "misses", "missing"):
        assert getattr(one.stats, field).tolist() == getattr(many.stats, field).tolist()
    assert layer.access_batch(ids[:0], count(0, ids[:0], N_EXPERT)) == []


@pytest.mark.parametrize("policy", [Lru(), Lfu(half_life=20, hysteresis=1.0)])
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
    ids, layer = np.array(rows, dtype=np.int32), many.layers[0]
    layer.access_batch(ids, count(0, ids, N_EXPERT))
    a, b = (cache.layers[0].policy.score for cache in (one, many))
    if isinstance(policy, Lfu):
        assert np.corrcoef(a, b)[0, 1] > 0.9
        assert sum(a) / sum(b) == pytest.approx(1, rel=0.05)
    else:
        assert a == b


@pytest.mark.parametrize(
    ("text", "policy"),
    [("lru", Lru()), ("lfu:half_life=32", Lfu(half_life=32)),
     ("lfu:half_life=8, hysteresis=2", Lfu(8, 2))],
)  # fmt: skip
def test_policies_are_written_as_text(text: str, policy: Policy) -> None:
    assert parse_policy(text) == policy


@pytest.mark.parametrize(
    ("text", "say"),
    [("mru", "allowed: lru, lfu"), ("", "no policy ''"),
     ("lru:x=1", "no parameter 'x'; allowed: none"), ("lfu:half_life=z", "'z'; give a number"),
     ("lfu:half_life=0", "half_life is 0; allowed: 1 to 1e+06"),
     ("lfu:hysteresis=nan", "hysteresis is nan")],
)  # fmt: skip
def test_wrong_policies_are_refused_by_name(text: str, say: str) -> None:
    with pytest.raises(ConfigError, match=say.replace("+", r"\+")):
        parse_policy(text)


@pytest.mark.parametrize("name", POLICIES)
def test_a_cache_goes_on_after_passes_of_a_copy(name: str) -> None:
    """After the uploads that are due, its slots have their bytes again."""
    rng = np.random.default_rng(0)
    n_slots = [0, 6, 9, N_EXPERT]
    cache, twin = (new_cache(n_slots, parse_policy(name)) for _ in range(2))
    held: dict[tuple[int, int], int] = {}  # the expert whose bytes are in a slot

    def steps(of: ExpertCache, drawn: np.random.Generator, n: int) -> None:
        for il in drawn.integers(0, 4, n).tolist():
            ids = drawn.permutation(N_EXPERT)[:N_USED].tolist()
            run_step(of, ids, il)
            if of is not twin:
                owners = enumerate(of.layers[il].owner)
                held.update({(il, slot): owner for slot, owner in owners if owner >= 0})

    for each in (cache, twin):
        for layer in each.layers:
            layer.preload()
        steps(each, np.random.default_rng(1), 60)
        empty(each, 1, residents(each.layers[1])[0])
    copy = deepcopy(cache)
    steps(copy, rng, 40)
    for il, pairs in cache.lost_to(copy).items():
        held.update({(il, slot): expert for expert, slot in pairs})
    check_cache(cache)
    for layer in cache.layers:
        for slot, owner in enumerate(layer.owner):
            assert owner < 0 or layer.full or held[layer.il, slot] == owner
    assert cache.stats.n_steps == twin.stats.n_steps
    for each in (cache, twin):
        steps(each, np.random.default_rng(2), 40)
    np.testing.assert_array_equal(cache.tables, twin.tables)
    np.testing.assert_array_equal(cache.stats.misses, twin.stats.misses)
