"""Look-ups that fetch what is missing, on the CPU: which rows, which bytes, and what follows."""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.fixture(scope="module", params=[False, True], ids=["default", "reference"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Yield the CPU device in its default and its reference mode."""
    opened = Device("cpu", n_threads=3, reference=request.param)
    yield opened
    opened.close()


def test_what_is_missing_is_fetched_in_order(device: Device) -> None:
    check_order(device, 16, pinned=False)


@pytest.mark.parametrize("name", CASES)
def test_each_case_gives_its_rows_and_bytes(name: str, device: Device) -> None:
    for m, pads in ((4, (0, 0)), (4, (4, 12)), (60, (8, 0)), (1024, (0, 4)), (65540, (28, 60))):
        check_case(device, name, m, pads, pinned=False)


@pytest.mark.parametrize("n_ids", [1, 2, 7, 8, 20, 33, 63, 64, 129, MAX_FETCH_IDS])
def test_any_lookup_is_the_models(n_ids: int, device: Device) -> None:
    """Replays of one graph see other ids, tables and rows to give up each time."""
    check_any(device, n_ids, 12, False, 40)


def test_what_follows_in_the_graph_reads_the_new_bytes(device: Device) -> None:
    rng = np.random.default_rng(1)
    shape = Shape(8, 6, 24, 10, 96 * Bench.K, 4, 16)
    with Bench(device, shape, follows=True) as bench:
        for _ in range(12):
            bench.fill(rng)
            bench.run(random_lookup(rng, shape))
