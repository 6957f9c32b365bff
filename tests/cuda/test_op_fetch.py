"""Look-ups that fetch what is missing, on a GPU: captured and replayed, from memory of the host."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.fetch_case import (
    CASES,
    Bench,
    Shape,
    check_any,
    check_case,
    check_order,
    random_lookup,
)

from moegraph.ggml.device import Device
from moegraph.ggml.ops import MAX_FETCH_IDS

MIB = 2**20 // 4  # numbers in one
# One vector of 16 bytes, then around what a thread, a block and all blocks copy at a time.
SIZES = (4, 60, 1024, 1028, 16 * 1024, 16 * 1024 + 4, 64 * 1024 - 4, 64 * 1024 + 4, 2 * MIB)


def test_what_is_missing_is_fetched_in_order(device: Device) -> None:
    check_order(device, 1024, pinned=True)


@pytest.mark.parametrize("pinned", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("name", CASES)
def test_each_case_gives_its_rows_and_bytes(name: str, pinned: bool, device: Device) -> None:
    for m in SIZES[:-1]:
        for pads in ((0, 0), (28, 60)):
            check_case(device, name, m, pads, pinned)
    if pinned:
        check_case(device, name, SIZES[-1], (28, 60), pinned)


@pytest.mark.parametrize("pinned", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("n_ids", [1, 2, 7, 8, 20, 33, 63, 64, 129, MAX_FETCH_IDS])
def test_any_lookup_is_the_models(n_ids: int, pinned: bool, device: Device) -> None:
    """Replays of one graph see other ids, tables and rows to give up each time."""
    check_any(device, n_ids, 1036, pinned, 30)


@pytest.mark.parametrize("pinned", [True, False], ids=["host", "device"])
def test_what_follows_in_the_graph_reads_the_new_bytes(pinned: bool, device: Device) -> None:
    """The product starts early where it may; it must not when rows are still being written."""
    rng = np.random.default_rng(1)
    for n_ids, m in ((8, 96 * Bench.K), (8, 2 * MIB), (64, 96 * Bench.K)):
        shape = Shape(n_ids, n_ids - 2, 3 * n_ids, n_ids + 2, m, 4, 16)
        with Bench(device, shape, pinned, follows=True) as bench:
            for turn in range(30):
                if turn % 3 == 0:
                    bench.fill(rng)
                bench.run(random_lookup(rng, shape))
