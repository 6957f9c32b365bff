"""Stages: a model cut into ranges of layers gives the bits of the model in one piece."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from helpers.cache_rules import check_cache
from helpers.stages import MODES, Stages, assert_same, batches, new_config, new_stage

from moegraph.arch import ModelFile
from moegraph.errors import OutOfDeviceMemory
from moegraph.kinds import Kind
from moegraph.runner import LayeredRunner, WholeRunner


@pytest.mark.parametrize(
    ("preset", "mode", "cuts"),
    [
        *(("legacy32", mode, [4]) for mode in MODES),
        # stages of one layer: without recurrent states, and without attention
        ("float32", "whole", [1, 2, 3, 4]),
        ("float32", "stream", [1, 2]),
        ("mini35b", "fetch", [1, 3]),
        ("kquant40", "layered", [2]),
    ],
)
def test_stages_equal_one_stage(
    opened: Callable[[str], ModelFile], stack: ExitStack, preset: str, mode: str, cuts: list[int]
) -> None:
    file, config = opened(preset), new_config(**MODES[mode])
    one, cut = (Stages(file, at, config, stack) for at in ([], cuts))
    n_passes = 0
    for batch, paths in batches(file.hparams.n_vocab):
        assert_same(cut.run(batch), one.run(batch), batch)
        for slot, rows in paths.items():
            for stages in (one, cut):
                stages.runner.commit({slot: rows})
        n_passes += 1
    assert n_passes == 18
    whole, parts = one.states(), cut.states()
    assert whole.keys() == parts.keys()
    for key, array in whole.items():
        np.testing.assert_array_equal(parts[key], array, err_msg=str(key))
    if config.miss != "auto":
        check_misses(one, cut, mode)


def check_misses(one: Stages, cut: Stages, mode: str) -> None:
    """Check that experts were missing in all layers with few slots, and were counted once."""
    [whole] = one.runners
    assert isinstance(whole, LayeredRunner)
    counts = np.array(whole.residency.routing.counts)
    for runner in cut.runners:
        if isinstance(runner, WholeRunner):
            assert runner.stage.is_full
            continue
        assert isinstance(runner, LayeredRunner)
        residency = runner.residency
        check_cache(residency.cache)
        wanted = np.zeros_like(counts)
        wanted[list(runner.stage.layers)] = counts[list(runner.stage.layers)]
        np.testing.assert_array_equal(residency.routing.counts, wanted)
        misses = residency.cache.stats.misses
        partial = runner.stage.store.layers
        assert set(np.flatnonzero(misses).tolist()) == set(partial)
        fetching = residency.miss_mode(Kind.DECODE, 1).fetch_layers
        assert fetching == (frozenset(partial) if mode == "fetch" else frozenset())


@pytest.mark.parametrize("part", ["weights.Weights", "state.State", "store.ExpertStore"])
def test_a_stage_that_fails_closes_what_it_opened(
    opened: Callable[[str], ModelFile],
    no_leak: None,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
) -> None:
    """The part is made first, so that its own memory must be freed too."""
    file, name = opened("legacy32"), part.partition(".")[2]
    module = "moegraph.resident.stage"
    real = getattr(__import__(module, fromlist=[name]), name)

    def fails(*args: Any) -> None:
        real(*args)
        raise OutOfDeviceMemory("no room")

    monkeypatch.setattr(f"{module}.{name}", fails)
    with pytest.raises(OutOfDeviceMemory, match="no room"):
        new_stage(file, range(8), new_config(**MODES["fetch"]))
