"""A service on a device with streams: it builds ahead, pads passes and rounds prompts.

The device is the CPU, which claims streams and events; so it can be asked for the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.clients import GREEDY, Client, alone, serving
from helpers.faults import events_on_cpu
from helpers.patience import until
from helpers.shared import prompt

from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.loop.requests import Request
from moegraph.runner import misses
from moegraph.runner.sweep_batch import SweepBatch

FETCHING = {"cache_slots": 60, "pin_layers": 0, "miss": "stream", "host_pin": "all"}
# Where experts are, and how many bytes of captured graphs are kept.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "whole": ({"mode": "whole"}, 1 << 40),
    "fetching, one graph kept": (FETCHING, 0),
}
# Tokens of prompts, and of their answers.
ASKED = ((3, 12), (200, 30), (40, 1), (700, 12), (40, 30))


@pytest.mark.parametrize(("case", "n_seq"), list(zip(CASES, (1, 3))))
def test_answers_are_those_of_an_engine_alone(
    model_path: Callable[[str], Path], stack: ExitStack, case: str, n_seq: int
) -> None:
    path, (more, most_bytes) = model_path("mini35b"), CASES[case]
    base = EngineConfig(device="cpu", n_threads=1, cpu_reference=True, n_ctx=2048, n_ubatch=512)
    with Engine.load(path, base) as single:
        requests = [
            Request(
                prompt(single, n, seed=n).tolist(), GREEDY, n_tokens, text=False, ignore_eos=True
            )
            for n, n_tokens in ASKED
        ]
        expected = [alone(single, request)[0] for request in requests]
    with events_on_cpu():
        engine = stack.enter_context(Engine.load(path, replace(base, n_seq=n_seq, **more)))
        assert engine.device.can.streams
        for part in engine.runner.parts:
            part.graphs.max_device_bytes = most_bytes
        with serving(engine) as service:
            until(lambda: service._building.is_done or service.failure)
            clients = [Client(service, one.prompt, max_tokens=one.max_tokens) for one in requests]
            assert [client.wait().tokens for client in clients] == expected
            assert service.failure is None


class _Logging:
    """The native library; calls: what orders or enqueues uploads, and on which stream."""

    def __init__(self, real: Any, engine: Engine) -> None:
        self._real, self.calls = real, list[tuple[str, str]]()
        device = engine.device
        self._streams = {device.compute.ptr: "compute", device.upload.ptr: "upload"}

    def __getattr__(self, name: str) -> Any:
        real, kind = getattr(self._real, name), name.removeprefix("ggml_backend_")

        def call(*args: Any) -> Any:
            stream = next(arg for arg in args if arg in self._streams)
            self.calls.append((kind, self._streams[stream]))
            return real(*args)

        return call if kind in ("event_record", "event_wait", "tensor_set_async") else real


def test_an_exchange_waits_for_the_steps_of_another_prompt(
    open_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read what the slots held when they were enqueued."""
    settings = {"cache_slots": 60, "pin_layers": 0, "miss": "stream", "host_pin": "none"}
    with events_on_cpu():
        engine = open_engine("mini35b", n_seq=3, **settings)
        ids = prompt(engine, 300, seed=9)
        together = [SweepBatch(ids[:100], 0), SweepBatch(ids[:90], 2)]  # so they keep nothing
        sweep = engine.passes.begin_prompts(together)
        while engine.passes.step_prompt(sweep):
            pass
        sweep = engine.passes.begin_prompts([SweepBatch(ids[100:], 1)])
        for _ in range(3):
            assert engine.passes.step_prompt(sweep)
        log = _Logging(misses.C, engine)
        monkeypatch.setattr(misses, "C", log)
        engine.forward(ids[:1])
        n_exchanged = engine.runner.residency.n_exchanged
        assert n_exchanged > 0
        assert log.calls[:2] == [("event_record", "compute"), ("event_wait", "upload")]
        assert log.calls[2 : 2 + n_exchanged] == [("tensor_set_async", "upload")] * n_exchanged
        then = log.calls[2 + n_exchanged :][:2]
        assert then == [("event_record", "upload"), ("event_wait", "compute")]
