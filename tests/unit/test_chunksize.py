"""How many rows of a prompt are computed at a time: the most that experts can afford."""

from __future__ import annotations

import pytest

from moegraph.config import CPU_ROWS, EngineConfig
from moegraph.placement.memory import choose_rows
from moegraph.placement.planner import Footprint

GIB = 1 << 30


def need_of(n_rows: int) -> Footprint:
    """Return about what a 35B-A3B needs: 19.5 GB of experts, 0.6 MiB of memory for each row."""
    return Footprint(
        256, 8, (1_900_000,) * 40, weights=2 * GIB, kv=GIB // 8, state=GIB // 8,
        compute=GIB // 2 + n_rows * 600_000, other=GIB // 4, staging=GIB // 4,
    )  # fmt: skip


def chosen(gib: float, **settings: int) -> int:
    return choose_rows(EngineConfig(**settings), round(gib * GIB), need_of)


@pytest.mark.parametrize(
    ("gib", "n_rows"), [(4, 128), (6, 512), (8, 512), (12, 1024), (16, 1024), (20, 2048)]
)
def test_more_memory_gives_longer_chunks(gib: float, n_rows: int) -> None:
    assert chosen(gib) == n_rows
    least = need_of(128)
    more = need_of(n_rows).fixed - least.fixed
    assert n_rows == 2048 or more <= (gib * GIB - least.fixed - least.staging) / 12


def test_all_experts_stay_resident_if_they_can() -> None:
    """Longer chunks would take a twelfth of the memory, and cost some experts their slots."""
    for n_rows in (2048, 1024):
        need = need_of(n_rows)
        assert chosen((need.fixed + need.experts) / GIB) == n_rows


def test_the_users_number_and_no_limit() -> None:
    assert chosen(4, n_ubatch=4096) == 4096
    assert choose_rows(EngineConfig(), None, need_of) == CPU_ROWS == EngineConfig().n_rows
    assert chosen(-1) == 128, "the planner then says what is missing"
