"""Guesses about the next layer act where that makes tokens quicker."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from moegraph.experts import lookahead
from moegraph.experts.lookahead import MAX_GUESSES, LookAhead

N_LAYER = 40
TRIAL, KEPT = lookahead._N_TURN * lookahead._N_TURNS, lookahead._N_KEPT


def run(
    ahead: LookAhead,
    n_tokens: int,
    gain: float = 0.1,
    right: float = 0.6,
    base: Callable[[int], float] = lambda token: 3e-3,
) -> int:
    """Decode tokens, guesses right with a probability and worth a gain; count what is fetched."""
    rng, n_fetched = random.Random(n_tokens), 0
    for token in range(n_tokens):
        for il in range(1, N_LAYER if ahead.acts else 0):
            cold = [10, 11, 12]
            n_fetched += len(ahead.guess(il, cold))
            ahead.judge(il, [e for e in cold if rng.random() < right])
        seconds = base(token) * (1 - gain if ahead.acts else 1) * rng.uniform(0.98, 1.02)
        ahead.end_token(30e-3 if token % 20 == 0 else seconds)
    return n_fetched


def test_guesses_that_make_tokens_quicker_act():
    ahead = LookAhead(N_LAYER - 1)
    assert run(ahead, TRIAL) == TRIAL // 2 * (N_LAYER - 1) * MAX_GUESSES
    assert ahead.acts
    assert run(ahead, KEPT) == KEPT * (N_LAYER - 1) * MAX_GUESSES
    assert 0.58 < ahead.n_right / ahead.n_guessed < 0.62
    assert run(ahead, TRIAL) == TRIAL // 2 * (N_LAYER - 1) * MAX_GUESSES, "tried again"
    assert ahead.acts


@pytest.mark.parametrize("gain", [-0.1, 0.0])
def test_guesses_that_do_not_are_tried_and_left(gain):
    ahead = LookAhead(N_LAYER - 1)
    run(ahead, TRIAL, gain)
    assert not ahead.acts
    assert run(ahead, KEPT, gain) == 0
    run(ahead, TRIAL, 0.1)
    assert ahead.acts, "the next time they are worth it"


@pytest.mark.parametrize("gain", [-0.05, 0.05])
def test_what_changes_meanwhile_does_not_decide(gain):
    for base in (lambda token: 3e-3 * (1 + 0.5 ** (token / 32)), lambda token: 3e-3 + 1e-5 * token):
        ahead = LookAhead(N_LAYER - 1)
        run(ahead, TRIAL, gain, base=base)
        assert ahead.acts == (gain > 0)


@pytest.mark.parametrize("judged", [None, 7])
def test_a_guess_that_nobody_needed_was_wrong(judged):
    ahead = LookAhead(N_LAYER - 1)
    ahead.guess(3, [1, 2, 5])
    if judged is not None:
        ahead.judge(judged, [1, 2])  # of another layer
    ahead.guess(4, [6])
    ahead.judge(4, [6])
    assert (ahead.n_guessed, ahead.n_right) == (3, 1)


def test_where_no_layer_can_be_foreseen_nothing_acts():
    ahead = LookAhead(0)
    for _ in range(3 * TRIAL):
        assert not ahead.acts
        ahead.end_token(1e-3)
