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
    strided,
)

from moegraph.errors import InternalError
from moegraph.ggml.device import Device
from moegraph.ggml.handles import Context
from moegraph.ggml.lib import C
from moegraph.ggml.ops import F32, I32, MAX_FETCH_IDS, Builder, Tensor
from moegraph.kinds import MAX_FETCH_IDS as KNOWN_FETCH_IDS


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


def test_passes_know_how_many_ids_a_lookup_takes() -> None:
    assert KNOWN_FETCH_IDS == MAX_FETCH_IDS


def operands(b: Builder, **other: Tensor) -> list[Tensor]:
    """Return operands that fit, but for those given by name."""
    made = {
        "table": b.leaf(I32, (1, 12), "table"), "ids": b.leaf(I32, (8,), "ids"),
        "victims": b.leaf(I32, (2, 8), "victims"), "source": b.leaf(F32, (64, 12), "source"),
        "target": b.leaf(F32, (64, 9), "target"),
    }  # fmt: skip
    assert set(other) <= set(made)
    return list({**made, **other}.values())


@pytest.mark.parametrize(
    ("name", "dtype", "ne"),
    [
        ("table", F32, (1, 12)), ("table", I32, (2, 12)), ("table", I32, (1, 11)),
        ("table", I32, (1, 12, 2)), ("ids", F32, (8,)), ("ids", I32, (MAX_FETCH_IDS + 1,)),
        ("ids", I32, (4, 2)), ("victims", F32, (2, 8)), ("victims", I32, (1, 16)),
        ("victims", I32, (2, 4, 2)), ("victims", I32, (2, MAX_FETCH_IDS + 1)),
        ("source", F32, (64, 13)), ("source", F32, (60, 12)),
        ("source", C.GGML_TYPE_F16, (64, 12)), ("source", F32, (64, 12, 2)),
        ("target", F32, (68, 9)), ("target", I32, (64, 9)), ("target", F32, (64, 3, 3)),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit_are_refused(name: str, dtype: int, ne: tuple[int, ...]) -> None:
    with Context(32, 8) as context:
        b = Builder(context, 8)
        b.fetch_rows(*operands(b))
        with pytest.raises(InternalError, match="fetch_rows: operands do not fit"):
            b.fetch_rows(*operands(b, **{name: b.leaf(dtype, ne, name)}))


def test_rows_that_no_16_bytes_fit_are_refused() -> None:
    with Context(64, 8) as context:
        b = Builder(context, 8)
        assert b.fetch_rows(*operands(b, source=strided(b, "source", 64, 12, 68))).ne[1] == 8
        for name, n in (("source", 12), ("target", 9)):
            for stride in (65, 66, 67):
                other = {name: strided(b, name, 64, n, stride)}
                with pytest.raises(InternalError, match="fetch_rows: operands do not fit"):
                    b.fetch_rows(*operands(b, **other))
        odd = {"source": b.leaf(F32, (62, 12), "s"), "target": b.leaf(F32, (62, 9), "t")}
        with pytest.raises(InternalError, match="fetch_rows: operands do not fit"):
            b.fetch_rows(*operands(b, **odd))
        for name in ("table", "ids", "victims"):
            thin = b.leaf(I32, {"table": (1, 12), "ids": (8,), "victims": (2, 8)}[name], name)
            thin.nb[1 if name != "ids" else 0] = 16
            with pytest.raises(InternalError, match="fetch_rows: operands do not fit"):
                b.fetch_rows(*operands(b, **{name: thin}))
