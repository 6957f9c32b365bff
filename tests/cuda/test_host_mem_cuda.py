"""Three tiers on CUDA: experts that move between the device, host memory and the file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.shared import greedy_tokens, prompt
from helpers.tiers import check_held, room

from moegraph.engine import Engine
from moegraph.resident import layout
from moegraph.runner import misses


@pytest.mark.parametrize("policy", ["lfu", "lru"])
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_texts_are_those_of_enough_memory_and_host_memory_holds_what_it_says(
    open_cuda: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, policy: str, share: float
) -> None:
    for module in (layout, misses):
        monkeypatch.setattr(module, "n_at_once", lambda size: 2)
    plain = open_cuda(deterministic=True)
    streamed = open_cuda(deterministic=True, cache_slots=40, host_pin="none")
    host_mem = room(streamed, share)
    engine = open_cuda(deterministic=True, cache_slots=40, policy=policy, host_mem=host_mem)
    assert engine.stage.store.n_held and not engine.expert_stats().n_fetching
    before = engine.expert_stats()
    for seed in range(3):
        engine.reset()
        engine.prefill(prompt(engine, 300, seed=seed), greedy=True)  # experts cross in a ring
        check_held(engine)
        plain.reset()
        engine.reset()
        ids = prompt(engine, 20, seed=seed)
        assert greedy_tokens(engine, ids, 60) == greedy_tokens(plain, ids, 60)
        rows = prompt(engine, 16, seed=seed + 9)
        found = [one.forward(rows, all_rows=True).require_logits() for one in (engine, plain)]
        np.testing.assert_array_equal(*found)
        check_held(engine)
    moved = engine.expert_stats().since(before)
    assert 0 < moved.n_file_bytes < moved.n_bytes_to_device
