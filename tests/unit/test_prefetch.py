"""Guesses about the next layer act where that makes tokens quicker."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from moegraph.experts import prefetch
from moegraph.experts.prefetch import MAX_PREFETCH, PrefetchController

N_LAYER = 40
TRIAL, KEPT = prefetch._N_TURN * prefetch._N_TURNS, prefetch._N_KEPT


def run(
    controller: PrefetchController,
    n_tokens: int,
    gain: float = 0.1,
    right: float = 0.6,
    base: Callable[[int], float] = lambda token: 3e-3,
) -> int:
    """Decode tokens, guesses right with a probability and worth a gain; count what is fetched."""
    rng, n_fetched = random.Random(n_tokens), 0
    for token in range(n_tokens):
        for il in range(1, N_LAYER if controller.enabled else 0):
            cold = [10, 11, 12]
            n_fetched += len(controller.predicted(il, cold))
            controller.score(il, [e for e in cold if rng.random() < right])
        seconds = base(token) * (1 - gain if controller.enabled else 1) * rng.uniform(0.98, 1.02)
        controller.end_token(30e-3 if token % 20 == 0 else seconds)
    return n_fetched


def test_guesses_that_make_tokens_quicker_act():
    controller = PrefetchController(N_LAYER - 1)
    assert run(controller, TRIAL) == TRIAL // 2 * (N_LAYER - 1) * MAX_PREFETCH
    assert controller.enabled
    assert run(controller, KEPT) == KEPT * (N_LAYER - 1) * MAX_PREFETCH
    assert 0.58 < controller.n_right / controller.n_predicted < 0.62
    assert run(controller, TRIAL) == TRIAL // 2 * (N_LAYER - 1) * MAX_PREFETCH, "tried again"
    assert controller.enabled


@pytest.mark.parametrize("gain", [-0.1, 0.0])
def test_guesses_that_do_not_are_tried_and_left(gain):
    controller = PrefetchController(N_LAYER - 1)
    run(controller, TRIAL, gain)
    assert not controller.enabled
    assert run(controller, KEPT, gain) == 0
    run(controller, TRIAL, 0.1)
    assert controller.enabled, "the next time they are worth it"


@pytest.mark.parametrize("gain", [-0.05, 0.05])
def test_what_changes_meanwhile_does_not_decide(gain):
    for base in (lambda token: 3e-3 * (1 + 0.5 ** (token / 32)), lambda token: 3e-3 + 1e-5 * token):
        controller = PrefetchController(N_LAYER - 1)
        run(controller, TRIAL, gain, base=base)
        assert controller.enabled == (gain > 0)


@pytest.mark.parametrize("scored", [None, 7])
def test_a_guess_that_nobody_needed_was_wrong(scored):
    controller = PrefetchController(N_LAYER - 1)
    controller.predicted(3, [1, 2, 5])
    if scored is not None:
        controller.score(scored, [1, 2])  # of another layer
    controller.predicted(4, [6])
    controller.score(4, [6])
    assert (controller.n_predicted, controller.n_right) == (3, 1)


def test_where_no_layer_can_be_foreseen_nothing_acts():
    controller = PrefetchController(0)
    for _ in range(3 * TRIAL):
        assert not controller.enabled
        controller.end_token(1e-3)
