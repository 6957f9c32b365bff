"""Drafts that follow winners, from lists of candidates."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.candidates_case import CandidatesBench, draw_words

from moegraph.draft.drawn import drawn
from moegraph.ggml.device import Device


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_draft_ends_before_a_row_that_is_not_finite(bad: int, value: float) -> None:
    rng = np.random.default_rng(3)
    device = Device("cpu", n_threads=1)
    with CandidatesBench(device, 600) as bench:
        rows = []
        for at in range(4):
            logits = rng.normal(size=600).astype(np.float32)
            if at == bad:
                logits[5] = value
            rows.append(bench.run(logits, draw_words(0.8, at)).reshape(-1).copy())
        draft = drawn(np.array(rows), 3)
    device.close()
    if bad:
        assert draft.n_depth == bad and not draft.problem(600)
        assert all(len(set(tokens)) == 3 for tokens in draft.tokens.tolist())
    else:
        assert "not numbers" in draft.problem(600)
