"""A service whose device fails: which requests end, and when nothing more is tried."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.clients import GREEDY, Client, alone, serving, together
from helpers.faults import FAULTS, faulty
from helpers.patience import PATIENCE_S, until
from helpers.shared import prompt

from moegraph.engine import Engine
from moegraph.errors import NativeError, ServiceClosed
from moegraph.loop import scheduler
from moegraph.loop.requests import Request, Step

Open = Callable[..., Engine]
SLOTS = {"pin_layers": 0, "cache_slots": 48, "policy": "lru", "deterministic": True}

REQUEST_FAULTS = ("mg_launch", "mg_wait_ids", "mg_upload_launch", "mg_graph_alloc")


@pytest.mark.parametrize("name", REQUEST_FAULTS)
def test_a_failed_call_ends_requests_with_an_error_and_the_next_are_right(
    open_engine: Open, name: str
) -> None:
    engine = open_engine(n_seq=3, cpu_reference=True, **SLOTS, miss="stream")
    single = open_engine(cpu_reference=True)
    ids = [prompt(engine, n, seed=n) for n in (45, 10, 70, 20)]
    expected = [alone(single, Request(one, GREEDY, 8, text=False, ignore_eos=True))[0]
                for one in ids]  # fmt: skip
    n_failed = 0
    with serving(engine) as service:
        for at in (1, 3, 9, 33, 129):
            with faulty(name, at, FAULTS[name][0]):
                clients = [Client(service, one, max_tokens=8) for one in ids]
                for client in clients:
                    client.wait()
            for client, tokens in zip(clients, expected):
                if client.reason == "error":
                    n_failed += 1
                    assert isinstance(client.last.error, FAULTS[name][1])
                    assert client.tokens == tokens[: len(client.tokens)]
                else:
                    assert (client.reason, client.tokens) == ("length", tokens)
            assert service.failure is None
    assert n_failed


def test_the_third_failure_in_a_row_ends_the_service_and_a_success_begins_anew(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(n_seq=1)

    def fail(*_: Any) -> None:
        raise NativeError("no")

    def ask() -> str | None:
        return Client(service, [1, 2], max_tokens=2).wait().reason

    with serving(engine) as service:
        for _ in range(2):
            with monkeypatch.context() as patched:
                patched.setattr(engine.passes, "read", fail)
                assert [ask(), ask()] == ["error"] * 2
            assert ask() == "length"
        monkeypatch.setattr(engine.passes, "read", fail)
        assert [ask(), ask(), ask()] == ["error"] * 3
        service._thread.join(PATIENCE_S / 4)
        assert service.failure == "no"


def test_prompts_of_one_sweep_that_all_leave_give_their_slots_back(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(n_seq=2, n_ctx=1024, n_ubatch=32)
    step_prompt, is_there, go_on = engine.passes.step_prompt, threading.Event(), threading.Event()

    def step(*given: Any) -> bool:
        is_there.set()
        assert go_on.wait(PATIENCE_S)
        return step_prompt(*given)

    monkeypatch.setattr(engine.passes, "step_prompt", step)
    with serving(engine) as service:
        with together(service):
            clients = [Client(service, prompt(engine, 50, seed=i), max_tokens=2) for i in range(2)]
        assert is_there.wait(PATIENCE_S)
        assert len(service._loop.answers.sweeping) == 2
        for client in clients:
            client.ticket.cancel()
        go_on.set()
        assert [client.wait().reason for client in clients] == ["cancelled"] * 2
        assert Client(service, [1, 2], max_tokens=2).wait().reason == "length"
        assert service.drain(PATIENCE_S) and len(service._loop.answers.idle_slots()) == 2


def test_failures_between_steps_of_a_prompt_that_succeed_end_no_service(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_LASTS_S", 0.0)  # pieces beside the prompt, however fast it is
    monkeypatch.setattr(scheduler, "_LONGER", 0)
    engine = open_engine(n_seq=2, n_ctx=4096, n_ubatch=32)

    def fail(*_: Any) -> None:
        raise NativeError("no")

    shorts, read_before, drawn = list[Client](), list[bool](), list[int]()

    def note(step: Step) -> None:
        read_before.extend([bool(drawn)] if step.finish_reason else [])

    with serving(engine) as service:

        def bring(step: Step) -> None:  # on the engine's thread, so that the prompt is under way
            drawn.extend(step.tokens)
            if len(shorts) < 4 and (not shorts or shorts[-1].is_done):
                shorts.append(Client(service, [len(shorts)], max_tokens=2, on_step=note))

        monkeypatch.setattr(engine.passes, "read", fail)
        long = Client(service, prompt(engine, 3000), max_tokens=2, on_step=bring)
        until(lambda: len(shorts) == 4)
        for short in shorts:
            assert short.wait().reason == "error"
        assert read_before == [False] * 4
        monkeypatch.undo()
        assert long.wait().reason == "length" and service.failure is None


def test_an_error_of_ours_that_comes_again_tells_every_request(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To end a prompt that is being read asks the same passes once more."""
    engine = open_engine(n_seq=3, n_ctx=4096, n_ubatch=32)
    step_prompt, n_steps = engine.passes.step_prompt, iter(range(1000))

    def fail(*given: Any) -> bool:
        if next(n_steps) < 40:
            return step_prompt(*given)
        raise KeyError("a bug")

    monkeypatch.setattr(engine.passes, "step_prompt", fail)
    with serving(engine) as service:
        clients = [Client(service, prompt(engine, 3000)), *(Client(service, [n]) for n in range(6))]
        for client in clients:
            assert client.wait().reason == "error", client.reason
        assert "KeyError" in str(service.failure)
    monkeypatch.undo()


def test_an_action_that_fails_unexpectedly_keeps_no_other_waiting(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = open_engine(n_seq=1)
    engine.keep_prefixes(None, 0, tmp_path)
    assert engine.slot_files

    def fail(*_: Any) -> None:
        raise TypeError("no")

    monkeypatch.setattr(engine.slot_files, "erase", fail)
    with serving(engine) as service:
        with together(service):
            waiting = [service.act("erase", 0, "-", "") for _ in range(3)]
        errors = [one.exception(PATIENCE_S) for one in waiting if one]
        assert [type(error) for error in errors] == [TypeError, ServiceClosed, ServiceClosed]
        assert service.failure and "TypeError: no" in service.failure
