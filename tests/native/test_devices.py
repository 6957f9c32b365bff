"""Several devices: the engine gives the bits that it gives on one, whatever it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.faults import faulty
from helpers.shared import greedy_tokens, prompt
from helpers.smallest import smallest

from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.engine import Engine, loader
from moegraph.errors import (
    Cancelled,
    ConfigError,
    NativeError,
    OutOfDeviceMemory,
)
from moegraph.events import CancelToken
from moegraph.ggml.device import Device
from moegraph.ggml.lib import C
from moegraph.placement.footprint import needed_bytes
from moegraph.placement.planner import Footprint, make_plan
from moegraph.runner import LayeredRunner, StagedRunner, WholeRunner, boundary
from moegraph.runner.sweep_batch import SweepBatch

Open = Callable[..., Engine]
TWO, THREE = "cpu,cpu", "cpu,cpu,cpu"
SLOTS = {"pin_layers": 0, "cache_slots": 48, "policy": "lru", "deterministic": True}
MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "layered": {"mode": "layered"},
    "stream": {**SLOTS, "miss": "stream"},
    "cpu": {**SLOTS, "miss": "cpu"},
    "fetch": {**SLOTS, "miss": "stream", "host_pin": "all"},
    "reference": {"cpu_reference": True, "type_k": "q8_0", "type_v": "q4_0"},
}


def answer(engine: Engine, ids: object, **settings: Any) -> tuple[list[int], np.ndarray, int]:
    """Return tokens, their logits, and how many rows of the prompt were not computed."""
    events = list(
        engine.generate(
            ids, max_tokens=8, text=False, ignore_eos=True, keep_logits=True, **settings
        )
    )
    logits = [e.logits for e in events if e.logits is not None]
    return [e.token for e in events], np.concatenate(logits), events[0].n_reused


def assert_same(got: Any, wanted: Any) -> None:
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("preset", "device", "mode"),
    [*(("legacy32", THREE, mode) for mode in MODES), ("mini35b", TWO, "stream")],
)
def test_text_is_that_of_one_device(open_engine: Open, preset: str, device: str, mode: str) -> None:
    """Prompts shorter and longer than a chunk, and answers."""
    one, cut = (open_engine(preset, device=d, **MODES[mode]) for d in ("cpu", device))
    assert isinstance(cut.runner, StagedRunner) and cut.mode == one.mode
    assert cut.device_name == device and len(cut.stages) == device.count(",") + 1
    for n in (5, 150):
        ids = prompt(one, n)
        assert_same(answer(cut, ids), answer(one, ids))
    assert cut.plan.n_slots == one.plan.n_slots
    stats, wanted = cut.expert_stats(), one.expert_stats()
    assert (stats is None) == (wanted is None)
    if stats and wanted:
        a, b = stats.cache, wanted.cache
        np.testing.assert_array_equal(a.hits + a.misses, b.hits + b.misses)
        # which of the experts that the CPU computed get slots is decided for all layers of a stage
        for name in ("hits", "missing", "admitted") if mode != "cpu" else ():
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    memory, usual = cut.memory(), one.memory()
    assert memory["kv_bytes"] == usual["kv_bytes"]
    assert memory["state_bytes"] == usual["state_bytes"]


def test_a_split_is_as_asked_and_changes_no_text(open_engine: Open) -> None:
    settings = {"miss": "stream", "deterministic": True, "policy": "lru"}
    cut = open_engine(device=TWO, split="1GiB,3GiB", pin_layers=8, **settings)
    assert [type(part) for part in cut.runner.parts] == [WholeRunner] * 2
    assert [stage.layers for stage in cut.stages] == [range(2), range(2, 8)]
    half = open_engine(device=TWO, split="3,1", cache_slots=24, pin_layers=0, **settings)
    assert any("8 of 8 layers have fewer slots (least 3)" in line for line in half.warnings)
    assert all(isinstance(part, LayeredRunner) for part in half.runner.parts)
    assert [stage.layers for stage in half.stages] == [range(6), range(6, 8)]
    ids = prompt(cut, 40)
    assert greedy_tokens(cut, ids, 6) == greedy_tokens(half, ids, 6)


def test_a_prompt_flows_through_the_stages_chunk_by_chunk(open_engine: Open) -> None:
    """Stages work on different chunks at once where no expert can be missing."""
    cut = open_engine(device=TWO, n_ubatch=32)
    sweep = cut.passes.begin_prompts([SweepBatch(prompt(cut, 128))])
    seen = []
    while cut.passes.step_prompt(sweep):
        seen.append(tuple(stage.n_done for stage in sweep._stages))
    n_layers = [len(stage.layers) for stage in cut.stages]
    assert seen[-1] == tuple(4 * n for n in n_layers)
    assert any(0 < a < 4 * n_layers[0] and b > 0 for a, b in seen)
    lacking = open_engine(device=TWO, n_ubatch=32, **MODES["stream"])
    sweep = lacking.passes.begin_prompts([SweepBatch(prompt(cut, 128))])
    while lacking.passes.step_prompt(sweep):
        a, b = (stage.n_done for stage in sweep._stages)
        assert a == 4 * n_layers[0] or b == 0


@pytest.mark.parametrize("mode", ["whole", "stream"])
@pytest.mark.parametrize("at", [0, 9])
def test_a_cancelled_prompt_leaves_what_was(open_engine: Open, mode: str, at: int) -> None:
    cut = open_engine(device=TWO, n_ubatch=16, **MODES[mode])
    ids, cancel = prompt(cut, 90), CancelToken()
    wanted = [cut.prefill(ids[:20]).require_logits(), cut.prefill(ids[20:]).require_logits()]
    cut.reset()
    cut.prefill(ids[:20])
    sweep = cut.passes.begin_prompts([SweepBatch(ids[20:])])
    for _ in range(at):
        cut.passes.step_prompt(sweep)
    cancel.set()
    with pytest.raises(Cancelled):
        cut.passes.step_prompt(sweep, cancel)
    assert cut.held(0) == ids[:20].tolist()
    np.testing.assert_array_equal(cut.prefill(ids[20:]).require_logits(), wanted[1])


@pytest.mark.parametrize("n_calls", [1, 2])
def test_a_failure_in_any_stage_empties_the_sequence_in_all(
    open_engine: Open, n_calls: int
) -> None:
    cut = open_engine(device=TWO)
    ids = prompt(cut, 12)
    wanted = greedy_tokens(cut, ids, 5)
    cut.forward(ids)
    with faulty("mg_launch", n_calls, C.GGML_STATUS_FAILED), pytest.raises(NativeError):
        cut.forward(ids[:1])
    assert cut.held(0) == [] and cut.state.n_past == [0]
    assert greedy_tokens(cut, ids, 5) == wanted


def test_more_devices_than_layers_are_refused(open_engine: Open, no_leak: None) -> None:
    with pytest.raises(ConfigError, match="9 devices for 8 layers"):
        open_engine(device=",".join(["cpu"] * 9))


def fits(need: Footprint, mib: int) -> bool:
    try:
        make_plan(need, mib << 20)
    except OutOfDeviceMemory:
        return False
    return True


@pytest.mark.parametrize("is_wider", [True, False])
def test_auto_takes_more_devices_only_if_more_experts_fit(
    open_engine: Open, model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch,
    no_leak: None, is_wider: bool,
) -> None:  # fmt: skip
    """The second device stands for another GPU."""
    with open_model(model_path("legacy32")) as model:
        need = needed_bytes(model, EngineConfig(n_ctx=512, n_ubatch=32), 512, is_own=False)
    mib = smallest(lambda n: fits(need, n)) + 1
    assert not make_plan(need, mib << 20).all_resident
    names = ["cpu:1"] if is_wider else []
    real = loader.open_device

    def opened(name: str, config: EngineConfig) -> Device:
        device = real("cpu" if name == "cpu:1" else name, config)
        device.name = name if name == "cpu:1" else device.name
        return device

    monkeypatch.setattr(loader, "gpu_names", lambda: names)
    monkeypatch.setattr(loader, "open_device", opened)
    engine = open_engine(device="auto", vram=f"{mib}MiB", host_pin="none", n_ubatch=32)
    assert engine.device_name == ("cpu,cpu:1" if is_wider else "cpu")
    assert len(engine.stages) == 1 + is_wider
    engine.close()


def test_direct_copies_give_the_same_bits(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long prompts, whose rows cross in several pieces, and answers."""
    one = open_engine()
    ids = prompt(one, 300)
    monkeypatch.setattr(boundary, "_PIECE", 1 << 14)
    ways = []
    for direct in (False, True):
        monkeypatch.setattr(boundary, "is_direct", lambda source, to, direct=direct: direct)
        cut = open_engine(device=TWO)
        assert_same(answer(cut, ids), answer(one, ids))
        ways += [line for line in cut.drain_messages() if "rows are copied" in line]
        assert not cut.drain_messages()
    assert ways == [
        "cpu to cpu: rows are copied through host memory", "cpu to cpu: rows are copied directly"
    ]  # fmt: skip
