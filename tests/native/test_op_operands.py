"""Operands of our operations: any other type or size is refused before a graph is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from helpers.fetch_case import strided

from moegraph.errors import InternalError
from moegraph.ggml.handles import Context
from moegraph.ggml.lib import C
from moegraph.ggml.ops import (
    ATTN_PATH,
    F16,
    F32,
    I32,
    MAX_ATTN_ROWS,
    MAX_FETCH_IDS,
    Builder,
)


@dataclass
class Op:
    """An operation's operands that fit, and the sizes that it leaves open, as (name, axis).

    bad: further operands that do not fit. last: arguments that are no tensors.
    """

    fits: dict[str, tuple[int, tuple[int, ...]]]
    free: tuple[tuple[str, int], ...] = ()
    bad: tuple[tuple[str, tuple[int, ...]], ...] = ()
    last: tuple[Any, ...] = ()


ROWS = {"slots": (I32, (2,)), "parents": (I32, (5, 2))}
OPS = {
    "conv": Op(
        {"rows": (F32, (128, 5, 2)), "kernel": (F32, (4, 128)), "pool": (F32, (384, 3)), **ROWS},
        free=(("pool", 1),),
    ),
    "delta_net": Op(
        {
            "q": (F32, (16, 2, 5, 2)), "k": (F32, (16, 2, 5, 2)), "v": (F32, (16, 4, 5, 2)),
            "gate": (F32, (1, 4, 5, 2)), "beta": (F32, (1, 4, 5, 2)), "pool": (F32, (1024, 3)),
            **ROWS,
        },
        free=(("pool", 1),),
    ),
    "paged_attn": Op(
        {
            "q": (F32, (64, 4, 3)), "k": (F16, (128, 64)), "v": (C.GGML_TYPE_Q8_0, (128, 64)),
            "pages": (I32, (4, 2)), "rows": (I32, (4 + ATTN_PATH, 3)),
        },
        free=(("pages", 0), ("pages", 1)),
        bad=(
            ("q", (64, 4, MAX_ATTN_ROWS + 1)), ("q", (48, 4, 3)), ("q", (288, 4, 3)),
            ("pages", (2**17, 2)), ("rows", (4, 3)),
        ),
        last=(16, 1.0),
    ),
    "fetch_rows": Op(
        {
            "table": (I32, (1, 12)), "ids": (I32, (8,)), "victims": (I32, (2, 8)),
            "source": (F32, (64, 12)), "target": (F32, (64, 9)),
        },
        free=(("ids", 0), ("victims", 1), ("target", 1)),
        bad=(
            ("table", (1, 12, 2)), ("ids", (MAX_FETCH_IDS + 1,)), ("ids", (4, 2)),
            ("victims", (2, MAX_FETCH_IDS + 1)), ("source", (60, 12)), ("target", (64, 3, 3)),
        ),
    ),
    "candidates": Op(
        {"logits": (F32, (100, 2)), "draws": (I32, (512, 2))},
        free=(("logits", 0),),
        bad=(("logits", (100, 33)), ("draws", (512, 2, 2))),
    ),
    "publish": Op({"a": (I32, (8, 2)), "host": (I32, (16,))}),
}  # fmt: skip


def append(op: str, **changed: tuple[int, tuple[int, ...]]) -> Any:
    """Append an operation to a graph, with some operands changed; return its node."""
    with Context(32, 8) as context:
        b = Builder(context, 8)
        operands = (b.leaf(*what, name) for name, what in (OPS[op].fits | changed).items())
        call: Callable[..., Any] = getattr(b, op)
        return call(*operands, *OPS[op].last)


@pytest.mark.parametrize("op", OPS)
def test_operands_that_do_not_fit_are_refused(op: str) -> None:
    found, (fits, free) = append(op), (OPS[op].fits, OPS[op].free)
    assert found
    bad = [(name, (fits[name][0], ne)) for name, ne in OPS[op].bad]
    for name, (dtype, ne) in fits.items():
        bad.append((name, (F32 if dtype == I32 else I32, ne)))
        for axis in range(len(ne)):
            if (name, axis) not in free:
                bad.append((name, (dtype, tuple(n + (i == axis) for i, n in enumerate(ne)))))
    for name, what in bad:
        with pytest.raises(InternalError, match=f"{op}.*: operands do not fit"):
            append(op, **{name: what})


def test_rows_that_no_16_bytes_fit_are_refused() -> None:
    with Context(64, 8) as context:
        b = Builder(context, 8)
        made = {name: b.leaf(*what, name) for name, what in OPS["fetch_rows"].fits.items()}
        assert b.fetch_rows(*{**made, "source": strided(b, "source", 64, 12, 68)}.values())
        for name, n in (("source", 12), ("target", 9)):
            for stride in (65, 67):
                with pytest.raises(InternalError, match="fetch_rows: operands do not fit"):
                    b.fetch_rows(*{**made, name: strided(b, name, 64, n, stride)}.values())


@pytest.mark.parametrize("page_size", [0, 8, 24, -16])
def test_pages_of_other_sizes_are_refused(page_size: int) -> None:
    with Context(64, 8) as context:
        b = Builder(context, 8)
        made = [b.leaf(*what, name) for name, what in OPS["paged_attn"].fits.items()]
        with pytest.raises(InternalError, match="paged_attn"):
            b.paged_attn(*made, page_size, 1.0)
