"""The recurrences of DeltaNet over states by slot on a GPU: upstream's bits, and trees of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers.graph_runs import Array, nmse
from helpers.tree_rows import ConvCase, DeltaCase, check_lengths, padded
from helpers.tree_shapes import TREES, path

from moegraph.ggml.device import Device
from moegraph.graphs.rows import check_parents

# Squared error over squared norm of the rows of a path. The order of sums is that of chains; the
# GPU's exp differs from the CPU's by some 1e-7, once for each ancestor.
LIMIT_ALONE, LIMIT_CPU = 1e-12, 1e-9

# For smaller heads nvcc contracts other products and sums in upstream's kernel than ours says.
WARP_HEADS = 64

# Slots of sequences, in a pool of five.
SLOTS = [[3], [0, 1, 2], [4, 0, 2]]
HEADS = [(2, 4, 128), (2, 2, 64), (1, 3, 32), (2, 4, 16)]


@pytest.fixture(scope="module")
def cpu() -> Iterator[Device]:
    """Yield the CPU."""
    opened = Device("cpu", n_threads=2)
    yield opened
    opened.close()


def error(got: Array, expected: Array) -> float:
    return nmse(got.reshape(-1), expected)


@pytest.mark.parametrize("n_tokens", [1, 2, 7, 32, 33, 300])
@pytest.mark.parametrize("slots", SLOTS, ids=str)
def test_chains_have_upstreams_bits_and_other_slots_stay(
    slots: list[int], n_tokens: int, device: Device
) -> None:
    rng = np.random.default_rng(n_tokens)
    for n_k, n_v, s in HEADS:
        delta = DeltaCase.random(rng, slots, n_tokens, (n_k, n_v), s)
        for got, expected in zip(delta.run(device), delta.upstream(device)):
            if s >= WARP_HEADS:
                np.testing.assert_array_equal(got, expected, err_msg=f"{n_k} {n_v} {s}")
            assert error(got, expected) < LIMIT_ALONE
    for channels, d_conv in ((256, 4), (128, 3), (384, 5), (128, 9), (128, 15)):
        conv = ConvCase.random(rng, slots, n_tokens, channels, d_conv)
        for silu in (False, True):
            for got, expected in zip(conv.run(device, silu=silu), conv.upstream(device, silu)):
                np.testing.assert_array_equal(got, expected, err_msg=f"{channels} {d_conv}")


@pytest.mark.parametrize("n_tokens", [1, 7, 33, 100])
def test_padding_touches_no_state(n_tokens: int, device: Device, cpu: Device) -> None:
    """Any number of channels, too: upstream's kernel takes multiples of 128."""
    rng = np.random.default_rng(n_tokens)
    slots = [4, -1, 5, 0]
    for case in (
        DeltaCase.random(rng, slots, n_tokens, (2, 4), 64),
        ConvCase.random(rng, slots, n_tokens, 130, 4),
    ):
        (got, pool), (expected, states) = case.run(device), case.run(cpu)
        assert error(got, expected) < LIMIT_CPU and error(pool, states) < LIMIT_CPU
        assert not got[1:3].any()
        np.testing.assert_array_equal(pool[1:4], case.pool[1:4])


@pytest.mark.parametrize("n_tokens", [1, 2, 8, 23, 30, 64])
@pytest.mark.parametrize("tree", TREES)
def test_each_row_of_the_delta_rule_equals_its_path_alone(
    tree: Any, n_tokens: int, device: Device, cpu: Device
) -> None:
    for n_k, n_v, s in HEADS[:2]:
        rng = np.random.default_rng(n_tokens)
        case = DeltaCase.random(rng, [3, 1], n_tokens, (n_k, n_v), s)
        parents = check_parents([tree(n_tokens, rng) for _ in range(2)])
        together, pool = case.run(device, parents)
        np.testing.assert_array_equal(pool, case.pool)
        assert error(together, case.run(cpu, parents)[0]) < LIMIT_CPU
        for seq in range(2):
            for row in {n_tokens - 1, n_tokens // 2}:
                rows = path(parents[seq], row)
                assert error(together[seq, rows], case.alone(device, seq, rows)) < LIMIT_ALONE


@pytest.mark.parametrize("n_tokens", [1, 2, 8, 23, 64])
@pytest.mark.parametrize("tree", TREES)
def test_each_row_of_the_convolution_equals_its_path_alone(
    tree: Any, n_tokens: int, device: Device
) -> None:
    rng = np.random.default_rng(n_tokens)
    case = ConvCase.random(rng, [4, 2], n_tokens, 256, 4)
    parents = check_parents([tree(n_tokens, rng) for _ in range(2)])
    for silu in (False, True):
        together, pool = case.run(device, parents, silu)
        np.testing.assert_array_equal(pool, case.pool)
        for seq in range(2):
            rows = path(parents[seq], n_tokens - 1)
            np.testing.assert_array_equal(together[seq, rows], case.alone(device, seq, rows, silu))


@pytest.mark.parametrize("n_tokens", [1, 2, 7, 33, 70])
def test_sequences_of_other_lengths_have_the_bits_of_their_rows_alone(
    n_tokens: int, device: Device
) -> None:
    rng = np.random.default_rng(n_tokens)
    lengths = [n_tokens, 0, n_tokens // 2, 1, min(3, n_tokens), n_tokens + 5]
    slots = [4, 0, 2, -1, 1, 3]
    for n_k, n_v, s in HEADS:
        case = DeltaCase.random(rng, slots, n_tokens, (n_k, n_v), s)
        check_lengths(case, device, lengths)
        check_lengths(case, device, [-1] * 6)
    for channels, d_conv in ((256, 4), (130, 3), (384, 9)):
        check_lengths(ConvCase.random(rng, slots, n_tokens, channels, d_conv), device, lengths)


@pytest.mark.parametrize("tree", TREES)
def test_padding_in_a_tree_changes_no_other_row(tree: Any, device: Device) -> None:
    rng = np.random.default_rng(6)
    parents = tree(24, rng)
    wide, places = padded(parents, rng)
    n = len(wide)
    trees = check_parents([wide, wide, [-2] * n, wide])
    for case in (
        DeltaCase.random(rng, [3, 3, 1, -1], n, (2, 4), 128),
        ConvCase.random(rng, [3, 3, 1, -1], n, 256, 4),
    ):
        got, pool = case.run(device, trees)
        np.testing.assert_array_equal(pool, case.pool)
        for seq in range(2):
            alone = case.pick(seq, places).run(device, check_parents(parents))[0][0]
            np.testing.assert_array_equal(got[seq, places], alone)
        assert not np.delete(got[:2], places, 1).any() and not got[2:].any()
