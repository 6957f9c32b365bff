"""In how many groups sequences decode: by what rounds take, with scripted times."""

from __future__ import annotations

import random

import pytest

from moegraph.loop.groupchoice import GroupChoice


def share(choice: GroupChoice, n_rows: int, gain: float, n: int, noise: float = 0.0) -> float:
    """Run n rounds; return the share of those in groups. gain: how much faster these are."""
    rng, n_split = random.Random(3), 0
    for _ in range(n):
        n_groups = choice.n_groups(n_rows)
        n_split += n_groups > 1
        seconds = n_rows * 1e-3 / (gain if n_groups > 1 else 1.0)
        choice.note(n_rows, n_groups, seconds * (1 + noise * rng.random()))
    return n_split / n


@pytest.mark.parametrize(("gain", "low", "high"), [(1.3, 0.95, 1.0), (0.8, 0.0, 0.01)])
def test_what_is_faster_is_taken(gain: float, low: float, high: float) -> None:
    choice = GroupChoice(2)
    share(choice, 16, gain, 100, 0.05)
    assert low <= share(choice, 16, gain, 20_000, 0.05) <= high


def test_a_pipeline_that_fills_and_graphs_that_are_built_do_not_count() -> None:
    choice, last, n_same = GroupChoice(2), 1, 0
    for _ in range(100):
        n_groups = choice.n_groups(16)
        n_same = n_same + 1 if n_groups == last else 0
        is_slow = n_groups > 1 and n_same < 6
        choice.note(16, n_groups, 1.0 if is_slow else 0.02 / n_groups)
        last = n_groups
    assert last == 2


def test_a_gain_that_comes_later_is_found_and_lost_again() -> None:
    choice = GroupChoice(2)
    share(choice, 16, 0.8, 1000)
    assert share(choice, 16, 1.4, 4000) > 0.5
    share(choice, 16, 0.7, 6000)
    assert share(choice, 16, 0.7, 2000) < 0.1
