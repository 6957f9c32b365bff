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


@pytest.mark.parametrize("preset", ["mini35b", "float32"])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
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


def test_races_without_noise_are_won_by_the_likeliest(model_path: ModelPath) -> None:
    """So later steps follow what an earlier one has chosen, as in a chain without races."""
    with MtpModel(model_path("mini35b")) as model:
        model.read(np.arange(1, 60, dtype=np.int32))
        plain = model.drafter.draft(0, 5, 9, 4)
        rows = model.logits(9)
        drawn = model.drafter.draft(0, 5, 9, 4, race_at(1e-3))
        np.testing.assert_array_equal(drawn.tokens, plain.tokens)
        np.testing.assert_array_equal(model.logits(9), rows)
        np.testing.assert_allclose(drawn.log_p, plain.log_p, atol=1e-5)


def test_the_whole_draft_survives_the_samplers_own_race(model_path: ModelPath) -> None:
    """Without truncation of the distribution: every depth's first token wins there too."""
    race = race_at(1.0)
    with MtpModel(model_path("mini35b")) as model:
        model.read(np.arange(1, 60, dtype=np.int32))
        drawn = model.drafter.draft(0, 5, 12, 40, race)
        assert raced(drawn, race, 3).n_depth == 12
        likeliest = model.drafter.draft(0, 5, 12, 40)
        assert raced(likeliest, race, 3).n_depth < 12


def test_a_part_of_the_vocabulary_has_no_races(model_path: ModelPath) -> None:
    with MtpModel(model_path("mini35b"), n_vocab=320) as model:
        model.read(np.arange(1, 60, dtype=np.int32))
        plain = model.drafter.draft(0, 5, 5, 3)
        drawn = model.drafter.draft(0, 5, 5, 3, race_at(1.0))
        np.testing.assert_array_equal(drawn.tokens, plain.tokens)
