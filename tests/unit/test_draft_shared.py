"""Passes of several sequences: drafts rest where they give fewer tokens a second."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from operator import mul

import pytest

from moegraph.draft.controller import Controller, SharedPasses
from moegraph.draft.plan import DraftSettings, Source, Step


def serve(
    passes: SharedPasses, n_passes: int, n_seqs: int, drafted_s: float, tokens_each: float
) -> tuple[float, int]:
    """Return the seconds of a token beside those without drafts, and the passes with drafts.

    A pass without drafts takes a second; tokens_each: of a pass with drafts, of each sequence.
    """
    rng, seconds, n_tokens, n_drafted = random.Random(1), 0.0, 0, 0
    for at in range(n_passes):
        drafts = passes.may_draft(n_seqs)
        n = n_seqs
        if drafts:
            n = sum(1 + (rng.random() < tokens_each - 1) for _ in range(n_seqs))
        took = (drafted_s if drafts else 1.0) * rng.uniform(0.95, 1.05)
        n_rows = 2 * n_seqs if drafts else n_seqs
        passes.observe(n_seqs, n, took if at % 5 else 0.0, n_rows)  # now and then it is not known
        seconds, n_tokens, n_drafted = seconds + took, n_tokens + n, n_drafted + drafts
    return seconds / n_tokens * n_seqs, n_drafted


def test_drafts_that_gain_go_on() -> None:
    cost, n_drafted = serve(SharedPasses(), 1000, 4, 1.4, 1.9)
    assert cost < 0.76 and n_drafted > 950


@pytest.mark.parametrize("drafted_s", [1.5, 2.0, 4.0])
def test_drafts_that_lose_are_tried_ever_less_often(drafted_s: float) -> None:
    cost, n_drafted = serve(SharedPasses(), 2000, 4, drafted_s, 1.4)
    assert 5 < n_drafted < 400
    assert cost < 1.04


def test_drafts_begin_again_where_they_gain_later() -> None:
    passes = SharedPasses()
    serve(passes, 300, 2, 3.0, 1.2)
    cost, _ = serve(passes, 2000, 2, 1.1, 1.9)
    assert cost < 0.8


# Seconds of passes by rows, and of a draft beside a pass of one row: of a 35B on an H200.
PASSES = {1: 2.6e-3, 2: 3.0e-3, 4: 4.0e-3, 8: 5.2e-3, 16: 6.5e-3, 32: 10e-3}
DFLASH = Source("dflash", 15, 0.35, 0.0, 0.7)


def pass_s(n_rows: int) -> float:
    below = max(n for n in PASSES if n <= n_rows)
    part = (n_rows - below) / below
    return PASSES[below] + (part * (PASSES[2 * below] - PASSES[below]) if part else 0.0)


def served(
    rates: tuple[float, ...], n_seqs: int, ratio: Callable[[int], float] = lambda n_rows: 1.0,
    source: Source = DFLASH,
) -> tuple[float, int]:  # fmt: skip
    """Return the speed beside that without drafts, and the passes with drafts of 400.

    rates: by depth, how often drafts are right, if those before are. Nothing is known of them.
    ratio: how many times as long as measured before a pass takes, by its rows. source: what drafts.
    """
    controller = Controller([source], DraftSettings())
    controller.calibrate(pass_s(1), {n: pass_s(n) for n in PASSES if n > 1})
    rng, reach = random.Random(1), list(accumulate(rates, mul))
    seconds, n_tokens, n_drafted = 0.0, 0, 0
    for _ in range(400):
        n = controller.choose_for(n_seqs, 100).n_draft
        n_rows, n_given = n_seqs * (n + 1), 0
        took = pass_s(n_rows) * ratio(n_rows)
        draft_s = DFLASH.fixed * pass_s(1)
        if n:
            took += draft_s * (1 + 0.2 * (n_seqs - 1) if source.joins else n_seqs)
        for _ in range(n_seqs):
            dice = rng.random()
            right = sum(dice < one for one in reach[:n])
            n_given += right + 1
            if n:
                ranks = (0,) * right + ((1,) if right < n else ())
                controller.observe(Step("dflash", 0.0, right + 1, n + 1, n, n, right, ranks))
        controller.observe_shared(n_seqs, n_given, took, n_rows)
        seconds, n_tokens, n_drafted = seconds + took, n_tokens + n_given, n_drafted + (n > 0)
    return n_tokens / seconds / (n_seqs / pass_s(n_seqs)), n_drafted


@pytest.mark.parametrize("n_seqs", [2, 4, 8])
def test_sequences_find_out_that_drafts_are_better_than_expected(n_seqs: int) -> None:
    speed, n_drafted = served((0.93, 0.9, 0.89, 0.88, 0.86, 0.86, 0.85), n_seqs)
    assert n_drafted > 200 and speed > {2: 1.8, 4: 1.5, 8: 1.02}[n_seqs]


@pytest.mark.parametrize("n_seqs", [4, 8])
def test_drafts_made_at_once_pay_where_others_do_not(n_seqs: int) -> None:
    rates = (0.8, 0.75, 0.75, 0.7, 0.7, 0.7, 0.7)
    apart, _ = served(rates, n_seqs)
    joint, n_drafted = served(rates, n_seqs, source=replace(DFLASH, joins=True))
    assert n_drafted > 300 and joint > max({4: 1.25, 8: 1.1}[n_seqs], 1.1 * apart)


def test_shorter_drafts_are_tried_where_wide_passes_take_longer_than_expected() -> None:
    """Such as passes that need many more experts than are on the device."""
    rates = (0.93, 0.9, 0.89, 0.88, 0.86, 0.86, 0.85)
    speed, n_drafted = served(rates, 4, lambda n_rows: 3.0 if n_rows > 16 else 1.0)
    assert n_drafted > 200 and speed > 1.2


@pytest.mark.parametrize("n_seqs", [2, 4, 8, 16])
@pytest.mark.parametrize("rates", [(0.2, 0.2, 0.2), (0.5, 0.4, 0.4)], ids=["hopeless", "story"])
def test_sequences_soon_find_out_that_drafts_do_not_pay(
    rates: tuple[float, ...], n_seqs: int
) -> None:
    speed, n_drafted = served(rates, n_seqs)
    assert n_drafted < 30 and speed > 0.97
