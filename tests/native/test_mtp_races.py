"""Chains of the MTP block that follow the winners of races, for sampled text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.mtp import MtpModel

from moegraph.draft.drafter import Race
from moegraph.draft.race import raced
from moegraph.sampling import SamplingParams, gumbel

ModelPath = Callable[[str], Path]
# of the draws after the anchor
KEYS = [(0x9E3779B97F4A7C15 * n) % (1 << 64) for n in range(3, 19)]


def race_at(temperature: float) -> Race:
    """Return races over all tokens."""
    params = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
    return Race(params, lambda depth: KEYS[depth])


@pytest.mark.parametrize(("preset", "temperature"), [("mini35b", 0.3), ("float32", 3.0)])
def test_each_step_goes_on_with_the_winner(
    model_path: ModelPath, no_leak: None, preset: str, temperature: float
) -> None:
    with MtpModel(model_path(preset), n_kept=8) as model:
        model.read(np.arange(1, 60, dtype=np.int32))
        draft = model.drafter.draft(0, 5, 9, 4, race_at(temperature))
        rows = model.logits(9).astype(np.float64)
        ids = np.arange(model.hp.n_vocab)
        for at, row in enumerate(rows):
            scores = row / temperature + gumbel(KEYS[at], ids)
            assert draft.tokens[at, 0] == scores.argmax()
            others = [i for i in np.argsort(-row, kind="stable") if i != draft.tokens[at, 0]]
            assert draft.tokens[at, 1:].tolist() == others[:3]
        exact = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(
            draft.log_p, np.take_along_axis(exact, draft.tokens.astype(np.int64), 1), atol=1e-3
        )
        if temperature == 3.0:
            assert (draft.tokens[:, 0] != rows.argmax(axis=1)).any()
        again = model.drafter.draft(0, 5, 4, 4, race_at(temperature))
        np.testing.assert_array_equal(again.tokens, draft.tokens[:4])
        assert draft.problem(model.hp.n_vocab) == ""


def test_the_whole_draft_survives_the_samplers_own_race(model_path: ModelPath) -> None:
    """Without truncation of the distribution: every depth's first token wins there too."""
    race = race_at(1.0)
    with MtpModel(model_path("mini35b")) as model:
        model.read(np.arange(1, 60, dtype=np.int32))
        drawn = model.drafter.draft(0, 5, 12, 40, race)
        assert raced(drawn, race, 3).n_depth == 12
        likeliest = model.drafter.draft(0, 5, 12, 40)
        assert raced(likeliest, race, 3).n_depth < 12
