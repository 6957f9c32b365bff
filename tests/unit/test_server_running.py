"""Tests of the process around the server: what ends it, and how."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from helpers.fake_service import FakeChatModel, FakeService
from helpers.patience import PATIENCE_S, until
from starlette.requests import Request as HttpRequest

from moegraph.errors import ConfigError, ModelFileError, NativeError
from moegraph.server.app import build_site
from moegraph.server.guards import Guard, Keys
from moegraph.server.host import LoadedModel, Model, ModelFacts, ModelHost
from moegraph.server.running import ServerProcess, listen, url_of
from moegraph.server.schemas import LIMITS
from moegraph.server.state import BODY_BYTES, PICTURES, ServerState, Workers, read_body

pytestmark = pytest.mark.usefixtures("unsettled")

FACTS = ModelFacts("fake")


class Process:
    """Runs the server on this thread; `act` is called on another one when it is ready."""

    def __init__(self, service: FakeService | None = None, drain_s: float = PATIENCE_S) -> None:
        self.service = service or FakeService()
        self.error: Exception | None = None
        self.said: list[str] = []
        self.n_reloads = 0
        self.refuses_reload = False
        self.drain_s = drain_s
        self.n_closed = 0
        self.model = FakeChatModel()
        self.host = ModelHost([Model(self.load, FACTS)])

    def load(self) -> LoadedModel:
        if self.error is not None:
            raise self.error
        return LoadedModel(self.service, self.model, FACTS, self.close)

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
            process = ServerProcess(
                app=lambda host: build_site(ServerState(host), Guard(Keys())),
                host=lambda: self.host, sock=sock, ready=thread.start, reload=self.reload,
                say=self.said.append, drain_s=self.drain_s,
            )  # fmt: skip
            try:
                return process.run()
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
            target=lambda: found.append(
                httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=PATIENCE_S)
            )
        )
        asking.start()
        until(lambda: process.service.tickets)
        os.kill(os.getpid(), signal.SIGTERM)
        asking.join()

    assert process.run(act) == 0
    assert found[0].json()["choices"][0]["text"] == "a" * 20
    assert f"waiting up to {PATIENCE_S:.0f} s for 1 request" in process.said[0]


BODY = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("sent", ["", "POST /v1", f"{BODY}Content-Length: 9\r\n\r\n{{"])
def test_a_client_that_sends_half_a_request_is_not_waited_for(
    sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process()
    began: list[float] = []
    monkeypatch.setattr("moegraph.server.running.HEAD_S", PATIENCE_S)
    monkeypatch.setattr("moegraph.server.running._LINGER_S", PATIENCE_S)

    def act(url: str) -> None:
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port)) as sock:
            sock.sendall(sent.encode())
            httpx.get(f"{url}/health", timeout=PATIENCE_S)
            began.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)
            assert sock.recv(100) == b""

    assert process.run(act) == 0
    assert time.monotonic() - began[0] < PATIENCE_S / 2


class Stuck(FakeChatModel):
    """Prepares a request until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_busy, self.may_end = threading.Event(), threading.Event()

    def prepare_text(self, text: Any) -> Any:
        self.is_busy.set()
        self.may_end.wait(PATIENCE_S)
        return super().prepare_text(text)


class Left(BaseException):
    """Instead of the end of the process."""


def test_a_thread_that_is_stuck_does_not_hold_the_end_up(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise Left

    monkeypatch.setattr("moegraph.server.running._leave", leave)
    monkeypatch.setattr("moegraph.server.running._GRACE_S", 0.1)
    process = Process()
    model = process.model = Stuck()

    def act(url: str) -> None:
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port)) as sock:
            sock.sendall(f'{BODY}Content-Length: 15\r\n\r\n{{"prompt": "x"}}'.encode())
            assert model.is_busy.wait(PATIENCE_S)
        until(lambda: not process.host.line.n_users)
        os.kill(os.getpid(), signal.SIGINT)

    began = time.monotonic()
    try:
        with pytest.raises(Left):
            process.run(act)
    finally:
        model.may_end.set()
    assert codes == [130] and time.monotonic() - began < PATIENCE_S / 2
    assert process.said == [
        "interrupted",
        "ended; a prompt or grammar was still being prepared after 0.1 s more",
    ]


def test_a_signal_does_not_wait_for_a_model_that_is_being_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes: list[int] = []
    may_end = threading.Event()

    def leave(code: int) -> None:
        codes.append(code)
        may_end.set()  # the test's own process waits for its threads
        raise Left

    def load() -> LoadedModel:
        os.kill(os.getpid(), signal.SIGINT)
        may_end.wait(PATIENCE_S)
        raise ModelFileError("nobody waits for this")

    monkeypatch.setattr("moegraph.server.running._leave", leave)
    process = Process()
    process.host = ModelHost([Model(load, FACTS)])
    with pytest.raises(Left):
        process.run(lambda url: None)
    assert codes == [130] and process.said == ["interrupted"]


def test_an_engine_that_fails_ends_the_server() -> None:
    process = Process()

    def act(url: str) -> None:
        assert httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
        process.service.failure = "no memory"
        with suppress(httpx.HTTPError):  # it may have ended by then
            assert httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 503

    with pytest.raises(NativeError, match="no memory"):
        process.run(act)


def test_sighup_reads_the_keys_again_and_keeps_them_if_that_fails() -> None:
    process = Process()

    def act(_: str) -> None:
        for n in (1, 2):
            os.kill(os.getpid(), signal.SIGHUP)
            until(lambda n=n: process.n_reloads >= n)  # type: ignore[misc]
            process.refuses_reload = True
        os.kill(os.getpid(), signal.SIGTERM)

    assert process.run(act) == 0


@pytest.mark.parametrize("field", ["image_url", "image", "images", "input_image", "text"])
def test_requests_with_pictures_have_a_thread_of_their_own(field: str) -> None:
    body = json.dumps({"messages": [{field: "..."}]}).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def go() -> int:
        await read_body(HttpRequest({"type": "http", "headers": []}, receive), LIMITS)
        return BODY_BYTES.get()

    assert asyncio.run(go()) == (len(body) if field == "text" else PICTURES)


def test_small_requests_do_not_wait_for_large_ones() -> None:
    async def go() -> None:
        workers, may_end, tasks = Workers(), threading.Event(), list[asyncio.Future[bool]]()
        for n_bytes in (100_000, 3_000_000, PICTURES):
            BODY_BYTES.set(n_bytes)
            tasks += [asyncio.ensure_future(workers.run(may_end.wait)) for _ in range(8)]
        await asyncio.sleep(0)
        BODY_BYTES.set(100)
        assert await workers.run(lambda: "small") == "small" and not may_end.is_set()
        ending = asyncio.ensure_future(workers.end(PATIENCE_S))
        await asyncio.sleep(0)  # from here on what has not begun never does, and is not waited for
        may_end.set()
        assert await ending
        assert True in await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(go(), PATIENCE_S))
