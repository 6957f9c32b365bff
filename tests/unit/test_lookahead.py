"""Guesses about the next layer act where that makes tokens quicker."""

from __future__ import annotations

import random

import pytest

from moegraph.experts import lookahead
from moegraph.experts.lookahead import MAX_GUESSES, LookAhead

N_LAYER = 40
TRIAL, KEPT = lookahead._N_TRIAL, lookahead._N_KEPT


def run(
    ahead: LookAhead, n_tokens: int, right: float = 0.6, gain: float = 0.1, seed: int = 0
) -> int:
    """Decode tokens, guesses right with a probability and worth a gain; count what is fetched."""
    rng, n_fetched = random.Random(seed), 0
    for token in range(n_tokens):
        for il in range(1, N_LAYER if ahead.guesses else 0):
            cold = [10, 11, 12]
            n_fetched += len(ahead.guess(il, cold))
            ahead.judge(il, [e for e in cold if rng.random() < right])
        seconds = 3e-3 * (1 - gain if ahead.acts else 1) * rng.uniform(0.98, 1.02)
        ahead.end_token(30e-3 if token % 20 == 0 else seconds)
    return n_fetched


def test_guesses_that_make_tokens_quicker_act():
    ahead = LookAhead(N_LAYER - 1)
    assert run(ahead, TRIAL) == 0, "first they are judged"
    assert ahead.acts
    assert run(ahead, TRIAL + KEPT) == (TRIAL + KEPT) * (N_LAYER - 1) * MAX_GUESSES
    assert 0.58 < ahead.n_right / ahead.n_guessed < 0.62
    assert ahead.guesses and not ahead.acts, "and from time to time they are judged again"
    run(ahead, 2 * TRIAL)
    assert ahead.acts


@pytest.mark.parametrize("gain", [-0.1, 0.0])
def test_guesses_that_do_not_are_tried_and_left(gain):
    ahead = LookAhead(N_LAYER - 1)
    run(ahead, 2 * TRIAL, gain=gain)
    assert not ahead.guesses and not ahead.acts
    before = ahead.n_guessed
    assert run(ahead, KEPT - 1, gain=gain) == 0 and ahead.n_guessed == before
    run(ahead, 1 + 2 * TRIAL, gain=0.1)
    assert ahead.acts, "the next time they are worth it"


def test_guesses_that_are_mostly_wrong_are_not_tried():
    ahead = LookAhead(N_LAYER - 1)
    assert run(ahead, 3 * KEPT, right=0.1) == 0
    assert 0 < ahead.n_guessed < 4 * TRIAL * (N_LAYER - 1) * MAX_GUESSES


@pytest.mark.parametrize("judged", [None, 7])
def test_a_guess_that_nobody_needed_was_wrong(judged):
    ahead = LookAhead(N_LAYER - 1)
    ahead.guess(3, [1, 2, 5])
    if judged is not None:
        ahead.judge(judged, [1, 2])  # of another layer
    ahead.guess(4, [6])
    ahead.judge(4, [6])
    assert (ahead.n_guessed, ahead.n_right) == (3, 1)


def test_where_nothing_is_missing_or_can_be_foreseen_nothing_acts():
    for ahead in (LookAhead(0), LookAhead(N_LAYER - 1)):
        for _ in range(3 * TRIAL):
            ahead.guess(1, [])
            ahead.end_token(1e-3)
        assert ahead.n_guessed == 0 and not ahead.acts and not ahead.guesses
