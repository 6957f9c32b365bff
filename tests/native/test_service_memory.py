"""A service whose requests share a KV pool that is smaller than all of them together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.cache_rules import check_pool
from helpers.clients import Client, alone, serving, together
from helpers.faults import FAULTS, faulty
from helpers.patience import PATIENCE_S, until
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.errors import NativeError
from moegraph.loop.requests import Step
from moegraph.resident.layout import PAGE
from moegraph.sampling import SamplingParams

Open = Callable[..., Engine]
SAMPLINGS = (SamplingParams(temperature=0.0), SamplingParams(seed=3))
MODES: dict[str, dict[str, Any]] = {
    "whole": {"mode": "whole"},
    "stream": {"pin_layers": 0, "cache_slots": 48, "policy": "lru", "miss": "stream"},
}


def small(open_engine: Open, **settings: Any) -> Engine:
    """Open an engine whose four sequences share the positions of one."""
    return open_engine(n_seq=4, n_ctx=1024, n_kv=-1, cpu_reference=True, **settings)


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_requests_go_to_host_memory_and_back(open_engine: Open, settings: dict[str, Any]) -> None:
    engine = small(open_engine, **settings)
    with serving(engine) as service:
        with together(service):
            clients = [
                Client(service, prompt(engine, n, seed=n), max_tokens=n_tokens, reuse=i % 2 == 0,
                       sampling=SAMPLINGS[i % 2], name=f"{i}")
                for i, (n, n_tokens) in enumerate(
                    ((200, 400), (150, 500), (10, 350), (700, 30), (5, 5), (300, 300), (1000, 24))
                )
            ]  # fmt: skip
        for client in clients:
            client.wait()
        service.drain()
        status = service.status()
    check_pool(engine.state.pool)
    assert status.counts.preempted >= 1
    single = open_engine(cpu_reference=True, n_ctx=1024)
    for client in clients:
        assert (client.tokens, client.reason) == (alone(single, client.request)[0], "length")


def test_the_oldest_request_is_never_kept_waiting_by_younger_ones(open_engine: Open) -> None:
    engine = small(open_engine)
    ended: list[int] = []
    with serving(engine) as service:
        clients = [
            Client(service, prompt(engine, 250, seed=i), max_tokens=600,
                   on_step=lambda step, i=i: step.finish_reason and ended.append(i))
            for i in range(4)
        ]  # fmt: skip
        for client in clients:
            client.wait()
    assert ended == [0, 1, 2, 3]


def test_a_request_waits_until_those_that_decode_have_their_next_page_too(
    open_engine: Open,
) -> None:
    engine = small(open_engine)
    with serving(engine) as service:
        began = threading.Event()
        first = Client(
            service, prompt(engine, 240), max_tokens=60, on_step=lambda step: began.set()
        )
        assert began.wait(PATIENCE_S)
        # its pages are free now, but the first request is about to need one of them
        second = Client(service, prompt(engine, 3 * PAGE - 10, seed=1), max_tokens=5)
        assert second.wait().reason == first.wait().reason == "length"
        assert service.status().counts.preempted == 0


def test_a_request_in_host_memory_can_be_cancelled(open_engine: Open, no_leak: None) -> None:
    engine = small(open_engine)
    with serving(engine) as service:
        go_on = threading.Event()

        def stay(step: Step) -> None:
            if step.finish_reason:
                go_on.clear()  # until the next one is cancelled
            elif service._loop.tally.counts.preempted:
                go_on.wait(PATIENCE_S)

        with together(service):
            clients = [
                Client(service, prompt(engine, 250, seed=i), max_tokens=700, on_step=stay)
                for i in range(4)
            ]
        until(lambda: service._loop.tally.counts.preempted)
        assert not clients[0].is_done
        for client in reversed(clients):
            client.ticket.cancel()
            go_on.set()
            assert client.wait().reason == "cancelled"
        go_on.set()
        assert Client(service, prompt(engine, 1000), max_tokens=5).wait().reason == "length"
    check_pool(engine.state.pool)
    engine.close()


def test_without_host_memory_the_youngest_request_ends_with_an_error(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small(open_engine)

    def refuse(seq: int) -> None:
        raise NativeError("no host memory")

    with serving(engine) as service:
        monkeypatch.setattr(engine.copies, "swap_out", refuse)
        with together(service):
            clients = [
                Client(service, prompt(engine, 20, seed=i), max_tokens=900) for i in range(2)
            ]
        assert clients[1].wait().reason == "error"
        assert clients[0].wait().reason == "length"


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_random_requests_cancellations_and_faults(open_engine: Open, seed: int) -> None:
    """Whatever happens, each request ends once, and what it got is what it gets alone."""
    rng = np.random.default_rng(seed)
    engine = small(open_engine, spec="lookup", n_draft=3)
    clients: list[Client] = []
    with serving(engine) as service:
        for i in range(24):
            n = int(rng.integers(1, 60) if i % 2 else rng.integers(60, 700))
            clients.append(
                Client(
                    service, prompt(engine, n, seed=int(rng.integers(6))),
                    max_tokens=int(rng.integers(1, 150)), sampling=SAMPLINGS[i % 2],
                    deadline_s=0.3 if i % 11 == 10 else None, reuse=bool(rng.integers(2)),
                    marks=(n // 2,) if n > 200 else (),
                )
            )  # fmt: skip
            if rng.random() < 0.4:
                clients[int(rng.integers(len(clients)))].ticket.cancel()
            if i % 8 == 5:
                with faulty("mg_launch", int(rng.integers(1, 40)), FAULTS["mg_launch"][0]):
                    time.sleep(0.1)
        for client in clients:
            client.wait()
        assert service.drain(PATIENCE_S) and service.failure is None
    check_pool(engine.state.pool)
    single = open_engine(cpu_reference=True, n_ctx=1024)
    for client in clients:
        tokens, got = alone(single, client.request)[0], client.tokens
        assert got == tokens[: len(got)]
        assert (client.reason == "length") == (got == tokens and client.last.error is None)
