"""CPU threads: how they wait, and that neither their number nor a change of it changes a bit."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from helpers.patience import until

from moegraph.config import EngineConfig
from moegraph.cpuload import LOAD
from moegraph.engine import Engine
from moegraph.errors import Cancelled
from moegraph.events import CancelToken
from moegraph.ggml.device import Device
from moegraph.ggml.handles import Context, live_handles
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import F32, Builder
from moegraph.graphs.cache import GraphCache
from moegraph.threads import SLEEP, SPIN, Threads

N_NODES = 400


def n_tasks() -> int:
    """Return how many threads this process has."""
    return len(os.listdir("/proc/self/task"))


@pytest.fixture
def one_cpu() -> Iterator[None]:
    """Keep this process, and the threads it starts, on one CPU."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def seconds_of_a_graph(device: Device) -> float:
    """Return the CPU time that a graph of many small nodes takes; the best of three."""
    with Context(N_NODES + 8) as leaves:
        x = C.ggml_new_tensor_2d(leaves.ptr, F32, 64, 64)
        buffer = C.ggml_backend_alloc_ctx_tensors_from_buft(leaves.ptr, device.buft)
        graphs = GraphCache(device)

        def build(b: Builder) -> None:
            y = x
            for _ in range(N_NODES):
                y = b.add(y, x)
            b.expand(y)

        graph, best = graphs.get("adds", N_NODES + 8, build).graph, float("inf")
        for _ in range(3):
            start = time.process_time()
            device.check(C.mg_launch(device.compute.ptr, graph, ffi.NULL, 0), "adds")
            best = min(best, time.process_time() - start)
        graphs.close()
        C.ggml_backend_buffer_free(buffer)
    return best


def test_threads_that_wait_at_a_barrier_leave_the_cpu_to_others(one_cpu: None) -> None:
    """Spinning, each of three threads on one CPU would burn its time slice at each of 400 nodes."""
    device = Device("cpu", n_threads=3)  # more threads than CPUs sleep
    try:
        assert seconds_of_a_graph(device) < 0.4
        device.use_threads(Threads(3, SPIN))
        assert seconds_of_a_graph(device) < 1.0, "spinning ends, too"
    finally:
        device.close()


def test_two_pools_are_kept_and_their_threads_end_with_the_device() -> None:
    before, handles = n_tasks(), live_handles()
    device = Device("cpu", n_threads=3)
    until(lambda: n_tasks() == before + 2)  # one that has ended may be listed for a moment longer
    device.use_threads(Threads(1, SPIN))
    device.use_threads(Threads(3, SLEEP))
    until(lambda: n_tasks() == before + 2)  # those of (3, SPIN), which was used longest ago, ended
    device.use_threads(Threads(1, SPIN))
    device.use_threads(Threads(3, SLEEP))
    assert live_handles()["ThreadPool"] == handles.get("ThreadPool", 0) + 2
    device.close()
    until(lambda: n_tasks() == before)
    assert live_handles() == handles


def rows(engine: Engine, change: bool) -> list[np.ndarray]:
    """Return the logits of single rows up to and after position 512; change: other threads each."""
    ids = np.random.default_rng(3).integers(0, engine.hparams.n_vocab, 540).astype(np.int32)
    found, settings = [], [Threads(1, SLEEP), Threads(3, SLEEP), Threads(2, SLEEP)]
    engine.reset()
    engine.forward(ids[:250])
    for at in range(250, 270):
        if change:
            engine.threads.one = settings[at % 3]
        found.append(engine.forward(ids[at : at + 1]).logits)
    engine.forward(ids[270:530])
    for at in range(530, 540):
        if change:
            engine.threads.one = settings[at % 3]
        found.append(engine.forward(ids[at : at + 1]).logits)
    return found


@pytest.mark.parametrize(("preset", "mode"), [("legacy32", "layered"), ("mini35b", "whole")])
def test_threads_may_change_between_tokens_without_a_bit_of_difference(
    model_path, preset: str, mode: str
) -> None:
    config = EngineConfig(device="cpu", mode=mode, n_threads=3, poll=SLEEP, n_ctx=768)
    with Engine.load(model_path(preset), config) as engine:
        fixed = rows(engine, change=False)
        changing = rows(engine, change=True)
    for at, (a, b) in enumerate(zip(fixed, changing, strict=True)):
        assert np.array_equal(a, b), f"single row {at}"


@pytest.mark.parametrize("preset", ["mini35b"])
def test_few_rows_have_the_same_bits_on_any_number_of_threads(
    model_path, monkeypatch, preset: str
) -> None:
    monkeypatch.setattr(LOAD, "free", lambda: 1)
    config = EngineConfig(device="cpu", n_threads=3, n_ctx=768, n_seq=2)
    found = []
    with Engine.load(model_path(preset), config) as engine:
        ids = np.random.default_rng(3).integers(0, engine.hparams.n_vocab, 540).astype(np.int32)
        for threads in (Threads(3, SLEEP), Threads(1, SLEEP), Threads(2, SLEEP)):
            engine.reset()
            engine.prefill(ids)
            engine.reset(1)
            engine.forward(ids[:20], seq=1)
            engine.threads.one = threads
            rows = [engine.forward(ids[:n_rows]).logits for n_rows in (2, 5, 8)]
            found.append([*rows, engine.forward(ids[:2].reshape(2, 1), seq=[0, 1]).logits])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("poll", [SLEEP, SPIN])
def test_a_cancelled_pass_leaves_no_thread_behind(model_path, poll: int) -> None:
    config = EngineConfig(device="cpu", n_threads=3, poll=poll, n_ctx=512, n_ubatch=256)
    with Engine.load(model_path("legacy32"), config) as engine:
        expected = engine.forward(np.arange(200, dtype=np.int32)).logits
        for delay in (0.0, 0.002, 0.01):
            engine.reset()
            cancel = CancelToken()
            engine.device.bind_cancel(cancel.flag)
            timer = threading.Timer(delay, cancel.set)
            timer.start()
            try:
                while True:
                    engine.forward(np.arange(200, dtype=np.int32), cancel=cancel)
                    engine.reset()
            except Cancelled:
                pass
            timer.join()
            engine.device.bind_cancel(None)
            again = engine.forward(np.arange(200, dtype=np.int32)).logits
            assert np.array_equal(again, expected)


def test_too_many_threads_are_worth_a_note(model_path, one_cpu: None) -> None:
    config = EngineConfig(device="cpu", n_threads=2, poll=SLEEP, n_ctx=256)
    with Engine.load(model_path("legacy32"), config) as engine:
        assert engine.warnings == ["2 threads take turns on 1 usable CPUs; use -t 1 or less"]
