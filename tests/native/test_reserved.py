"""What loading reserves is enough for every pass, and the planner counts all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.tree_shapes import TREES, path

from moegraph.engine import Engine
from moegraph.placement.footprint import lacking_bytes, sweep_rows
from moegraph.resident.layout import PAGE, draft_room
from moegraph.units import round_up

Open = Callable[..., Engine]
N_VOCAB = 1000
MODES: list[dict[str, Any]] = [
    {"mode": "whole"},
    {"cache_slots": 48, "pin_layers": 0, "miss": "stream"},
    {"cache_slots": 48, "pin_layers": 0, "miss": "cpu", "type_k": "q8_0"},
]


def memory_of(engine: Engine) -> tuple[int, ...]:
    """Return what must not change: the shared block, whether it moved, room for drafted rows."""
    graphs = engine.runner.graphs
    return graphs.n_bytes, graphs.generation, engine.stage.state.drafts.n_rows


@pytest.mark.parametrize(
    ("settings", "pages", "n_seq", "n_draft"),
    [
        (MODES[0], False, 1, 7), (MODES[0], True, 12, 5), (MODES[1], False, 3, 0),
        (MODES[1], True, 1, 7), (MODES[2], False, 12, 5),
    ],
    ids=str,
)  # fmt: skip
def test_no_pass_needs_more_than_was_reserved(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, settings: dict, pages: bool,
    n_seq: int, n_draft: int,
) -> None:  # fmt: skip
    monkeypatch.setattr("moegraph.runner.base.can_page", lambda _: pages)
    # a prompt of few rows does not hide what the others need
    engine = open_engine(
        "legacy32", n_seq=n_seq, n_draft=n_draft, n_ubatch=n_draft + 1, n_ctx=512, **settings
    )
    rng, reserved = np.random.default_rng(n_seq + n_draft), memory_of(engine)
    assert reserved[2] == (draft_room(n_seq * (n_draft + 1)) if n_draft else 0)
    for turn in range(25):
        slots = rng.permutation(n_seq)[: rng.integers(1, n_seq + 1)].tolist()
        if turn % 12 == 0:
            slots = list(range(n_seq))
        n = 1 + (n_draft if turn % 12 == 0 else int(rng.integers(0, n_draft + 1)))
        greedy, tokens = bool(rng.integers(0, 2)), rng.integers(0, N_VOCAB, (len(slots), n))
        engine.forward(tokens[:, : 1 if turn % 2 else n], slots, greedy=greedy)
        if n_draft:
            lengths = rng.integers(1, n + 1, len(slots)).tolist()
            parents = [TREES[rng.integers(0, len(TREES))](n, rng) for _ in slots]
            engine.passes.verify(tokens, slots, parents, lengths, greedy=greedy)
            engine.collect()
            taken = {s: path(parents[i], lengths[i] - 1) for i, s in enumerate(slots)}
            engine.passes.commit(taken)
        assert memory_of(engine) == reserved, f"turn {turn}"


@pytest.mark.parametrize(
    ("settings", "n_seq", "n_draft"),
    [(MODES[0], 1, 15), (MODES[0], 12, 5), (MODES[1], 1, 0), (MODES[1], 4, 7), (MODES[2], 12, 5)],
    ids=str,
)
def test_the_plan_counts_what_is_reserved(
    open_engine: Open, settings: dict, n_seq: int, n_draft: int
) -> None:
    for n_ubatch in (16, 64):
        engine = open_engine(n_seq=n_seq, n_draft=n_draft, n_ubatch=n_ubatch, **settings)
        taken, plan = engine.memory(), engine.plan.bytes
        hp, n_ctx = engine.hparams, round_up(engine.n_ctx, PAGE)
        n_rows, lacking = sweep_rows(n_ubatch, n_ctx), 0
        if plan["staging"]:  # of which a part is what a sweep holds where experts may be missing
            lacking = lacking_bytes(hp, n_rows, n_ubatch, is_own=False)
            assert lacking <= plan["staging"]
        assert taken["compute_bytes"] <= plan["compute"] + lacking
        assert taken["state_bytes"] <= plan["state"]
        assert taken["kv_bytes"] <= plan["kv"]
