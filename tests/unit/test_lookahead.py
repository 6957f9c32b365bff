"""Guesses about the next layer act while enough of them are right."""

from __future__ import annotations

import random

import pytest

from moegraph.experts.lookahead import MAX_GUESSES, LookAhead

N_LAYER = 40
COPY_S = 40e-6


def look_ahead(n_layers: int = N_LAYER - 1, copy_s: float = COPY_S) -> LookAhead:
    return LookAhead(n_layers, copy_s)


def run(
    ahead: LookAhead, n_tokens: int, right: float, seed: int = 0, missing: float = 1.0
) -> int:
    """Guess experts of layers that lack some, right with a probability; count those to fetch."""
    rng, n_fetched = random.Random(seed), 0
    for _ in range(n_tokens):
        ahead.begin_token()
        for il in range(1, N_LAYER if ahead.guesses else 0):
            cold = [10, 11, 12] if rng.random() < missing else []
            n_fetched += len(ahead.guess(il, cold))
            ahead.judge(il, [e for e in cold if rng.random() < right])
    return n_fetched


def test_good_guesses_act_soon_and_bad_ones_never():
    good, bad = look_ahead(), look_ahead()
    assert run(good, 10, 0.6) > 0.8 * 10 * (N_LAYER - 1) * MAX_GUESSES
    assert good.acts
    assert run(bad, 10, 0.1) == 0
    assert bad.n_guessed == 10 * (N_LAYER - 1) * MAX_GUESSES
    assert 0.05 < bad.n_right / bad.n_guessed < 0.15


def test_guesses_that_turn_bad_stop_and_start_again_when_they_are_good():
    ahead = look_ahead()
    run(ahead, 20, 0.6)
    run(ahead, 30, 0.2, seed=1)
    assert not ahead.acts
    assert run(ahead, 2, 0.2, seed=2) == 0
    run(ahead, 30, 0.6, seed=3)
    assert ahead.acts


@pytest.mark.parametrize(("missing", "right"), [(1.0, 0.05), (0.05, 0.6), (0.0, 0.6)])
def test_guesses_that_save_less_than_they_cost_pause(missing, right):
    ahead = look_ahead()
    run(ahead, 64, right, missing=missing)
    assert not ahead.guesses
    before = ahead.n_guessed
    run(ahead, 1000, right, missing=missing)
    assert ahead.n_guessed == before, "a break"
    run(ahead, 100, 0.6, seed=1)
    assert ahead.guesses and ahead.n_guessed > before, "they are tried again"


def test_the_slower_the_copy_the_sooner_guesses_pay():
    slow, quick = look_ahead(copy_s=400e-6), look_ahead(copy_s=10e-6)
    for ahead in (slow, quick):
        run(ahead, 64, 0.5, missing=0.1)
    assert slow.guesses and not quick.guesses


def test_where_no_layer_can_be_foreseen_nothing_is_guessed():
    ahead = look_ahead(0)
    for _ in range(3000):
        ahead.begin_token()
        assert not ahead.guesses


@pytest.mark.parametrize("judged", [None, 7])
def test_a_guess_that_nobody_needed_was_wrong(judged):
    ahead = look_ahead()
    ahead.guess(3, [1, 2, 5])
    if judged is not None:
        ahead.judge(judged, [1, 2])  # of another layer
    ahead.guess(4, [6])
    ahead.judge(4, [6])
    assert (ahead.n_guessed, ahead.n_right) == (3, 1)


def test_nothing_cold_is_no_guess():
    ahead = look_ahead()
    for _ in range(100):
        assert not ahead.guess(1, [])
        ahead.judge(1, [4])
    assert ahead.n_guessed == 0 and not ahead.acts
