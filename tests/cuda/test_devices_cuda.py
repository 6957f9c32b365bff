"""Two stages on GPUs, on one card and on two: rows arrive in order, and text is as on one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.clients import Client, alone, serving
from helpers.shared import prompt

from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.ggml.device import Device, gpu_names
from moegraph.ggml.handles import Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.memory import place
from moegraph.ggml.ops import F32, Tensor
from moegraph.resident.rates import measure_rates
from moegraph.runner.boundary import Boundary

SAME, OTHER = "cuda:0,cuda:0", "cuda:0,cuda:1"
SLOTS = {"pin_layers": 0, "cache_slots": 200, "miss": "stream"}
MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "stream": {**SLOTS, "host_pin": "none"},
    "fetch": {**SLOTS, "host_pin": "all"},
}
# Squared error over squared logits, as in test_stages_cuda.py.
LIMIT, USUAL_LIMIT = 0.2, 2e-3


@pytest.fixture(params=[SAME, OTHER])
def devices(request: pytest.FixtureRequest) -> str:
    if request.param == OTHER and len(gpu_names()) < 2:
        pytest.skip("this machine has one CUDA device")
    return str(request.param)


@pytest.fixture
def load(model_file: Callable[[str], Path]) -> Iterator[Callable[..., Engine]]:
    opened: list[Engine] = []

    def new(**settings: Any) -> Engine:
        chosen = {"n_threads": 4, "n_ctx": 2048, "n_ubatch": 64, "deterministic": True, **settings}
        opened.append(Engine.load(model_file("mini35b"), EngineConfig(**chosen)))
        return opened[-1]

    yield new
    for engine in opened:
        engine.close()


class Words:
    """A tensor of many numbers on a device."""

    def __init__(self, device: Device, n: int) -> None:
        self.device, self.context = device, Context(1)
        self.buffer = device.buffer(4 * n, "a test", "")
        self.all: Tensor = C.ggml_new_tensor_1d(self.context.ptr, F32, n)
        place(self.buffer, self.all, 0)

    def read(self) -> np.ndarray:
        self.device.synchronize()
        found = np.empty(self.all.ne[0], np.float32)
        C.ggml_backend_tensor_get(self.all, ffi.from_buffer(found), 0, found.nbytes)
        return found

    def close(self) -> None:
        self.buffer.close()
        self.context.close()


def test_rows_arrive_in_the_order_of_both_streams(devices: str) -> None:
    """The source is overwritten at once after each copy, and so is the target."""
    n, n_turns = 5 << 20, 12
    names = devices.split(",")
    with closing(Device(names[0])) as first, closing(Device(names[1])) as second:
        parts = [Words(first, n), Words(second, n), Words(second, n_turns * 4096)]
        host = first.host_buffer(4 * n * 2)
        values = host.array.view(np.float32).reshape(2, n)
        values[0], values[1] = 1.0, 2.0
        boundary = Boundary(first, second)
        for turn in range(n_turns):
            source = host.address(4 * n * (turn % 2))
            C.ggml_backend_tensor_set_async(first.compute.ptr, parts[0].all, source, 0, 4 * n)
            boundary.copy(parts[0].all, parts[1].all, 4 * n)
            at = 4 * 4096 * turn
            # the last bytes of the copy go where nothing overwrites them
            C.mg_copy_bytes(
                second.compute.ptr, parts[1].all, 4 * n - 4 * 4096, parts[2].all, at, 4 * 4096
            )
        kept = parts[2].read().reshape(n_turns, 4096)
        assert (kept == (np.arange(n_turns) % 2 + 1)[:, None]).all()
        assert (parts[1].read() == 2.0).all()
        for part in (boundary, *parts, host):
            part.close()


def test_speeds_are_measured(device: Device) -> None:
    memory, link = measure_rates(device)
    assert 5e10 < memory < 2e13 and 5e8 < link < 1e12 and link < memory


@pytest.mark.parametrize("mode", MODES)
def test_prompts_and_text_are_near_those_of_one_device(
    load: Callable[..., Engine], devices: str, mode: str
) -> None:
    """And the same bits again when they are computed again, so nothing is read too early."""
    one, cut = (load(device=d, **MODES[mode]) for d in ("cuda:0", devices))
    ids = prompt(one, 1500)
    errors, runs = [], []
    for n in (1500, 700, 40):
        wanted = one.prefill(ids[:n], all_rows=n == 700).require_logits().astype(np.float64)
        for turn in range(3):
            if turn:
                cut.reset()
            got = cut.prefill(ids[:n], all_rows=n == 700).require_logits()
            runs.append(got)
            assert turn == 0 or np.array_equal(got, runs[-2])
        errors += (((got - wanted) ** 2).sum(1) / (wanted**2).sum(1)).tolist()
        for engine in (one, cut):
            engine.reset()
    print(f"{devices} {mode}: largest error {max(errors):.1e}, median {np.median(errors):.1e}")
    assert max(errors) < LIMIT and np.median(errors) < USUAL_LIMIT
    texts = [
        [e.token for e in cut.generate(ids[:50], max_tokens=60, text=False, ignore_eos=True)]
        for _ in range(3)
    ]
    assert texts[0] == texts[1] == texts[2]
    assert cut.device_name == devices


@pytest.mark.parametrize("mode", MODES)
def test_requests_are_answered_as_if_alone(
    load: Callable[..., Engine], devices: str, mode: str
) -> None:
    engine = load(device=devices, n_seq=6, **MODES[mode])
    with serving(engine) as service:
        clients = [
            Client(service, prompt(engine, n, seed=i), max_tokens=24)
            for i, n in enumerate((3, 40, 300, 5, 90, 17, 130, 1))
        ]
        for client in clients:
            client.wait()
    single = load(device=devices, **MODES[mode])
    texts = [alone(single, client.request)[0] for client in clients]
    assert [client.tokens for client in clients] == texts


@pytest.mark.parametrize("spec", ["dflash", "lookup"])
def test_text_with_drafts_is_the_text_without(devices: str, spec: str) -> None:
    found = []
    for source in ("off", spec):
        config = EngineConfig(device=devices, n_ctx=512, deterministic=True, spec=source)
        with Engine.load("tiny", config) as engine:
            ids = engine.tokenizer.encode("def fibonacci(n):\n    if n < 2:\n" * 9)
            found.append([e.token for e in engine.generate(ids, max_tokens=48)])
            stats = engine.spec_stats()
    assert found[0] == found[1]
    assert stats and stats.report()["accepted"] > 5
