"""The pages of the KV caches: who has which, whatever comes and goes."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.cache_rules import check_pool

from moegraph.resident.kvpool import PAGE, KVPool


def test_one_sequence_always_has_its_pages_in_order() -> None:
    pool, rng = KVPool(1, 9), np.random.default_rng(0)
    for _ in range(200):
        n = int(rng.integers(0, 9 * PAGE + 1))
        pool.grow(0, n)
        pool.shrink(0, n - int(rng.integers(0, n + 1)))
        pages = pool.pages(0)
        assert pages == list(range(len(pages)))
        check_pool(pool)


def test_rows_follow_the_pages() -> None:
    pool = KVPool(2, 3)
    for slot, n in ((0, 1), (1, PAGE + 1), (0, PAGE + 1)):
        pool.grow(slot, n)
    assert pool.pages(0) == [0, 3] and pool.pages(1) == [1, 2]
    assert [pool.row(0, p) for p in (0, PAGE - 1, PAGE)] == [0, PAGE - 1, 3 * PAGE]
    slots, positions = np.array([[0], [1]]), np.array([[PAGE - 1, PAGE], [0, PAGE + 5]])
    wanted = [[PAGE - 1, 3 * PAGE], [PAGE, 2 * PAGE + 5]]
    np.testing.assert_array_equal(pool.rows(slots, positions), wanted)
    for first, n in ((0, 1), (3, 5), (PAGE - 2, 2), (PAGE - 2, 5), (PAGE, PAGE)):
        run = [pool.row(0, first + i) for i in range(n)]
        np.testing.assert_array_equal(pool.run(0, first, n), run)
    # what a sequence has no page for repeats its first one, which holds no one else's rows
    np.testing.assert_array_equal(pool.table, [[0, 3, 0], [1, 2, 1]])


@pytest.mark.parametrize("at", range(8))
def test_shrinking_mends_what_an_interrupt_left(at: int) -> None:
    """Interrupt a growth after every statement; the same sequence then starts over."""
    import sys

    pool, n_lines = KVPool(2, 4), 0
    pool.grow(0, 1)
    pool.grow(1, 1)

    def trace(frame, event, _):
        nonlocal n_lines
        if frame.f_code.co_name in ("grow", "_write") and event == "line":
            n_lines += 1
            if n_lines == 6 + 2 * at:
                raise KeyboardInterrupt
        return trace

    old = sys.gettrace()
    sys.settrace(trace)
    try:
        pool.grow(0, 4 * PAGE)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(old)
    pool.shrink(0, 0)
    check_pool(pool)
    assert pool.n_free == 7
    pool.grow(0, 4 * PAGE)
    check_pool(pool)
    assert pool.pages(0) == [0, 2, 3, 4]


@pytest.mark.parametrize("seed", range(4))
def test_random_sequences_that_share(seed: int) -> None:
    """Each has its pages, and its beginnings stay where they were shared from."""
    pool, rng, held = KVPool(5, 6, 12), np.random.default_rng(seed), [0] * 5
    for _ in range(400):
        slot, other = (int(n) for n in rng.permutation(5)[:2])
        what = rng.random()
        if what < 0.4:
            n = int(rng.integers(held[slot], 6 * PAGE + 1))
            if pool.needed(slot, n) <= pool.n_free:
                pool.grow(slot, n)
                held[slot] = n
        elif what < 0.7:
            pool.shrink(slot, 0)
            n = int(rng.integers(0, held[other] // PAGE + 1))
            pool.share(slot, other, n)
            held[slot] = n * PAGE
            assert pool.pages(slot) == pool.pages(other)[:n]
        else:
            n = int(rng.integers(0, held[slot] + 1))
            if pool.lacking(slot, n, n, 0)[0] <= pool.lacking(slot, n, n, 0)[1]:
                pool.shrink(slot, n)
                if n % PAGE and pool.is_shared(slot, n):
                    pool.part(slot, n)
                held[slot] = n
        assert [len(pool.pages(s)) for s in range(5)] == [-(-n // PAGE) for n in held]
        check_pool(pool)
