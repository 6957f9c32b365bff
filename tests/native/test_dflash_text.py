"""Generations that a DFlash drafter drafts: the same text, and its K and V are right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.drafters import damage, write_small
from helpers.scripted_drafts import AnyController
from helpers.shared import prompt

from moegraph.draft.dflash import DFlashDrafter, DSparkDrafter
from moegraph.engine import Engine
from moegraph.errors import ConfigError, ModelFileError, UnsupportedModel
from moegraph.passes.speculation import Speculation
from moegraph.runner import NotFinite
from moegraph.runner.inspect import read_tensor
from moegraph.sampling import SamplingParams

Open = Callable[..., Engine]
PRESET = "legacy32"
RESIDENCIES: dict[str, dict[str, Any]] = {
    "whole": {"mode": "whole"},
    "60": {"cache_slots": 154, "pin_layers": 0, "miss": "stream"},
    "25": {"cache_slots": 64, "pin_layers": 0, "miss": "cpu"},
}
SAMPLERS = {"greedy": None, "sampled": SamplingParams(seed=3, temperature=0.9)}


def drafting(open_engine: Open, path: Path, seed: int = 0, **settings: Any) -> Engine:
    """Open an engine in reference mode that drafts with a file, in any shape."""
    settings = {"n_draft": 15, **settings}
    engine = open_engine(PRESET, cpu_reference=True, spec="dflash", draft=str(path), **settings)
    [drafter] = engine._loaded.drafters
    shapes = ["plain", "chain", "ddtree"]
    if isinstance(drafter, DSparkDrafter):
        shapes += ["tree", "tree"]
    controller = AnyController([drafter.name], shapes, seed)
    engine.speculation = Speculation([drafter], controller, engine.hparams.n_vocab, 16)
    return engine


def drafter_of(engine: Engine) -> DFlashDrafter:
    """Return an engine's drafter."""
    [drafter] = engine._loaded.drafters
    assert isinstance(drafter, DFlashDrafter)
    return drafter


def text(engine: Engine, ids: np.ndarray, sampling: SamplingParams | None, n: int) -> list[int]:
    """Return the ids of an answer; what the sequence holds already may be reused."""
    events = engine.generate(ids, sampling, max_tokens=n, text=False, reuse=True, marks=[len(ids)])
    return [event.token for event in events]


def cache(engine: Engine, first: int, n_past: int) -> list[np.ndarray]:
    """Return K and V of every layer at positions [first, n_past), as far as rings hold them."""
    engine.speculation.settle(0)
    rings, found = drafter_of(engine)._rings, []
    for il, kind in enumerate(rings.kind):
        places = np.arange(max(first, n_past - rings.shapes[kind].n_cells), n_past)
        rows = rings.rows(kind, 0, places)
        found += [read_tensor(t[il])[rows] for t in (rings.k, rings.v)]
    return found


@pytest.mark.parametrize(
    ("sampler", "residency"), [("greedy", "whole"), ("sampled", "60"), ("greedy", "25")]
)
def test_the_text_is_that_without_drafts(
    open_engine: Open, tmp_path: Path, sampler: str, residency: str
) -> None:
    sampling, path = SAMPLERS[sampler], write_small(tmp_path, markov_rank=32)
    plain = open_engine(PRESET, cpu_reference=True)
    engine = drafting(open_engine, path, **RESIDENCIES[residency])
    for seed in range(3):
        ids = prompt(plain, 12 + 40 * seed, seed=seed)
        assert text(engine, ids, sampling, 24) == text(plain, ids, sampling, 24)
        engine.speculation.settle(0)
        span, n_past = drafter_of(engine)._rings.spans[0], engine.state.n_past[0]
        assert (span.first, span.n_past) == (0, n_past)
        got, held = cache(engine, 0, n_past), np.array(engine.held(0), dtype=np.int32)
        again = drafting(open_engine, path)
        text(again, held, None, 1)
        for a, b in zip(got, cache(again, 0, n_past)):
            assert a.any()
            np.testing.assert_array_equal(a, b)
        again.close()


@pytest.mark.parametrize("n_held", [0, 12])
def test_a_prompt_that_is_not_finite_leaves_no_nan(
    open_engine: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_held: int
) -> None:
    """The embedding of one token is damaged. The next text is drafted as in a new engine."""
    path, bad = write_small(tmp_path), 900
    used, new = (drafting(open_engine, path) for _ in range(2))
    for engine in (used, new):
        damage(engine, bad, monkeypatch)
    ids = prompt(new, 30)
    ids[ids == bad] = 1
    if n_held:
        text(used, ids[:n_held], None, 1)
    with pytest.raises(NotFinite):
        text(used, np.concatenate([ids[:n_held], [bad] * 50]).astype(np.int32), None, 4)
    rings = drafter_of(used)._rings
    assert not all(np.isfinite(read_tensor(t)).all() for t in rings.v)
    assert text(used, ids, None, 1) == text(new, ids, None, 1)
    assert all(np.isfinite(read_tensor(t)).all() for t in (*rings.k, *rings.v))
    for engine in (used, new):
        engine.speculation.settle(0)
    drafts = [drafter_of(engine).draft(0, 7, 7, 5) for engine in (used, new)]
    assert drafts[0].problem(1024) == "" and drafts[0].log_p is not None
    np.testing.assert_array_equal(drafts[0].tokens, drafts[1].tokens)
    # a prompt that goes on where one is held is computed in another order
    np.testing.assert_allclose(drafts[0].log_p, drafts[1].log_p, atol=1e-4)
    assert used.drain_messages() == []


def test_drafter_memory_is_planned(open_engine: Open, tmp_path: Path) -> None:
    sizes = []
    for keep in (False, True):
        path = write_small(tmp_path, matrices="BF16", n_ff=2048)
        engine = open_engine(PRESET, spec="dflash", draft=str(path), draft_keep_bf16=keep)
        taken = drafter_of(engine).n_bytes + engine.stage.hidden_states.n_bytes
        sizes.append(taken)
        assert taken <= engine.plan.bytes["drafters"] < 2 * taken
    assert sizes[1] > sizes[0] + 2_000_000


def test_drafts_of_a_part_of_the_vocabulary(open_engine: Open, tmp_path: Path) -> None:
    plain = open_engine(PRESET, cpu_reference=True)
    path = write_small(tmp_path)
    engine, all_of_it = (drafting(open_engine, path, draft_vocab=n) for n in (700, 0))
    ids = prompt(plain, 30)
    for one in (engine, all_of_it):
        assert text(one, ids, None, 16) == text(plain, ids, None, 16)
    for one in (engine, all_of_it):
        one.speculation.settle(0)
    few, every = (drafter_of(one).draft(0, 7, 7, 40) for one in (engine, all_of_it))
    special = every.tokens >= 1019  # kept, as the first 695 tokens are
    kept = special | (every.tokens < 695)
    assert not kept.all() and few.problem(1024) == ""
    for depth in range(7):
        wanted = every.tokens[depth, kept[depth]]
        np.testing.assert_array_equal(few.tokens[depth, : len(wanted)], wanted)


def test_settings_that_cannot_be(open_engine: Open, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--draft FILE"):
        open_engine(PRESET, spec="dflash")
    with pytest.raises(UnsupportedModel, match="does not fit"):
        open_engine(PRESET, spec="dflash", draft=str(write_small(tmp_path / "a", n_embd=512)))
    with pytest.raises(ModelFileError, match="no such file"):
        open_engine(PRESET, spec="dflash", draft=str(tmp_path / "none.gguf"))
    # on the CPU, and with several sequences, auto does not draft
    assert open_engine(PRESET, draft=str(tmp_path / "none.gguf")).speculation is None
