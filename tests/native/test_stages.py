"""Stages: a model cut into ranges of layers gives the bits of the model in one piece."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.stages import MODES, Stages, assert_same, batches, new_config, new_stage

from moegraph.arch import ModelFile
from moegraph.engine import Engine
from moegraph.engine.loader import open_runner
from moegraph.errors import InternalError, OutOfDeviceMemory
from moegraph.kinds import Kind
from moegraph.runner import Batch, LayeredRunner, WholeRunner

ModelPath = Callable[[str], Path]


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
        residency.cache.check()
        wanted = np.zeros_like(counts)
        wanted[list(runner.stage.layers)] = counts[list(runner.stage.layers)]
        np.testing.assert_array_equal(residency.routing.counts, wanted)
        misses = residency.cache.stats.misses
        partial = runner.stage.store.layers
        assert set(np.flatnonzero(misses).tolist()) == set(partial)
        fetching = residency.miss_mode(Kind.DECODE, 1).fetch_layers
        assert fetching == (frozenset(partial) if mode == "fetch" else frozenset())


def test_a_stage_has_its_layers_and_no_others(
    opened: Callable[[str], ModelFile], stack: ExitStack
) -> None:
    file, config = opened("legacy32"), new_config(**MODES["stream"])
    n_layer = file.hparams.n_layer
    one, *cut = (
        stack.enter_context(closing(new_stage(file, layers, config)))
        for layers in (range(n_layer), range(3), range(3, 6), range(6, n_layer))
    )
    assert (one.has_embedding, one.has_head) == (True, True)
    assert [s.has_embedding for s in cut] == [True, False, False]
    assert [s.has_head for s in cut] == [False, False, True]
    for stage in cut:
        state, mine = stage.state, set(stage.layers)
        assert set(state.layer_states) | set(state.k) == mine
        assert set(stage.banks.n_slots) == mine
        assert set(stage.store.layers) == mine - {n_layer - 1}
        with pytest.raises(KeyError):
            stage.weights.layer((stage.layers.stop) % n_layer)
    for bytes_of in (
        lambda s: s.weights.n_bytes,
        lambda s: s.state.kv_bytes,
        lambda s: s.state.recurrent_bytes,
    ):
        assert sum(map(bytes_of, cut)) == bytes_of(one)
    assert all(s.banks.n_bytes < one.banks.n_bytes for s in cut)


@pytest.mark.parametrize("n_seq", [1, 2])
def test_one_stage_is_what_the_engine_runs(
    opened: Callable[[str], ModelFile], model_path: ModelPath, stack: ExitStack, n_seq: int
) -> None:
    config = new_config(n_seq=n_seq)
    cut = Stages(opened("legacy32"), [5], config, stack)
    assert all(isinstance(runner, WholeRunner) for runner in cut.runners)
    engine = stack.enter_context(Engine.load(model_path("legacy32"), config))
    rng = np.random.default_rng(1)
    for n in (20, 1, 1, 7, 1):
        ids = rng.integers(0, 1000, (n_seq, n)).astype(np.int32)
        kind = Kind.DECODE if n == 1 else Kind.PREFILL
        got = cut.run(Batch(ids, tuple(range(n_seq)), kind, all_rows=True))
        wanted = engine.forward(ids, all_rows=True)
        np.testing.assert_array_equal(got.logits, wanted.logits)


@pytest.mark.parametrize("mode", ["whole", "stream"])
def test_a_pass_after_one_whose_clean_up_was_interrupted(
    opened: Callable[[str], ModelFile],
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    """The first interrupt ends the pass in the last stage, the second one the clean-up."""
    stages = Stages(opened("legacy32"), [5], new_config(**MODES[mode]), stack)
    first, last = stages.runners
    prefill = Batch(np.arange(9, dtype=np.int32)[None, :], (0,), Kind.PREFILL)
    wanted = stages.run(prefill)

    def interrupts(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(last, "launch", interrupts)
        patch.setattr(first.device, "synchronize", interrupts)
        stages.run(prefill)
    assert not first.is_idle
    stages.sequences.reset(0)
    assert_same(stages.run(prefill), wanted, prefill)


@pytest.mark.parametrize("layers", [range(0), range(3, 3), range(2, 9), range(0, 8, 2)])
def test_a_range_that_the_model_does_not_have_is_refused(
    opened: Callable[[str], ModelFile], no_leak: None, layers: range
) -> None:
    with pytest.raises(InternalError, match="in a model of 8 layers"):
        new_stage(opened("legacy32"), layers, new_config())


@pytest.mark.parametrize("part", ["weights.Weights", "bank.ExpertBanks", "state.State",
                                  "store.ExpertStore", "weights.TokenEmbedding"])  # fmt: skip
def test_a_stage_that_fails_closes_what_it_opened(
    opened: Callable[[str], ModelFile],
    no_leak: None,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
) -> None:
    """The part is made first, so that its own memory must be freed too."""
    file, name = opened("legacy32"), part.partition(".")[2]
    owner = "weights" if name == "TokenEmbedding" else "stage"
    module = f"moegraph.resident.{owner}"
    real = getattr(__import__(module, fromlist=[name]), name)

    def fails(*args: Any) -> None:
        real(*args)
        raise OutOfDeviceMemory("no room")

    monkeypatch.setattr(f"{module}.{name}", fails)
    with pytest.raises(OutOfDeviceMemory, match="no room"):
        new_stage(file, range(8), new_config(**MODES["fetch"]))


def test_closing_a_stage_closes_its_device(
    opened: Callable[[str], ModelFile], no_leak: None
) -> None:
    stage = new_stage(opened("legacy32"), range(2, 5), new_config())
    runner = open_runner(stage, new_config())
    runner.close()
    stage.close()
    stage.close()
    assert stage.device.compute.is_closed
