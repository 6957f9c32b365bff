"""Tests of the process around the server: what ends it, and how."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from helpers.fake_service import FakeChatModel, FakeService

from moegraph.errors import ConfigError, ModelFileError, NativeError
from moegraph.server.backend import Loaded, ModelFacts
from moegraph.server.guards import Guard, Keys
from moegraph.server.host import ModelHost
from moegraph.server.listening import listen, url_of
from moegraph.server.running import Ways, run
from moegraph.server.site import build_site
from moegraph.server.state import ServerState

FACTS = ModelFacts("fake")


class Process:
    """Runs the server on this thread; `act` is called on another one when it is ready."""

    def __init__(self, service: FakeService | None = None, drain_s: float = 5.0) -> None:
        self.service = service or FakeService()
        self.error: Exception | None = None
        self.said: list[str] = []
        self.n_reloads = 0
        self.refuses_reload = False
        self.drain_s = drain_s
        self.n_closed = 0

    def load(self) -> Loaded:
        if self.error is not None:
            raise self.error
        return Loaded(self.service, FakeChatModel(), FACTS, self.close)

    def close(self) -> None:
        self.n_closed += 1
        self.service.close()

    def reload(self) -> None:
        self.n_reloads += 1
        if self.refuses_reload:
            raise ConfigError("no such file")

    def run(self, act: Callable[[str], Any]) -> int:
        with listen("127.0.0.1", 0) as sock:
            url = url_of(sock, "127.0.0.1")
            thread = threading.Thread(target=act, args=(url,))
            ways = Ways(thread.start, self.reload, self.said.append, self.drain_s)
            try:
                return run(
                    lambda host: build_site(ServerState(host), Guard(Keys())),
                    lambda: ModelHost(self.load, FACTS), sock, ways,
                )  # fmt: skip
            finally:
                if thread.ident is not None:
                    thread.join()


def send(number: int) -> Callable[[str], None]:
    return lambda _: os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_the_server(number: int, code: int) -> None:
    process = Process()
    assert process.run(send(number)) == code
    assert process.n_closed == 1 and process.said == []


def test_requests_that_run_may_end_first() -> None:
    process = Process(FakeService([["a"] * 20], step_s=0.02))
    found: list[Any] = []

    def act(url: str) -> None:
        asking = threading.Thread(
            target=lambda: found.append(httpx.post(f"{url}/v1/completions", json={"prompt": "x"}))
        )
        asking.start()
        while not process.service.tickets:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)
        asking.join()

    assert process.run(act) == 0
    assert found[0].json()["choices"][0]["text"] == "a" * 20
    assert "waiting up to 5 s for 1 request" in process.said[0]


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    process = Process()
    process.error = ModelFileError("broken")
    with pytest.raises(ModelFileError, match="broken"):
        process.run(lambda url: None)


def test_an_engine_that_fails_ends_the_server() -> None:
    process = Process()

    def act(url: str) -> None:
        assert httpx.get(f"{url}/health").status_code == 200
        process.service.failure = "no memory"
        assert httpx.get(f"{url}/health").status_code == 503

    with pytest.raises(NativeError, match="no memory"):
        process.run(act)


def test_sighup_reads_the_keys_again_and_keeps_them_if_that_fails() -> None:
    process = Process()

    def act(_: str) -> None:
        for n in (1, 2):
            os.kill(os.getpid(), signal.SIGHUP)
            while process.n_reloads < n:
                time.sleep(0.005)
            process.refuses_reload = True
        os.kill(os.getpid(), signal.SIGTERM)

    assert process.run(act) == 0
