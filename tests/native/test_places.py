"""The inputs of units, in C: equal to what a few lines of numpy say, for any choice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moegraph.errors import InternalError
from moegraph.experts.crossing import padded
from moegraph.ggml.places import MissingPlaces, find_missing, write_unit

Ints = npt.NDArray[np.int32]
MAX_ROUNDS = 16


def choice(n: int, k: int, n_expert: int, seed: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return the choice of n rows, and which of it is absent: every third expert, or all."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(n_expert)[:k] for _ in range(n)]
    ids = np.array(rows, dtype=np.int32).reshape(-1)
    return ids, np.isin(ids, np.arange(0, n_expert, 1 if seed % 5 == 0 else 3))


def by_numpy(places: Ints, ids: Ints, slots: Ints, k: int, n_rows: int, n: int) -> tuple[Ints, int]:
    """Return the words of a unit of n padded places, and its rounds."""
    token = places // k
    target, counts = np.unique(token, return_counts=True)
    n_rounds = 1 << int(counts.max() - 1).bit_length() if len(places) else 1
    words = np.empty((4 + n_rounds, n), dtype=np.int32)
    rows = (token, slots[ids[places]], places, target)
    for row, values, fill in zip(words, rows, (0, -1, n_rows * k, n_rows)):
        row[:], row[: len(values)] = fill, values
    words[4:] = -1
    row_of = np.repeat(np.arange(len(target)), counts)
    first = np.cumsum(counts) - counts
    words[4 + np.arange(len(places)) - first[row_of], row_of] = np.arange(len(places))
    return words.reshape(-1), n_rounds


def units(
    missing: MissingPlaces, group: list[int], ids: Ints, slots: Ints, k: int, n: int, most: int
) -> Iterator[tuple[Ints, Ints, int]]:
    """Yield (places, words, rounds) of the units of a group."""
    places = missing.of(group)
    for start in range(0, len(places), most - 1):
        part = places[start : start + most - 1]
        words = np.full((4 + MAX_ROUNDS) * padded(len(part)), -7, dtype=np.int32)
        yield part, words, write_unit(part, ids, slots, k, n, padded(len(part)), MAX_ROUNDS, words)


@given(
    st.integers(1, 60), st.integers(1, 8), st.integers(8, 40), st.integers(0, 1000),
    st.integers(2, 70),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_units_are_those_of_numpy_and_cover_every_place_once(
    n: int, k: int, n_expert: int, seed: int, most: int
) -> None:
    ids, absent = choice(n, k, n_expert, seed)
    missing = MissingPlaces(ids, absent, n_expert, k)
    cold = np.unique(ids[absent]).tolist()
    seen: list[int] = []
    for at in range(0, len(cold), 5):
        group = cold[at : at + 5]
        slots = np.full(n_expert, -1, dtype=np.int32)
        slots[group] = 7 + np.arange(len(group))
        for places, words, n_rounds in units(missing, group, ids, slots, k, n, most):
            expected, rounds = by_numpy(places, ids, slots, k, n, padded(len(places)))
            assert n_rounds == rounds
            np.testing.assert_array_equal(words[: len(expected)], expected)
            assert (words[len(expected) :] == -7).all(), "nothing behind it is written"
            assert (np.diff(places) > 0).all() and set(ids[places]) <= set(group)
            seen += places.tolist()
    assert sorted(seen) == np.flatnonzero(absent).tolist()


@given(st.integers(0, 60), st.integers(1, 8), st.integers(8, 40), st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_missing_experts_are_found_in_order(n: int, k: int, n_expert: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = np.minimum(rng.geometric(0.1, n * k), n_expert).astype(np.int32) - 1
    table = np.where(rng.random(n_expert) < 0.4, -1, rng.permutation(n_expert)).astype(np.int32)
    absent = rng.random(n * k) < 0.5
    counts = np.bincount(ids, minlength=n_expert)
    missing = [e for e in range(n_expert) if table[e] < 0 < counts[e]]
    found, found_counts = find_missing(3, ids, table, absent)
    assert found == sorted(missing, key=lambda e: -counts[e])
    assert found_counts.tolist() == counts.tolist()
    assert absent.tolist() == (table[ids] < 0).tolist()


def test_what_cannot_be_is_an_internal_error() -> None:
    ids = np.array([0, 9], dtype=np.int32)
    with pytest.raises(InternalError, match=r"outside 0\.\.5"):
        MissingPlaces(ids, np.ones(2, dtype=bool), 6, 2)
    assert len(MissingPlaces(ids, np.array([True, False]), 6, 2).of([0])) == 1
    with pytest.raises(InternalError, match=r"layer 3: .* outside 0\.\.5"):
        find_missing(3, ids, np.zeros(6, dtype=np.int32), np.ones(2, dtype=bool))
    words = np.empty((4 + MAX_ROUNDS) * 64, dtype=np.int32)
    many = np.arange(MAX_ROUNDS + 1, dtype=np.int32)
    with pytest.raises(InternalError, match="more than 16 experts"):
        write_unit(many, many, many, len(many), 1, 64, MAX_ROUNDS, words)
    with pytest.raises(InternalError, match="do not fit"):
        write_unit(many, many, many, 1, 17, len(many), MAX_ROUNDS, words)
