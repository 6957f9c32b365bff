"""Generations that the MTP block drafts: the same text, and the block's K and V are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.drafters import damage
from helpers.scripted_drafts import AnyController
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.passes.speculation import Speculation
from moegraph.runner import NotFinite
from moegraph.runner.inspect import read_tensor
from moegraph.sampling import SamplingParams

Open = Callable[..., Engine]
RESIDENCIES: dict[str, dict[str, Any]] = {
    "whole": {"mode": "whole"},
    "60": {"cache_slots": 77, "pin_layers": 0, "miss": "stream"},
    "25": {"cache_slots": 32, "pin_layers": 0, "miss": "cpu"},
    "38": {"cache_slots": 38, "pin_layers": 0, "miss": "stream"},
}
SAMPLERS = {"greedy": None, "sampled": SamplingParams(seed=3, temperature=0.9)}


def drafting(open_engine: Open, preset: str, seed: int = 0, **settings: Any) -> Engine:
    """Open an engine in reference mode that drafts with its MTP block, in any shape."""
    engine = open_engine(preset, cpu_reference=True, spec="mtp", n_draft=15, **settings)
    controller = AnyController(["mtp"], seed=seed)
    n_vocab = engine.hparams.n_vocab
    engine.speculation = Speculation(engine._loaded.drafters, controller, n_vocab, 16)
    return engine


def text(engine: Engine, ids: np.ndarray, sampling: SamplingParams | None, n: int) -> list[int]:
    """Return the ids of an answer; what the sequence holds already may be reused."""
    events = engine.generate(ids, sampling, max_tokens=n, text=False, reuse=True, marks=[len(ids)])
    return [event.token for event in events]


def cache(engine: Engine, n: int) -> list[np.ndarray]:
    """Return the block's K and V rows of the first n positions, and the last output."""
    engine.speculation.settle(0)
    state, il = engine.state.states[0], engine.hparams.n_layer
    assert state.last_out is not None and state.n_past[0] >= n
    rows = state.pool.rows(np.array(0), np.arange(n))
    found = [read_tensor(t)[rows] for t in (state.k[il], state.v[il])]
    return [*found, read_tensor(state.last_out)[0]]


@pytest.mark.parametrize(("preset", "residency", "sampler"), [
    ("mini35b", "whole", "sampled"), ("mini35b", "60", "greedy"), ("mini35b", "25", "sampled"),
    ("float32", "60", "greedy"), ("glm4moe", "60", "sampled"), ("glm47flash", "38", "sampled"),
    ("qwen3next", "60", "sampled"),
])  # fmt: skip
def test_the_text_is_that_without_drafts(
    open_engine: Open, preset: str, sampler: str, residency: str
) -> None:
    sampling = SAMPLERS[sampler]
    plain = open_engine(preset, cpu_reference=True)
    engine = drafting(open_engine, preset, **RESIDENCIES[residency])
    ids = prompt(plain, 100, seed=4)
    answer = text(plain, ids, sampling, 40)
    assert text(engine, ids, sampling, 40) == answer
    # the conversation goes on; and another answer to the first message
    longer = np.concatenate([ids, answer, prompt(plain, 20, seed=5)]).astype(np.int32)
    assert text(engine, longer, sampling, 20) == text(plain, longer, sampling, 20)
    assert text(engine, ids, sampling, 40) == answer
    n_drafted = sum(step.n_draft > 0 for step in engine.speculation.controller.steps)
    assert n_drafted > 15


def test_after_a_text_the_block_has_what_a_prompt_gives_it(open_engine: Open) -> None:
    for seed in range(3):
        engine = drafting(open_engine, "mini35b", seed)
        ids = prompt(engine, 70, seed=seed)
        text(engine, ids, None, 50)
        held = np.array(engine.held(0), dtype=np.int32)
        found = cache(engine, len(held))
        fresh = drafting(open_engine, "mini35b")
        text(fresh, held, None, 1)
        for got, want in zip(found, cache(fresh, len(held)), strict=True):
            np.testing.assert_array_equal(got, want)
        engine.close()
        fresh.close()


def test_a_prompt_that_is_not_finite_leaves_no_nan(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding of one token is damaged. The next text is drafted as in a new engine."""
    used, new = (drafting(open_engine, "mini35b") for _ in range(2))
    for engine in (used, new):
        damage(engine, 7, monkeypatch)
    ids = prompt(new, 30)
    ids[ids == 7] = 1
    with pytest.raises(NotFinite):
        text(used, np.full(50, 7, np.int32), None, 4)
    assert text(used, ids, None, 1) == text(new, ids, None, 1)
    drafts = [engine._loaded.drafters[0].draft(0, 9, 3, 4) for engine in (used, new)]
    assert drafts[0].n_depth == 3 and drafts[0].problem(engine.hparams.n_vocab) == ""
    np.testing.assert_array_equal(drafts[0].tokens, drafts[1].tokens)
    np.testing.assert_array_equal(drafts[0].log_p, drafts[1].log_p)
    assert used.drain_messages() == []
