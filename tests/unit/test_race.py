"""Drafts that use the sampler's random numbers: right wherever the drafter's probabilities are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moegraph.draft.drafter import Draft, Race
from moegraph.draft.race import raced, raced_list
from moegraph.sampling import Sampler, SamplingParams

N_VOCAB = 200
OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}
SAMPLERS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "plain": OFF,
    "cold": {**OFF, "temperature": 0.3},
    "top-k": {**OFF, "top_k": 5, "temperature": 1.5},
    "top-p": {**OFF, "top_p": 0.8},
    "min-p": {**OFF, "min_p": 0.1},
    "top-p-0": {**OFF, "top_p": 0.0},
    "freezing": {**OFF, "temperature": 1e-30},
}


def sorted_draft(logits: np.ndarray, n_top: int) -> Draft:
    """Return a draft with the probabilities of a softmax of logits [n_depth, n_vocab]."""
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    order = np.argsort(-log_p, axis=1)[:, :n_top]
    listed = np.take_along_axis(log_p, order, axis=1)
    return Draft(order.astype(np.int32), listed.astype(np.float32))


def drawn(params: SamplingParams, position: int, logits: np.ndarray) -> list[int]:
    """Return what a sampler draws from each row, one position after another."""
    sampler = Sampler(params, N_VOCAB)
    sampler.accept_all([0] * position)
    found = []
    for row in logits:
        found.append(sampler.sample(row.astype(np.float32)))
        sampler.accept(found[-1])
    return found


def race_of(params: SamplingParams, position: int) -> Race:
    sampler = Sampler(params, N_VOCAB)
    return Race(params, lambda n: sampler.key_at(position + n))


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_drafter_with_the_targets_probabilities_is_right(name: str) -> None:
    """At every depth up to the first that the likeliest token does not win."""
    rng, n_wrong, n_other = np.random.default_rng(len(name)), 0, 0
    for seed in range(150):
        params = SamplingParams(**SAMPLERS[name], seed=seed)
        logits = rng.standard_normal((4, N_VOCAB)) * 2.5
        draft = sorted_draft(logits, N_VOCAB)
        expected = drawn(params, seed, logits)
        found = raced(draft, race_of(params, seed), 3)
        assert found.problem(N_VOCAB) == "" and found.tokens.shape == (found.n_depth, 3)
        n_wrong += found.tokens[:, 0].tolist() != expected[: found.n_depth]
        is_first = (draft.tokens[:, 0] == expected).tolist()
        n_other += not is_first[0]
        assert is_first[: found.n_depth - 1] == [True] * (found.n_depth - 1)
        assert found.n_depth == 4 or not is_first[found.n_depth - 1] or n_wrong
    assert n_wrong <= 1  # F32 rounds what is at the edge of top-p
    assert n_other > 10 or name in ("top-p-0", "freezing")


@pytest.mark.parametrize("name", SAMPLERS)
def test_lists_of_one_depth_begin_with_what_the_sampler_draws(name: str) -> None:
    rng, n_wrong = np.random.default_rng(len(name)), 0
    for seed in range(100):
        params = SamplingParams(**SAMPLERS[name], seed=seed)
        logits = rng.standard_normal((3, N_VOCAB)) * 2.5
        draft = sorted_draft(logits, N_VOCAB)
        assert draft.log_p is not None
        tokens, log_p = raced_list(draft.tokens, draft.log_p, race_of(params, seed), 2, 8)
        assert tokens.shape == log_p.shape == (3, 8) and (np.diff(log_p, axis=1) <= 0).all()
        for row, first in zip(logits, tokens[:, 0].tolist()):
            n_wrong += drawn(params, seed + 2, row[None]) != [first]
    assert n_wrong <= 1  # F32 rounds what is at the edge of top-p


def test_what_has_no_probabilities_stays_as_it_is() -> None:
    race = race_of(SamplingParams(seed=1), 0)
    lookup = Draft(np.array([[3], [4]], dtype=np.int32))
    assert raced(lookup, race, 1) is lookup
    assert raced(Draft.empty(), race, 1).n_depth == 0
    unlikely = Draft(
        np.array([[1, 2]], dtype=np.int32), np.array([[0.0, -np.inf]], dtype=np.float32)
    )
    found = raced(unlikely, race, 2)
    assert found.tokens.tolist() == [[1, 2]] and found.problem(9) == ""
