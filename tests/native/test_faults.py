"""The k-th call of a kind fails, for every k: right error, no leak, the next request is right."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import pytest
from helpers.cache_rules import check_cache
from helpers.faults import FAULTS, faulty
from helpers.patience import PATIENCE_S
from helpers.shared import greedy_tokens, prompt

from moegraph.config import EngineConfig
from moegraph.engine import Engine, loader
from moegraph.errors import (
    ConfigError,
    MoegraphError,
)
from moegraph.ggml.cpu_ffn import CpuFfn
from moegraph.ggml.handles import live_handles
from moegraph.ggml.lib import ffi
from moegraph.runner import cpu_experts
from moegraph.runner.cpu_experts import KernelCpuExperts

CONFIGS = [
    {"mode": "whole"},
    {"cache_slots": 30, "miss": "stream", "policy": "lru"},
    {"cache_slots": 30, "miss": "cpu", "policy": "lru"},
    # graphs of one row fetch by themselves
    {"cache_slots": 40, "pin_layers": 0, "miss": "stream", "host_pin": "all", "policy": "lru"},
]
NAMES = ["whole", "stream", "cpu", "graphs"]


def config(settings: dict[str, Any]) -> EngineConfig:
    """Return a small configuration on the CPU."""
    return EngineConfig(device="cpu", n_threads=1, n_ctx=256, n_ubatch=16, **settings)


@pytest.mark.parametrize("settings", CONFIGS, ids=NAMES)
@pytest.mark.parametrize("name", FAULTS)
def test_a_failure_while_loading_leaks_nothing(model_path, name, settings):
    path = model_path("legacy32")
    result, kind = FAULTS[name]
    gc.collect()
    before, at, failures = live_handles(), 0, 0
    while True:
        # every call up to twelve, then in growing steps: the same call for other layers
        at = at + 1 if at < 12 else at + at // 3
        with faulty(name, at, result) as library:
            try:
                engine = Engine.load(path, config(settings))
            except MoegraphError as error:
                assert isinstance(error, kind), error
                assert "\n" not in str(error)
                failures += 1
                # while the traceback still holds all that was made
                assert live_handles() == before, f"call {at} of {name}"
            else:
                engine.close()
        assert live_handles() == before, f"call {at} of {name}"
        if library.n_calls < at:
            break
    later = name.startswith(("mg_launch", "mg_wait", "mg_upload"))
    unused = name == "mmap" and "host_pin" not in settings
    assert failures or later or unused, "nothing was injected"


def n_threads(expected: int = 0) -> int:
    """Return how many threads this process has, once it has `expected` ones or after a long time.

    A thread that was joined may be listed for a moment longer.
    """
    end = time.monotonic() + PATIENCE_S
    while (n := len(os.listdir("/proc/self/task"))) > expected > 0 and time.monotonic() < end:
        time.sleep(0.001)
    return n


@pytest.mark.parametrize("name", [*FAULTS, "mg_cpu_ffn_new"])
def test_a_failure_while_loading_ends_the_threads_for_cold_experts(model_path, monkeypatch, name):
    """The kernel of CUDA devices: loading needs none of what it computes."""
    started: list[CpuFfn] = []

    def start(*sizes: int) -> CpuFfn:
        started.append(CpuFfn(*sizes))
        return started[-1]

    monkeypatch.setattr(cpu_experts, "CpuFfn", start)
    monkeypatch.setattr(
        loader,
        "GraphCpuExperts",
        lambda *common: KernelCpuExperts(common[0], 3, common[1]),
    )
    settings = EngineConfig(
        device="cpu", n_threads=3, n_ctx=256, n_ubatch=16, cache_slots=30, miss="cpu"
    )
    result, kind = FAULTS.get(name, (ffi.NULL, ConfigError))
    Engine.load(model_path("legacy32"), settings).close()
    gc.collect()
    before, most, at, late = live_handles(), n_threads(), 0, 0
    while True:
        at = at + 1 if at < 12 else at + at // 3
        started.clear()
        with faulty(name, at, result) as library:
            try:
                engine = Engine.load(model_path("legacy32"), settings)
            except MoegraphError as error:
                assert isinstance(error, kind), error
                late += len(started)
                assert live_handles() == before, f"call {at} of {name}"
                assert n_threads(most) <= most, f"call {at} of {name}"  # one may have been ending
            else:
                engine.close()
        if library.n_calls < at:
            break
    assert late or name.startswith(("mg_", "mmap")), "none failed behind the threads"


# Mode whole reads no ids; graphs that fetch, and the CPU, need no upload.
UNUSED = {"mg_wait_ids": ("whole",), "mg_upload_launch": ("whole", "graphs", "cpu")}
REQUEST_FAULTS = [
    pytest.param(name, settings, id=f"{name}-{kind}")
    for kind, settings in zip(NAMES, CONFIGS)
    for name in ("mg_launch", "mg_wait_ids", "mg_upload_launch")
    if kind not in UNUSED.get(name, ())
]


@pytest.mark.parametrize(("name", "settings"), REQUEST_FAULTS)
def test_a_failure_in_a_request_leaves_the_engine_usable(model_path, name, settings):
    result, kind = FAULTS[name]
    with Engine.load(model_path("legacy32"), config(settings)) as engine:
        ids = prompt(engine, 20)
        expected = greedy_tokens(engine, ids, 5)
        handles, at, n_injected = None, 0, 0
        while True:
            at = at + 1 if at < 12 else at + at // 3
            with faulty(name, at, result) as library:
                error = None
                try:
                    tokens = greedy_tokens(engine, ids, 5)
                except MoegraphError as caught:
                    error = caught
            if library.n_calls < at:
                assert error is None and tokens == expected
                break
            n_injected += 1
            assert isinstance(error, kind), f"call {at} of {name} failed and nothing was said"
            assert "\n" not in str(error)
            assert greedy_tokens(engine, ids, 5) == expected, f"after call {at} of {name}"
            if engine.mode == "layered":
                check_cache(engine.runner.cache)
            now = live_handles()
            now["Context"] -= len(engine.runner.graphs)  # what prompts miss has many shapes
            handles = handles or now
            assert now == handles
        assert n_injected > 5
