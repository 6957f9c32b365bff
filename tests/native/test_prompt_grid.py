"""Prompts layer by layer have the bits of passes: some of all cases of helpers/prompt_grid.py.

The cases are those of residencies, chunk sizes, sweeps, and what happens on the way; the script
lists all of them. A seed chooses other ones here for each length.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from helpers import prompt_grid as grid

from moegraph.engine import Engine


@pytest.mark.parametrize(
    ("preset", "n", "n_cases", "seed"),
    [("mini35b", 300, 6, 1), ("kquant40", 300, 4, 2), ("legacy32", 300, 4, 3),
     ("mini35b", 2000, 2, 4)],
)  # fmt: skip
def test_a_prompt_has_the_bits_of_passes_whatever_happens(
    open_engine: Callable[..., Engine], preset: str, n: int, n_cases: int, seed: int
) -> None:
    def load(settings: dict[str, Any]) -> Engine:
        return open_engine(preset, **settings)

    chosen = random.Random(seed).sample(grid.cases([n]), n_cases)
    found = {case: wrong for case, wrong in grid.run(load, chosen) if wrong}
    assert not found


def test_the_grid_is_as_large_as_it_says_and_sees_a_difference(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = grid.Case(150, 64, "layered", 0.4, ("cancel", 0.3))
    assert len(grid.cases([300, 2000, 9000])) == 3 * 3 * 7 * 2 * 5
    assert case.sweep_rows == 64

    def load(settings: dict[str, Any]) -> Engine:
        engine = open_engine(**settings)
        if engine.runner.mode == "layered":  # one that forgets nothing when a prompt is cancelled
            monkeypatch.setattr(engine.state, "reset", lambda *_: None)
            monkeypatch.setattr(engine.state, "restore", lambda *_: None)
        return engine

    ((_, wrong),) = grid.run(load, [case])
    assert wrong.startswith("cancelled after")
