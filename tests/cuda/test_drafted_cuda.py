"""Drafts on a GPU: with `deterministic`, text with drafts is the text without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.scripted_drafts import AnyController, ScriptedDrafter, told_of
from helpers.shared import prompt

from moegraph.draft.lookup import LookUp
from moegraph.engine import Engine
from moegraph.passes.speculation import Speculation
from moegraph.sampling import SamplingParams

Open = Callable[..., Engine]
PLACEMENTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "layered": {"mode": "layered"},
    "fetched": {"pin_layers": 0, "cache_slots": 40, "miss": "stream", "host_pin": "all"},
    "streamed": {"pin_layers": 0, "cache_slots": 40, "miss": "stream", "host_pin": "none"},
}
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "defaults": {"seed": 1},
    "penalties": {"repeat_penalty": 1.3, "presence_penalty": 0.5, "repeat_last_n": 20, "seed": 3},
    "typical": {"temperature": 1.0, "top_k": 0, "typical_p": 0.9, "seed": 5},
}


def speculate(engine: Engine, *drafters: Any, seed: int = 0) -> AnyController:
    """Have an engine draft in all shapes by chance."""
    controller = AnyController([drafter.name for drafter in drafters], seed=seed)
    rows = engine.config.n_draft + 1
    engine.speculation = Speculation(drafters, controller, engine.hparams.n_vocab, rows)
    return controller


def tokens_of(engine: Engine, ids: list[int], name: str, n: int = 48) -> list[int | None]:
    params = SamplingParams(**SAMPLERS[name])
    return [event.token for event in engine.generate(ids, params, max_tokens=n, text=False)]


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_drafted_text_is_plain_text(open_cuda: Open, placement: str, name: str) -> None:
    """The bits of a prompt depend on which experts are resident, so each text has a new engine."""
    settings = {"deterministic": True, **PLACEMENTS[placement]}
    engine = open_cuda(**settings)
    ids = prompt(engine, 50).tolist()
    plain = tokens_of(engine, ids, name)
    engine = open_cuda(n_draft=15, spec="mtp", **settings)
    (block,) = engine._loaded.drafters
    known = ScriptedDrafter([*ids, *plain], engine.hparams.n_vocab, right=0.8)
    controller = speculate(engine, known, LookUp(), block)
    assert tokens_of(engine, ids, name) == plain
    assert told_of(engine, known) == engine.held(0)
    assert sum(step.n_accepted for step in controller.steps) >= 3 and not engine.drain_messages()
