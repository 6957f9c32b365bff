"""Rings of a drafter's K and V: each mask shows what is held, within the window, and no more."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moegraph.resident.draftlayout import RingShape, Span


def shown(shape: RingShape, mask: np.ndarray, held: dict[int, int], n: int) -> list[set[int]]:
    """Return the positions that each row of a mask shows; those of the block are negative."""
    found = []
    for row in mask:
        cells = set(np.flatnonzero(row == 0).tolist())
        assert set(np.flatnonzero(np.isneginf(row)).tolist()) == set(range(len(row))) - cells
        block = {-1 - cell for cell in cells if cell < shape.n_block}
        found.append(block | {held[cell] for cell in cells if cell >= shape.n_block})
    return found


steps = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(1, 300)),
        st.tuples(st.just("truncate"), st.integers(0, 900)),
        st.tuples(st.just("restart"), st.integers(0, 900)),
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    steps=steps, window=st.sampled_from([0, 1, 3, 20, 300]), n=st.integers(1, 8),
    n_ctx=st.sampled_from([64, 300, 900]), is_causal=st.booleans(),
)  # fmt: skip
def test_masks_show_what_is_held(
    steps: list[tuple[str, int]], window: int, n: int, n_ctx: int, is_causal: bool
) -> None:
    shape, span = RingShape.of(window, 8, n_ctx), Span()
    cells: dict[int, int] = {}  # row -> the position that was written there last
    known: set[int] = set()
    for what, arg in steps:
        if what == "grow":
            for place in range(span.n_past, span.n_past + arg):
                cells[int(shape.rows(np.array([place]))[0])] = place
                known.add(place)
            span.grow(arg)
        elif what == "truncate" and arg <= span.n_past:
            known = {place for place in known if place < arg}
            span.truncate(arg)
        elif what == "restart":
            known.clear()
            span.restart(arg)
        mask = np.empty((n, shape.length(span.n_past)), np.float16)
        shape.fill_mask(mask, span, is_causal)
        held = {row: place for row, place in cells.items() if place in known}
        there = set(held.values())
        for i, seen in enumerate(shown(shape, mask, held, n)):
            reach = window or 1 << 30
            block = {-1 - j for j in range(n) if i - j < reach and (j <= i or not is_causal)}
            wanted = {p for p in there if span.n_past + i - p < reach}
            # what a ring has lost is not there; nothing else that is held may be missing
            lost = {p for p in wanted if p < span.high - shape.n_cells}
            assert block <= seen and seen - block <= wanted
            assert wanted - lost <= seen
