"""Experts in host memory, beside those on the device: books only."""

from __future__ import annotations

import numpy as np
import pytest

from moegraph.experts.cache import ExpertCache
from moegraph.experts.cost import MissCosts, choose_ways
from moegraph.experts.hostlevel import HostLevel
from moegraph.experts.policy import parse_policy
from moegraph.experts.residency import Residency
from moegraph.kinds import Kind
from moegraph.resident.layout import host_slots, n_at_once, passing_bytes

N_EXPERT, N_USED = 32, 4


def opened(
    n_device: int, n_host: int, policy: str = "lfu", shares: list[float] | None = None
) -> tuple[Residency, HostLevel]:
    cache = ExpertCache(N_EXPERT, [n_device], parse_policy(policy), N_USED)
    ranking = np.argsort(shares)[::-1].tolist() if shares else None
    cache.layers[0].preload(ranking, shares)
    ways = choose_ways("stream", MissCosts(), cache.n_slots, N_USED, N_EXPERT)
    return Residency(cache, ways), HostLevel(cache, {0: n_host})


@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_no_expert_is_on_both_levels_and_moves_say_what_changes(policy: str) -> None:
    residency, level = opened(6, 8, policy)
    device, rng = residency.cache.layers[0], np.random.default_rng(3)
    host, n_read = set(level.fill(0)), 0
    weights = 1.0 / np.arange(1, N_EXPERT + 1)
    for _ in range(400):
        before = set(device.resident)
        residency.begin_pass(Kind.DECODE, 1)
        ids = rng.choice(N_EXPERT, N_USED, replace=False, p=weights / weights.sum())
        remedy = residency.routed(0, ids.astype(np.int32))
        residency.results_arrived()
        if remedy is None:
            continue
        coming = [e for e, _ in remedy.admitted]
        level.begin(0, [*coming, *remedy.staged])
        for admitted, others in ((remedy.admitted, []), ([], remedy.staged)):
            moves = level.move(0, admitted, others)
            going = [*(e for e, _ in admitted), *others]
            assert sorted(moves.read) == sorted(set(going) - host)
            assert not set(moves.left) & {*coming, *remedy.staged}, "it would be read again"
            assert {e for e, _ in moves.saved} <= before - device.resident
            host = host.union(moves.kept, (e for e, _ in moves.saved))
            host -= {*moves.left, *moves.moved}
            n_read += len(moves.read)
        assert not host & device.resident and len(host) <= 8
        assert level.restore(0, host) == set(), "the books hold what the moves said"
    assert 50 < n_read < 400 * N_USED // 2


def test_a_profile_fills_the_device_and_then_host_memory() -> None:
    shares = np.random.default_rng(5).random(N_EXPERT).tolist()
    residency, level = opened(6, 8, shares=shares)
    best = np.argsort(shares)[::-1].tolist()
    assert residency.cache.layers[0].resident == set(best[:6])
    assert level.fill(0) == sorted(best[6:14])
    assert level.mask()[0].sum() == 14


def test_after_a_failure_the_books_say_what_is_held_and_what_is_not_wanted() -> None:
    _, level = opened(4, 6)
    held = level.fill(0)
    assert level.restore(0, {*held[1:], 30}) == {30}
    assert level.in_order(0, [31, held[0], held[2], 20, held[1]]) == [
        held[2], held[1], *sorted([held[0], 20, 31])
    ]  # fmt: skip
    assert level.move(7, [(3, 0)], [4]).read == [] and level.restore(7, {1}) == set()


def test_room_is_divided_evenly_until_nothing_need_be_read_and_then_into_whole_layers() -> None:
    sizes = {0: 10 << 20, 1: 10 << 20, 3: 20 << 20}  # layer 2 is full
    n_slots, n_expert = [8, 8, 32, 8], 32
    passing = passing_bytes(sizes.values())
    assert passing == (4 * 3 * 10 + 4 * 1 * 20) << 20

    def found(n_each: float) -> list[int]:
        return list(host_slots(passing + int(n_each * (40 << 20)), sizes, n_slots, 32).values())

    assert found(-1) == [0, 0, 0] and found(5.5) == [5, 5, 5] and found(23.9) == [23, 23, 23]
    assert found(24) == [24, 24, 24] and found(26) == [32, 24, 24] and found(28) == [32, 32, 32]
    total = n_expert * sum(sizes.values())
    assert host_slots(total, sizes, n_slots, 32) == dict.fromkeys(sizes, 32)
    assert host_slots(None, sizes, n_slots, 32) == dict.fromkeys(sizes, 32)
    assert n_at_once(1 << 40) == 1 and n_at_once(1) == 16


@pytest.mark.parametrize("is_needed", [True, False])
def test_what_goes_to_the_device_next_stays_in_host_memory(is_needed: bool) -> None:
    residency, level = opened(4, 1)
    device = residency.cache.layers[0]
    assert level.fill(0) == [4]
    device.access([0, 1, 2, 3])
    slot = int(device.table[0])
    device.take(5, slot)
    level.begin(0, [4] if is_needed else [])
    moves = level.move(0, [(5, slot)])
    assert (moves.saved, moves.left) == (([], []) if is_needed else ([(0, slot)], [4]))
