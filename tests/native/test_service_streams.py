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
    stack.enter_context(events_on_cpu())  # a thread waits for events until the engine ends
    engine = stack.enter_context(Engine.load(path, replace(base, n_seq=n_seq, **more)))
    assert engine.device.can.streams
    for part in engine.runner.parts:
        part.graphs.max_device_bytes = most_bytes
    with serving(engine) as service:
        until(lambda: service._building.is_done or service.failure)
        clients = [Client(service, one.prompt, max_tokens=one.max_tokens) for one in requests]
        assert [client.wait().tokens for client in clients] == expected
        assert service.failure is None
