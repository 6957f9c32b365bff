"""Experts that prompts keep, on CUDA: slots hold what they should, and no result changes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.fetching_engines import check_sound
from helpers.shared import prompt

from moegraph.engine import Engine


@pytest.mark.parametrize("host_pin", ["none", "auto"])
@pytest.mark.parametrize("preset", ["mini35b", "legacy32", "kquant40", "iq64", "mxfp256"])
def test_prompts_keep_experts_and_have_the_same_results(
    open_cuda: Callable[..., Engine], preset: str, host_pin: str
) -> None:
    found = []
    for keeps in (True, False):
        engine = open_cuda(preset, cache_slots=100, miss="stream", host_pin=host_pin)
        residency = engine.runner.residency
        residency.guard, residency._exchanges = None, keeps
        ids = prompt(engine, 400, seed=6)
        found.append(engine.prefill(ids[:300], all_rows=True).require_logits())
        assert (residency.n_kept > 0) == keeps
        is_pinned = host_pin == "auto"  # others of the file would be read through a few blocks
        if is_pinned:
            check_sound(engine)
        for token in ids[300:310]:
            engine.forward([token])
        engine.prefill(ids[310:], greedy=True)
        engine.device.synchronize()
        if is_pinned:
            check_sound(engine)
    np.testing.assert_array_equal(*found)
