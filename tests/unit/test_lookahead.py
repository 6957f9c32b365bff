"""Guesses about the next layer act while enough of them are right."""

from __future__ import annotations

import random

import pytest

from moegraph.experts.lookahead import MAX_GUESSES, LookAhead

N_LAYER = 40


def run(ahead: LookAhead, n_tokens: int, right: float, seed: int = 0) -> int:
    """Guess two experts a layer, right with a probability; return how many were to be fetched."""
    rng, n_fetched = random.Random(seed), 0
    for _ in range(n_tokens):
        for il in range(1, N_LAYER):
            cold = [10, 11, 12]
            n_fetched += len(ahead.guess(il, cold))
            ahead.judge(il, [e for e in cold if rng.random() < right])
    return n_fetched


def test_good_guesses_act_soon_and_bad_ones_never():
    good, bad = LookAhead(), LookAhead()
    assert run(good, 10, 0.6) > 0.8 * 10 * (N_LAYER - 1) * MAX_GUESSES
    assert good.acts and not good.is_over
    assert run(bad, 10, 0.1) == 0
    assert bad.n_guessed == 10 * (N_LAYER - 1) * MAX_GUESSES
    assert 0.05 < bad.n_right / bad.n_guessed < 0.15


def test_guesses_that_turn_bad_stop_and_start_again_when_they_are_good():
    ahead = LookAhead()
    run(ahead, 20, 0.6)
    run(ahead, 30, 0.2, seed=1)
    assert not ahead.acts
    assert run(ahead, 2, 0.2, seed=2) == 0
    run(ahead, 30, 0.6, seed=3)
    assert ahead.acts


def test_guesses_that_are_hopeless_end():
    ahead = LookAhead()
    run(ahead, 40, 0.02)
    assert not ahead.is_over
    run(ahead, 60, 0.02, seed=1)
    assert ahead.is_over


@pytest.mark.parametrize("judged", [None, 7])
def test_a_guess_that_nobody_needed_was_wrong(judged):
    ahead = LookAhead()
    ahead.guess(3, [1, 2, 5])
    if judged is not None:
        ahead.judge(judged, [1, 2])  # of another layer
    ahead.guess(4, [6])
    ahead.judge(4, [6])
    assert (ahead.n_guessed, ahead.n_right) == (3, 1)


def test_nothing_cold_is_no_guess():
    ahead = LookAhead()
    for _ in range(100):
        assert not ahead.guess(1, [])
        ahead.judge(1, [4])
    assert ahead.n_guessed == 0 and not ahead.acts and not ahead.is_over
