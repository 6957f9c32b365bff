"""Workers among several devices: two workers, and stages beside a worker that lack experts."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from helpers.cable import Cable
from helpers.clients import Client, serving, together
from helpers.shared import prompt
from helpers.workers import WorkerProcess, working

from moegraph.engine import Engine
from moegraph.loop.groupchoice import GroupChoice
from moegraph.loop.requests import Step
from moegraph.runner import LayeredRunner, WholeRunner

Open = Callable[..., Engine]
SLOTS = {"pin_layers": 4, "cache_slots": 48, "policy": "lru", "deterministic": True}
MODES: dict[str, dict[str, Any]] = {
    "stream": {**SLOTS, "miss": "stream"},
    "fetch": {**SLOTS, "miss": "stream", "host_pin": "all"},
}


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    """Yield two workers that lend the CPU."""
    with ExitStack() as stack:
        yield stack.enter_context(working()), stack.enter_context(working())


def answers(engine: Engine) -> list[tuple[list[int | None], np.ndarray]]:
    """Return tokens and logits after a prompt of one chunk, and after one of several."""
    found = []
    for n in (5, 150):
        events = list(
            engine.generate(
                prompt(engine, n), max_tokens=8, text=False, ignore_eos=True, keep_logits=True
            )
        )
        logits = [event.logits for event in events if event.logits is not None]
        found.append(([event.token for event in events], np.concatenate(logits)))
    return found


def assert_same(got: Engine, wanted: Engine) -> None:
    for (tokens, logits), (usual, usual_logits) in zip(answers(got), answers(wanted), strict=True):
        assert tokens == usual
        np.testing.assert_array_equal(logits, usual_logits)


@pytest.mark.parametrize("device", ["cpu,{0},{1},cpu", "{0},{1},{0}"])
def test_text_over_two_workers_is_that_of_one_device(
    workers: tuple[WorkerProcess, WorkerProcess], open_engine: Open, device: str
) -> None:
    """Rows go from one worker to the other through here."""
    names = device.format(*(worker.url for worker in workers))
    cut = open_engine(device=names)
    links = {stage.device.link for stage in cut.stages if stage.device.link}
    assert len(cut.stages) == names.count(",") + 1 and len(links) == 2
    assert_same(cut, open_engine())


@pytest.mark.parametrize("n_groups", [2])
def test_requests_are_answered_over_two_workers(
    workers: tuple[WorkerProcess, WorkerProcess], open_engine: Open,
    monkeypatch: pytest.MonkeyPatch, n_groups: int,
) -> None:  # fmt: skip
    """In one pass, and in groups, one on each worker."""
    monkeypatch.setattr(GroupChoice, "n_groups", lambda self, n_rows: min(n_rows, n_groups))
    found = []
    for device in ("cpu", ",".join(worker.url for worker in workers)):
        engine = open_engine("mini35b", device=device, n_seq=3, deterministic=True)
        with serving(engine) as service:
            clients = [Client(service, list(range(n)), max_tokens=12) for n in (1, 130, 5, 130)]
            for client in clients:
                client.wait()
        found.append([client.tokens for client in clients])
    assert found[0] == found[1]


@pytest.mark.parametrize("device", ["cpu,{},cpu"])
def test_a_token_takes_one_round_trip(
    workers: tuple[WorkerProcess, WorkerProcess], open_engine: Open, stack: ExitStack, device: str
) -> None:
    """Inputs, launch and all results share it, on a cable so long that nothing else counts."""
    cable = Cable(workers[0].address, stack)
    engine = open_engine("mini35b", device=device.format(cable.url), profile="none")
    cable.delay_s = 0.1
    ids, times = np.arange(20, dtype=np.int32), []
    for event in engine.generate(ids, max_tokens=12, text=False, ignore_eos=True):
        times.append(event.decode_s)
    cable.delay_s = 0.0
    engine.close()
    assert times[-1] - times[0] >= 0.2 * (len(times) - 1)
    assert min(np.diff(times)) < 0.36  # of those that nothing else held up


@pytest.mark.parametrize("at", ["{0},cpu", "cpu,{0}"])
def test_a_worker_that_is_lost_while_groups_are_in_flight(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Every request ends with an error that names it, and so does the service."""
    monkeypatch.setattr(GroupChoice, "n_groups", lambda self, n_rows: min(n_rows, 2))
    drawn = list[int]()
    with working() as worker:
        address = worker.url.removeprefix("rpc://")

        def kill(step: Step) -> None:  # on the engine's thread, so that no request has ended yet
            before = len(drawn)
            drawn.extend(step.tokens)
            if before <= 32 < len(drawn):
                worker.signal(signal.SIGKILL)

        names = at.format(worker.url)
        engine = open_engine("mini35b", device=names, n_seq=4, n_ctx=2048)
        with serving(engine) as service:
            with together(service):
                clients = [
                    Client(service, [n + 1], max_tokens=2000, on_step=kill) for n in range(4)
                ]
            for client in clients:
                client.wait()
            assert all(client.reason == "error" for client in clients)
            assert any(address in str(client.last.error) for client in clients)
            assert service.failure and address in service.failure


@pytest.mark.parametrize("mode", MODES)
def test_a_stage_here_may_lack_experts_beside_a_worker(
    workers: tuple[WorkerProcess, WorkerProcess], open_engine: Open, mode: str
) -> None:
    """The worker has the first half of the layers, with all experts."""
    cut = open_engine(device=f"{workers[0].url},cpu", split="1,1", **MODES[mode])
    assert [type(part) for part in cut.runner.parts] == [WholeRunner, LayeredRunner]
    assert_same(cut, open_engine(**MODES[mode]))
    stats = cut.expert_stats()
    assert stats and stats.cache.misses.sum() > 0
