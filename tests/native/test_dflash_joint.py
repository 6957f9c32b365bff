"""Drafts of several sequences at once are those of each alone, but for rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.drafter_pair import CHANGES, N_VOCAB, TOLERANCE, Pair, pairs

from moegraph.draft.drafter import Draft
from moegraph.engine import Engine
from moegraph.ggml.lib import C, ffi
from moegraph.runner.sweep_batch import SweepBatch

Open = Callable[..., Engine]
ANCHORS = {0: 7, 1: 30, 2: 7, 3: 501}
# Layers without a window see the same. With one, later rows of a block see a little farther back.
FULL: dict[str, Any] = {"windows": "ff", "n_swa": 0}
CASES: dict[str, tuple[dict[str, Any], float]] = {
    "full": (FULL, TOLERANCE),
    "causal": ({**FULL, "is_causal": True}, TOLERANCE),
    "dspark": ({**FULL, **CHANGES["dspark"]}, TOLERANCE),
    "reduced": ({**FULL, **CHANGES["reduced"]}, TOLERANCE),
    "window": ({"windows": "sf", "n_swa": 100}, 1.2),
}


@pytest.fixture
def pair(open_engine: Open, model_path: Callable[[str], Path], tmp_path: Path) -> Any:
    """Return a function that makes a pair, closed after the test."""
    with pairs(open_engine, model_path, tmp_path) as make:
        yield lambda **changes: make(settings={"n_seq": 4}, **changes)


def read(both: Pair, slot: int, n: int) -> None:
    """Have a sequence read a prompt."""
    engine, ids = both.engine, both.tokens(n)
    readers = both.drafter.prompt_readers(slot, ids, engine.state.n_past[slot])
    sweep = engine.passes.begin_prompts([SweepBatch(ids, slot=slot, readers=readers, greedy=True)])
    while engine.passes.step_prompt(sweep):
        pass


def alone(both: Pair, anchors: dict[int, int], n: int, n_top: int) -> list[Draft]:
    return [both.drafter.draft(slot, anchor, n, n_top) for slot, anchor in anchors.items()]


def compare(joint: Sequence[Draft], single: Sequence[Draft], tolerance: float) -> None:
    """Joint drafts have the same log probabilities for the tokens that they name."""
    assert len(joint) == len(single)
    for one, other in zip(joint, single):
        assert one.tokens.shape == other.tokens.shape and one.problem(N_VOCAB) == ""
        assert one.log_p is not None and other.log_p is not None
        np.testing.assert_allclose(one.log_p, other.log_p, atol=tolerance)
        assert (one.confidence is None) == (other.confidence is None)
        if one.confidence is not None and other.confidence is not None:
            np.testing.assert_allclose(one.confidence, other.confidence, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_each_alone(pair: Callable[..., Pair], name: str) -> None:
    """Of sequences of different lengths, until rings are full, in any order and of some only."""
    changes, tolerance = CASES[name]
    both = pair(**changes)
    drafter = both.drafter
    assert drafter.joins
    for round_, lengths in enumerate(((3, 40, 17, 0), (130, 20, 300, 64))):
        for slot, n in enumerate(lengths):
            if n:
                read(both, slot, n)
        for chosen in ((0, 1, 2, 3), (3, 1), (2, 0, 1)):
            anchors = {slot: ANCHORS[slot] for slot in chosen}
            for n in (7, 3) if round_ else (7,):
                compare(drafter.draft_all(anchors, n, 4), alone(both, anchors, n, 4), tolerance)
    # what the sequences hold matters
    drafts = drafter.draft_all({0: 7, 2: 7}, 7, 4)
    assert drafts[0].log_p is not None and drafts[1].log_p is not None
    assert np.abs(drafts[0].log_p - drafts[1].log_p).max() > 2 * tolerance


def test_nan_of_one_sequence_is_its_own(pair: Callable[..., Pair]) -> None:
    both = pair(**FULL)
    for slot in range(4):
        read(both, slot, 20)
    before = both.drafter.draft_all(ANCHORS, 7, 3)
    ring = both.drafter._rings
    bad = np.full(both.shape.n_head_kv * both.shape.head_dim, np.nan, np.float16)
    row = int(ring.rows(ring.kind[0], 2, np.array([4]))[0])
    C.ggml_backend_tensor_set(ring.k[0], ffi.from_buffer(bad), row * bad.nbytes, bad.nbytes)
    after = both.drafter.draft_all(ANCHORS, 7, 3)
    assert [draft.problem(N_VOCAB) != "" for draft in after] == [False, False, True, False]
    for slot in (0, 1, 3):
        np.testing.assert_array_equal(before[slot].log_p, after[slot].log_p)
