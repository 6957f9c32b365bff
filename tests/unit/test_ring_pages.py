"""Pages of a drafter's ring: they name the positions that a block sees, each of them once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moegraph.resident.draftlayout import RING_PAGE, RingShape, Span

N, BASE = 8, 1000


def seen(shape: RingShape, span: Span) -> tuple[list[int], list[int]]:
    """Return the rows of positions that a block of N rows sees, in any order, and its own rows."""
    pages = np.full(shape.n_rows // RING_PAGE + 1, -1, np.int32)
    n_seen, others = shape.list_pages(pages, span, N, BASE)
    places = np.concatenate([np.arange(n_seen), n_seen + others])
    listed = pages[: np.count_nonzero(pages >= 0)]
    assert (listed >= BASE).all() and len(set(listed.tolist())) == len(listed)
    assert len(others) <= 31
    rows = [
        int(listed[at // RING_PAGE] - BASE) * RING_PAGE + at % RING_PAGE for at in places.tolist()
    ]
    return sorted(rows[:-N]), rows[-N:]


@pytest.mark.parametrize(("window", "n_ctx"), [(0, 1000), (24, 1000), (100, 4000), (700, 600)])
def test_a_block_sees_what_its_first_row_may_see(window: int, n_ctx: int) -> None:
    shape = RingShape.of(window, 7, n_ctx)
    assert shape.n_block == RING_PAGE and shape.n_cells % RING_PAGE == 0
    rng = random.Random(window)
    for _ in range(400):
        span = Span()
        if rng.random() < 0.5:
            span.restart(rng.randrange(300))
        span.grow(rng.choice([0, 1, 15, 16, 17, rng.randrange(n_ctx)]))
        if rng.random() < 0.5:
            span.truncate(max(span.first, span.n_past - rng.randrange(40)))
        first = max(span.first, span.high - shape.n_cells, 0)
        if window:
            first = max(first, span.n_past + 1 - window)
        wanted = shape.rows(np.arange(first, span.n_past, dtype=np.int64)).tolist()
        assert seen(shape, span) == (sorted(wanted), list(range(N)))
