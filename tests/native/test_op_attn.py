"""Attention over pages on the CPU: against float64, and which bits a row has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from helpers.attn_case import (
    KINDS,
    PADDING,
    Graph,
    Heads,
    Row,
    chain,
    check_bits,
    error,
    flash_attn,
    in_window,
    make_case,
    mixture,
    moved,
    run,
    same_bits,
    tree,
)

from moegraph.ggml.device import Device

HEADS = (Heads(256, 4, 2), Heads(128, 4, 4), Heads(64, 6, 1), Heads(96, 2, 1))
BOUND = 1e-11  # squared error of sums in float32


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    """Yield the CPU device with threads that share a row's heads."""
    opened = Device("cpu", n_threads=3)
    yield opened
    opened.close()


@pytest.mark.parametrize("kind_v", KINDS)
@pytest.mark.parametrize("kind_k", KINDS)
def test_attention_is_that_of_float64(kind_k: str, kind_v: str, device: Device) -> None:
    rng = np.random.default_rng(KINDS.index(kind_k) * 3 + KINDS.index(kind_v))
    for i, heads in enumerate(HEADS):
        rows = mixture(rng, (1, 9, 32, 5)[i], (1, 4, 8, 2)[i], 700)
        case = make_case(rng, rows, heads, (kind_k, kind_v), (16, 64, 256, 32)[i])
        assert error(run(device, case, strided=i % 2 == 1), case.expected()) < BOUND


def test_the_error_is_at_most_that_of_ggmls_op(device: Device) -> None:
    rng = np.random.default_rng(5)
    for kind in KINDS:
        plain = make_case(rng, chain(0, 1000, 3), Heads(), (kind, kind))
        for case in (plain, in_window(rng, plain, 0), in_window(rng, plain, 300)):
            got, expected = run(device, case), case.expected()
            for i in range(3):
                upstream = flash_attn(device, case, i)
                assert error(got[i], expected[i]) <= error(upstream, expected[i])


ENDS = [1, 15, 16, 17, 511, 512, 513, 2049, 8200]


@pytest.mark.parametrize("n_keys", ENDS)
def test_contexts_may_end_anywhere(n_keys: int, device: Device) -> None:
    """Around the ends of splits and pages, and with scores far apart."""
    case = make_case(
        np.random.default_rng(n_keys), chain(0, n_keys - 1, 1), Heads(64, 2, 1), loud=20.0
    )
    assert error(run(device, case), case.expected()) < 1e-9


def test_a_tree_row_reads_its_own_path(device: Device) -> None:
    """Rows of a tree that skip their siblings, each with the result of a chain of its keys."""
    rng = np.random.default_rng(7)
    case = make_case(rng, tree(rng, 0, 300, 32), Heads(128, 4, 2), page_size=32)
    assert len({row.path for row in case.rows}) == 32 and max(r.n_keys for r in case.rows) < 332
    got = run(device, case)
    assert error(got, case.expected()) < BOUND
    for i, row in enumerate(case.rows):
        assert same_bits(run(device, moved(case.take([i]), rng))[0], got[i]), row


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_of_a_row_depend_on_its_keys_alone(kind: str, device: Device) -> None:
    """Not on the rows beside it, nor on padding, pages, or where the committed ones end."""
    rng = np.random.default_rng(8)
    case = make_case(rng, mixture(rng, 24, 8, 900), Heads(64, 4, 2), (kind, kind), 32)
    check_bits(device, case, rng, 24)


@pytest.mark.parametrize("window", [0, 1, 100, 256, 300])
def test_windows_in_rings_and_sinks(window: int, device: Device) -> None:
    """A row's bits follow from the positions in its window, which may begin anywhere."""
    rng = np.random.default_rng(window)
    case = make_case(rng, mixture(rng, 24, 8, 900), Heads(64, 4, 2), page_size=32)
    case = in_window(rng, case, window, 12 if window else 0)  # 300 positions, and 32 rows
    assert error(run(device, case), case.expected()) < BOUND
    check_bits(device, case, rng, 24)


def test_rows_without_keys_are_zero(device: Device) -> None:
    """A padding row, and a row of a sequence that pages do not list."""
    rng = np.random.default_rng(9)
    case = make_case(rng, [*chain(0, 40, 2), PADDING], Heads(64, 2, 1))
    outside = [replace(case, rows=(Row(seq, 40, (0,)), *case.rows[1:])) for seq in (-1, 1, 2**30)]
    with Graph(device, case) as graph:
        plain = graph.run(case)
        assert plain[:2].any() and not plain[2].any()
        for other in outside:
            got = graph.run(other)
            assert not got[0].any() and same_bits(got[1:], plain[1:])


def test_tables_that_are_wrong_read_only_the_pool(device: Device) -> None:
    """Pages and paths out of range give some key of the pool: the result is finite."""
    rng = np.random.default_rng(10)
    rows = (Row(0, 40, (2**30,)), Row(0, 2**30, (0,)), Row(0, -5, (-(2**30), 7)))
    case = make_case(rng, chain(0, 40, 3), Heads(64, 2, 1))
    for pages in (case.pages, np.full_like(case.pages, -1), np.full_like(case.pages, 2**31 - 1)):
        assert np.isfinite(run(device, replace(case, rows=rows, pages=pages))).all()
