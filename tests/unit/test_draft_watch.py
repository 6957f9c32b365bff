"""Drafts that no pass verifies, and what the text says of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moegraph.draft.drafter import Draft
from moegraph.draft.watch import Watch


def draft(*rows: list[int], p: float = 0.5) -> Draft:
    tokens = np.array(rows, np.int32)
    return Draft(tokens, np.full(tokens.shape, math.log(p), np.float32))


def test_a_draft_is_seen_once_the_text_shows_where_it_is_wrong() -> None:
    watch = Watch()
    watch.add(0, "mtp", 3, draft([5, 8], [6, 9], [7, 4]))
    held = [1, 2, 3]
    assert list(watch.seen(0, held)) == []
    assert list(watch.seen(0, [*held, 5])) == []
    assert list(watch.seen(1, [*held, 5, 6, 7])) == []
    (seen,) = watch.seen(0, [*held, 5, 9])
    assert (seen.source, seen.ranks) == ("mtp", (0, 1))
    assert seen.log_p == pytest.approx([math.log(0.5)] * 2)
    assert list(watch.seen(0, [*held, 5, 9, 7])) == []


def test_a_draft_that_is_right_to_its_end_is_seen_there() -> None:
    watch = Watch()
    watch.add(2, "lookup", 0, Draft(np.array([[5], [6]], np.int32)))
    watch.add(2, "mtp", 1, draft([6]))
    found = list(watch.seen(2, [5, 6]))
    assert [(seen.source, seen.ranks) for seen in found] == [("lookup", (0, 0)), ("mtp", (0,))]
    assert found[0].log_p == () and len(found[1].log_p) == 1


def test_drafts_of_a_text_that_is_given_up_are_forgotten() -> None:
    watch = Watch()
    watch.add(0, "mtp", 1, draft([6]))
    watch.forget(0)
    watch.forget(1)
    assert list(watch.seen(0, [5, 6])) == []
