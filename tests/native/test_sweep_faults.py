"""Anything fails, at any call, while a prompt is computed layer by layer.

The error is the right one, the sequence is what it was, and the next request is right. The model
has one layer of each kind that makes a difference, so that every call can be tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers.faults import FAILED, events_on_cpu, faulty
from helpers.fetching_engines import PRESET, check_sound
from helpers.shared import PRESETS, prompt, write_model

from moegraph.arch import ModelFile
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.errors import ModelFileError, MoegraphError, NativeError, OutOfDeviceMemory
from moegraph.runner.inspect import read_tensor
from moegraph.runner.sweep_batch import SweepBatch

N_HELD, N = 12, 62
MIX = "all=Q8_0,embd=F16,gate_up=Q4_0,down=Q5_0,gate_up@2=Q4_1"
SETTINGS = {"n_ubatch": 24, "pin_layers": 1, "cache_slots": 8, "miss": "stream", "policy": "lru"}


class Failing:
    """Fails at the k-th call of its kind; n_calls: how many there were."""

    n_calls = 0


@contextmanager
def failing_call(name: str, result: Any, at: int) -> Iterator[Any]:
    """Have the k-th call of some native functions fail."""
    with faulty(name, at, result) as library:
        yield library


@contextmanager
def failing_read(at: int) -> Iterator[Failing]:
    """Have the k-th read of the model file find it cut short."""
    found, real = Failing(), ModelFile.read

    def read(self: ModelFile, info: Any, out: np.ndarray, start: int = 0) -> None:
        found.n_calls += 1
        if found.n_calls == at:
            raise ModelFileError(f"{info.name}: short read")
        real(self, info, out, start)

    ModelFile.read = read  # type: ignore[method-assign]
    try:
        yield found
    finally:
        ModelFile.read = real  # type: ignore[method-assign]


LOST = NativeError("the device was lost")
FAULTS: dict[str, tuple[Callable[[int], Any], type[MoegraphError]]] = {
    "launches": (lambda at: failing_call("mg_launch", FAILED, at), NativeError),
    "copies": (lambda at: failing_call("mg_copy_bytes", LOST, at), NativeError),
    "uploads": (lambda at: failing_call("ggml_backend_tensor_set_async", LOST, at), NativeError),
    "marks": (lambda at: failing_call("mg_get_pieces", LOST, at), NativeError),
    "graphs": (lambda at: failing_call("mg_graph_alloc", False, at), OutOfDeviceMemory),
    "events": (lambda at: failing_call("ggml_backend_event_", LOST, at), NativeError),
    "reads": (failing_read, ModelFileError),
    "pinned uploads": (lambda at: failing_call("mg_upload_experts", LOST, at), NativeError),
}


def held(engine: Engine) -> list[npt.NDArray[Any]]:
    """Return all that sequence 0 consists of."""
    state = engine.state.states[0]
    rows = state.pool.rows(np.array(0), np.arange(state.n_past[0]))
    found = [read_tensor(t)[0].copy() for each in state.layer_states.values() for t in each]
    found += [read_tensor(t)[rows].copy() for t in (*state.k.values(), *state.v.values())]
    return [np.array(engine.held(0)), np.array(state.n_past), *found]


def check_same(found: list[npt.NDArray[Any]], expected: list[npt.NDArray[Any]]) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of three layers: one that is full, and two kinds that lack experts."""
    shape = replace(PRESETS[PRESET].shape, n_layer=3, layers="dda")
    return write_model(tmp_path_factory.mktemp("faults") / "three.gguf", shape, MIX, seed=7)[0]


@pytest.mark.parametrize("what", FAULTS)
def test_a_failure_at_any_call_of_a_prompt(path: Path, what: str, stack: ExitStack) -> None:
    fault, kind = FAULTS[what]
    stack.enter_context(events_on_cpu())  # a thread waits for events until the engine ends
    pin = "all" if what == "pinned uploads" else "auto"
    config = EngineConfig(device="cpu", n_threads=1, n_ctx=256, host_pin=pin, **SETTINGS)
    engine = stack.enter_context(Engine.load(path, config))
    assert engine.device.can.streams
    assert bool(engine.stage.store.in_place) is (pin == "auto"), "experts pass through the ring"
    ids = prompt(engine, N + 1, seed=3)
    batch = SweepBatch(ids[N_HELD:N], 0, greedy=True, cuts=(20, 40))
    engine.prefill(ids[:N_HELD])
    before, snapshot = held(engine), engine.copies.snapshot(0)
    _, saved = engine.passes.read(batch, None)
    expected = engine.forward(ids[N:]).require_logits(), [c.n_past for c in saved]
    engine.copies.restore(snapshot)
    at = n_failed = 0
    while True:
        at += 1
        if what == "graphs":  # those that the prompt needs are built already
            engine.runner.graphs.clear()
        with fault(at) as library:
            try:
                _, saved = engine.passes.read(batch, None)
            except MoegraphError as error:
                assert isinstance(error, kind) and "\n" not in str(error), error
                n_failed += 1
            else:
                assert library.n_calls < at, f"call {at} failed and nothing was said"
        if library.n_calls < at:
            break
        check_same(held(engine), before)
        check_sound(engine)
    least = 3 if what == "marks" else 5  # one call has all pieces of a layer
    assert n_failed > least, "nothing was injected"
    logits = engine.forward(ids[N:]).require_logits()
    np.testing.assert_array_equal(logits, expected[0])
    assert [c.n_past for c in saved] == expected[1] == [20, 40]
