"""The recurrences of DeltaNet over states by slot: bits of upstream's operations, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.graph_runs import Graph, random
from helpers.tree_rows import ConvCase, DeltaCase, check_lengths, padded
from helpers.tree_shapes import TREES, heap, path

from moegraph.arch.blocks.deltanet import _repeat_heads
from moegraph.errors import InternalError
from moegraph.ggml.device import Device
from moegraph.graphs.rows import check_parents

HEADS = [(2, 2, 64), (2, 4, 128), (1, 3, 16), (2, 2, 20)]
# Slots of sequences, in a pool of five; the last names two that it has not.
SLOTS = [[3], [4, 0, 2], [1, -1, 4, 5, 0]]
LENGTHS = [1, 3, 33, 64, 130]

Case = DeltaCase | ConvCase


@pytest.fixture(scope="module", params=[(3, False), (3, True)], ids=["three", "reference"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Yield the CPU device with some number of threads, and in reference mode."""
    n_threads, reference = request.param
    opened = Device("cpu", n_threads=n_threads, reference=reference)
    yield opened
    opened.close()


def cases(slots: list[int], n_tokens: int, rng: np.random.Generator) -> Iterator[Case]:
    """Yield operands of both operations, small and with sizes that no vector register divides."""
    for n_k, n_v, s in HEADS[1:]:
        yield DeltaCase.random(rng, slots, n_tokens, (n_k, n_v), s)
    for channels, d_conv in ((130, 4), (64, 2), (70, 9)):
        yield ConvCase.random(rng, slots, n_tokens, channels, d_conv)


def rows_of(case: Case) -> list[str]:
    """Return the names of the operands that have rows."""
    return [name for name in vars(case) if name not in ("kernel", "pool", "slots")]


def real(case: Case) -> tuple[Case, list[int]]:
    """Return the sequences that are not padding, and which they are."""
    there = [i for i, slot in enumerate(case.slots) if 0 <= slot < len(case.pool)]
    picked = {name: getattr(case, name)[there] for name in [*rows_of(case), "slots"]}
    return replace(case, **picked), there


@pytest.mark.parametrize("n_tokens", LENGTHS)
@pytest.mark.parametrize("slots", SLOTS, ids=str)
def test_chains_have_upstreams_bits_and_other_slots_stay(
    slots: list[int], n_tokens: int, device: Device
) -> None:
    for case in cases(slots, n_tokens, np.random.default_rng(n_tokens)):
        got, pool = case.run(device)
        some, there = real(case)
        expected, states = some.upstream(device) if there else (got[there], case.pool)
        np.testing.assert_array_equal(got[there], expected)
        np.testing.assert_array_equal(pool, states)
        assert not np.delete(got, there, 0).any(), "padding is 0"
        assert np.isfinite(got).all()


@pytest.mark.parametrize("widths", [[40], [1, 39], [7, 1, 1, 31], [1] * 40], ids=str)
def test_passes_that_follow_one_another_are_one(widths: list[int], device: Device) -> None:
    for case in cases([2, 0, 4], 40, np.random.default_rng(1)):
        found, begin, pool = [], 0, case.pool
        for n in widths:
            part = {name: getattr(case, name)[:, begin : begin + n] for name in rows_of(case)}
            out, pool = replace(case, pool=pool, **part).run(device)
            found.append(out)
            begin += n
        whole, states = case.upstream(device)
        np.testing.assert_array_equal(np.concatenate(found, 1), whole)
        np.testing.assert_array_equal(pool, states)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("n_tokens", [1, 7, 30, 64])
def test_each_row_of_the_delta_rule_equals_its_path_alone(tree: Any, n_tokens: int, device: Device):
    for n_k, n_v, s in HEADS:
        rng = np.random.default_rng(n_tokens)
        case = DeltaCase.random(rng, [3, 1], n_tokens, (n_k, n_v), s)
        parents = check_parents([tree(n_tokens, rng) for _ in range(2)])
        together, pool = case.run(device, parents)
        np.testing.assert_array_equal(pool, case.pool)
        for seq in range(2):
            for row in range(n_tokens - 1, -1, -max(1, n_tokens // 7)):
                rows = path(parents[seq], row)
                np.testing.assert_array_equal(
                    together[seq, rows], case.alone(device, seq, rows), err_msg=f"row {row}"
                )


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("d_conv", [2, 4, 9])
def test_each_row_of_the_convolution_equals_its_path_alone(tree: Any, d_conv: int, device: Device):
    for n_tokens in (1, 2, 3, 21, 64):
        rng = np.random.default_rng(n_tokens)
        case = ConvCase.random(rng, [4, 0, 1], n_tokens, 130, d_conv)
        parents = check_parents([tree(n_tokens, rng) for _ in range(3)])
        together, pool = case.run(device, parents)
        np.testing.assert_array_equal(pool, case.pool)
        for seq in range(3):
            for row in range(n_tokens):
                rows = path(parents[seq], row)
                alone = case.alone(device, seq, rows)
                np.testing.assert_array_equal(together[seq, rows], alone, err_msg=f"row {row}")


@pytest.mark.parametrize("n_tokens", [1, 2, 7, 40, 70])
def test_sequences_of_other_lengths_have_the_bits_of_their_rows_alone(
    n_tokens: int, device: Device
) -> None:
    lengths = [n_tokens, 0, n_tokens // 2, 1, min(3, n_tokens), n_tokens + 5]
    for case in cases([4, 0, 2, -1, 1, 3], n_tokens, np.random.default_rng(n_tokens)):
        check_lengths(case, device, lengths)
        check_lengths(case, device, [-1] * 6)


@pytest.mark.parametrize("tree", TREES)
def test_padding_in_a_tree_changes_no_other_row(tree: Any, device: Device) -> None:
    """Also sequences without a slot, and two that continue the same state."""
    rng = np.random.default_rng(6)
    parents = tree(24, rng)
    wide, places = padded(parents, rng)
    n = len(wide)
    trees = check_parents([wide, wide, [-2] * n, wide])
    for case in cases([3, 3, 1, -1], n, rng):
        got, pool = case.run(device, trees)
        np.testing.assert_array_equal(pool, case.pool)
        for seq in range(2):
            alone = case.pick(seq, places).run(device, check_parents(parents))[0][0]
            np.testing.assert_array_equal(got[seq, places], alone)
        assert not np.delete(got[:2], places, 1).any() and not got[2:].any()


@pytest.mark.parametrize("times", [1, 2, 3, 6, 7])
def test_key_heads_are_repeated_one_by_one(times: int, device: Device) -> None:
    graph, heads = Graph(), random(times, 2, 3, 2, 8)
    (found,), _ = graph.run(device, [_repeat_heads(graph.b, graph.leaf(heads), 2 * times)])
    np.testing.assert_array_equal(found, np.repeat(heads, times, axis=2).reshape(-1))


def test_a_row_with_a_bad_parent_counts_as_a_root(device: Device) -> None:
    rng = np.random.default_rng(5)
    good, bad = heap(20, rng), heap(20, rng)
    for row, parent in ((0, 0), (3, 3), (5, 19), (9, 2**31 - 1), (12, -(2**31)), (19, -3)):
        good[row], bad[row] = -1, parent
    good[13] = bad[13] = -2  # and its child, below
    good[14], bad[14] = -1, 13
    for case in cases([4], 20, rng):
        np.testing.assert_array_equal(
            case.run(device, np.array([bad], np.int32))[0],
            case.run(device, np.array([good], np.int32))[0],
        )


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([[-1, 0], [-1, 1]], "tree 1: the parent of row 1 is 1, not -2 to 0"),
        ([-1, -3], "tree 0: the parent of row 1 is -3, not -2 to 0"),
        ([0], "tree 0: the parent of row 0 is 0, not -2 to -1"),
        ([-1, -2, 1], "tree 0: the parent of row 2 is row 1, which is padding"),
        ([-1] * 65, "a tree has 65 rows, not 1 to 64"),
        ([], "a tree has 0 rows, not 1 to 64"),
    ],
)
def test_bad_parents_are_refused(parents: list, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        check_parents(parents)
