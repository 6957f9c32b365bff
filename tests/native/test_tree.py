"""DeltaNet over trees of rows on the CPU: every row has the bits of its path run alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers.tree_layer import Layer, verify_and_commit
from helpers.tree_rows import TREES, ConvCase, DeltaCase, chain, forest, heap, path

from moegraph.errors import InternalError
from moegraph.ggml.device import Device
from moegraph.ggml.handles import Context
from moegraph.ggml.ops import F32, I32, MAX_TREE_ROWS, Builder
from moegraph.graphs.tree import check_parents

HEADS = [(2, 2, 64), (2, 4, 128), (1, 3, 16), (2, 2, 20)]


@pytest.fixture(scope="module", params=[False, True], ids=["default", "reference"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Yield the CPU device in its default and its reference mode."""
    opened = Device("cpu", n_threads=3, reference=request.param)
    yield opened
    opened.close()


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("n_tokens", [1, 2, 7, 29, 30, 64])
def test_each_row_of_the_delta_rule_equals_its_path_alone(tree: Any, n_tokens: int, device: Device):
    for n_k, n_v, s in HEADS:
        rng = np.random.default_rng(n_tokens)
        case = DeltaCase.random(rng, 2, n_tokens, (n_k, n_v), s)
        parents = check_parents([tree(n_tokens, rng) for _ in range(2)])
        together = case.run(device, parents)
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
        case = ConvCase.random(rng, 3, n_tokens, 130, d_conv)
        parents = check_parents([tree(n_tokens, rng) for _ in range(3)])
        together = case.run(device, parents, silu=False)
        for seq in range(3):
            for row in range(n_tokens):
                rows = path(parents[seq], row)
                alone = case.alone(device, seq, rows, silu=False)
                np.testing.assert_array_equal(together[seq, rows], alone, err_msg=f"row {row}")


def test_a_chain_is_the_plain_operation(device: Device) -> None:
    rng = np.random.default_rng(3)
    parents = check_parents([chain(33, rng)] * 2)
    delta, conv = DeltaCase.random(rng, 2, 33, (2, 4), 64), ConvCase.random(rng, 2, 33, 256, 4)
    np.testing.assert_array_equal(delta.run(device, parents), delta.run(device, None))
    np.testing.assert_array_equal(conv.run(device, parents, True), conv.run(device, None, True))


def test_rows_may_come_in_any_order(device: Device) -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        parents = forest(40, rng)
        order: list[int] = []  # another order in which parents come first
        while len(order) < 40:
            order.append(int(rng.choice([
                row for row in range(40)
                if row not in order and (parents[row] < 0 or parents[row] in order)
            ])))  # fmt: skip
        moved = [order.index(parents[row]) if parents[row] >= 0 else -1 for row in order]
        case = DeltaCase.random(rng, 1, 40, (1, 2), 16)
        there = DeltaCase(*(a[:, order] for a in list(vars(case).values())[:5]), case.state)
        np.testing.assert_array_equal(
            there.run(device, check_parents(moved))[0],
            case.run(device, check_parents(parents))[0, order],
        )


def test_kernels_take_a_row_with_a_bad_parent_for_a_root(device: Device) -> None:
    rng = np.random.default_rng(5)
    good, bad = heap(20, rng), heap(20, rng)
    for row, parent in ((0, 0), (3, 3), (5, 19), (9, 2**31 - 1), (12, -(2**31)), (19, -2)):
        good[row], bad[row] = -1, parent
    delta, conv = DeltaCase.random(rng, 1, 20, (1, 2), 64), ConvCase.random(rng, 1, 20, 128, 4)
    for case in (lambda p: delta.run(device, p), lambda p: conv.run(device, p, False)):
        np.testing.assert_array_equal(
            case(np.array([bad], np.int32)), case(np.array([good], np.int32))
        )


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([[-1, 0], [-1, 1]], "tree 1: the parent of row 1 is 1, not -1 to 0"),
        ([-1, -2], "tree 0: the parent of row 1 is -2, not -1 to 0"),
        ([0], "tree 0: the parent of row 0 is 0, not -1 to -1"),
        ([-1] * 65, "a tree has 65 rows, not 1 to 64"),
        ([], "a tree has 0 rows, not 1 to 64"),
    ],
)
def test_bad_parents_are_refused(parents: list, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        check_parents(parents)


def test_operands_that_do_not_fit_are_refused() -> None:
    with Context(16, 8) as context:
        b = Builder(context, 8)
        kernel = b.leaf(F32, (4, 128), "kernel")
        for n_tokens, ne in ((5, (4, 1)), (5, (5, 2)), (65, (65, 1))):
            columns = b.leaf(F32, (n_tokens + 3, 128, 1), "columns")
            with pytest.raises(InternalError, match="ssm_conv: operands do not fit"):
                b.ssm_conv(columns, kernel, b.leaf(I32, ne, "parents"))
    assert MAX_TREE_ROWS == 64


@pytest.fixture
def layers() -> Iterator[tuple[Layer, Layer]]:
    """Yield two equal layers in reference mode, where no result depends on the number of rows."""
    device = Device("cpu", n_threads=2, reference=True)
    pair = Layer(device, 1), Layer(device, 1)
    yield pair
    for layer in pair:
        layer.close()
    device.close()


@pytest.mark.parametrize("n_tokens", [2, 5, 24, 64])
def test_a_committed_path_leaves_what_it_leaves_alone(n_tokens: int, layers: tuple[Layer, Layer]):
    rng = np.random.default_rng(n_tokens)
    for tokens in (n_tokens, 3):
        verified, expected = verify_and_commit(*layers, tokens, rng)
        np.testing.assert_array_equal(layers[0].states(), layers[1].states())
        for got, want in zip(verified, expected, strict=True):
            np.testing.assert_array_equal(got, want)
