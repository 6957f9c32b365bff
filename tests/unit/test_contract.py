"""How the CUDA contract is judged: each kind of error is noticed, and noise is not."""

from __future__ import annotations

import numpy as np
import pytest
from regression.contract import (
    judge_rows,
)

N_VOCAB = 64
KVS = ("f16", "q8_0")
Key = tuple[str, str]


def noisy(rows: dict[Key, np.ndarray], seed: int, size: float) -> dict[Key, np.ndarray]:
    """Add noise of a relative size, and to one row in twenty what a flipped expert does."""
    rng = np.random.default_rng(seed)
    made = {}
    for key, value in rows.items():
        noise = size * rng.standard_normal(value.shape)
        noise[rng.random(len(value)) < 0.05] *= 5
        made[key] = value + noise
    return made


@pytest.fixture
def theirs() -> dict[Key, np.ndarray]:
    rng = np.random.default_rng(0)
    kinds = {"prompt": 371, "single": 257}
    sizes = {(kind, kv): (n, N_VOCAB) for kv in KVS for kind, n in kinds.items()}
    return {key: rng.standard_normal(size) for key, size in sizes.items()}


def failing(ours: dict, theirs: dict, other: dict) -> list[str]:
    return [diff.what for diff in judge_rows(ours, theirs, other) if not diff.within]


@pytest.mark.parametrize("seed", range(20))
def test_as_much_noise_as_upstreams_own_passes(theirs: dict, seed: int) -> None:
    ours, other = noisy(theirs, 2 * seed + 1, 0.03), noisy(theirs, 2 * seed + 2, 0.03)
    assert failing(ours, theirs, other) == []


def test_single_rows_that_are_all_off_are_not_hidden_by_prompts(theirs: dict) -> None:
    """Times 1.8 in a kind with two fifths of the rows: all together it would be below 2."""
    other = noisy(theirs, 1, 0.03)
    ours = noisy(theirs, 2, 0.03) | {
        key: value for key, value in noisy(theirs, 3, 0.03 * 1.8).items() if key[0] == "single"
    }
    wrong = failing(ours, theirs, other)
    assert "NMSE of all single rows" in wrong and "median single row, KV f16" in wrong
    assert not any("prompt" in what for what in wrong if "worst" not in what)


def test_one_wrong_row_is_named(theirs: dict) -> None:
    ours, other = noisy(theirs, 2, 0.03), noisy(theirs, 1, 0.03)
    ours["single", "q8_0"][91] += 0.4**0.5 * np.random.default_rng(5).standard_normal(N_VOCAB)
    assert failing(ours, theirs, other) == ["worst row (single row 91, KV q8_0)"]
    ours["single", "q8_0"][91, 3] = np.nan
    assert "worst row (single row 91, KV q8_0)" in failing(ours, theirs, other)
