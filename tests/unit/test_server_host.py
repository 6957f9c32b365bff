"""Tests of the model's life behind the server: loading, sleeping, failing, ending."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from contextlib import closing
from typing import Any

import pytest
from helpers.fake_service import FakeChatModel, FakeService
from helpers.patience import PATIENCE_S, until_so

from moegraph.errors import ConfigError, ModelFileError
from moegraph.server.errors import ApiError
from moegraph.server.host import LoadedModel, ModelFacts, ModelHost
from moegraph.server.running import listen, url_of

pytestmark = pytest.mark.usefixtures("unsettled")

FACTS = ModelFacts("fake")


class Loader:
    """Loads fakes; counts how often, and how often they were closed."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.gate = threading.Event()
        self.gate.set()
        self.n_loaded = self.n_closed = 0
        self.service = FakeService()

    def __call__(self) -> LoadedModel:
        self.gate.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        self.n_loaded += 1
        return LoadedModel(self.service, FakeChatModel(), FACTS, self._close)

    def _close(self) -> None:
        self.n_closed += 1


def refusal(host: ModelHost) -> Any:
    async def ask() -> ApiError:
        with pytest.raises(ApiError) as caught:
            await host.loaded()
        return caught.value

    return ask()


def test_requests_are_refused_until_the_model_is_loaded() -> None:
    async def go() -> None:
        loader = Loader()
        loader.gate.clear()
        host = ModelHost(loader, FACTS)
        loading = asyncio.ensure_future(host.start())
        await asyncio.sleep(0.01)
        error = await refusal(host)
        assert (host.condition, error.status, error.code) == ("loading", 503, "loading")
        assert "Retry-After" in error.headers and host.is_loading
        loader.gate.set()
        await loading
        assert host.condition == "ready" and (await host.loaded()).service is loader.service
        await host.close()
        assert loader.n_closed == 1

    asyncio.run(go())


def test_an_idle_model_sleeps_and_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraph.server.host._LOOK_S", 0.005)

    async def go() -> None:
        loader = Loader()
        host = ModelHost(loader, FACTS, sleep_s=0.05)
        await host.start()
        watching = asyncio.ensure_future(host.watch())
        host.enter()
        await asyncio.sleep(0.15)
        assert host.condition == "ready"
        host.leave()
        await until_so(lambda: host.condition == "sleeping" and loader.n_closed == 1)
        assert host.peek() is None
        host.enter()
        both = await asyncio.gather(host.loaded(), host.loaded())
        assert both[0] is both[1] and loader.n_loaded == 2 and host.condition == "ready"
        watching.cancel()
        await host.close()

    asyncio.run(go())


def test_a_model_that_cannot_wake_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraph.server.host._LOOK_S", 0.005)

    async def go() -> None:
        loader = Loader()
        host = ModelHost(loader, FACTS, sleep_s=0.01)
        await host.start()
        watching = asyncio.ensure_future(host.watch())
        await until_so(lambda: host.condition == "sleeping")
        loader.error = ModelFileError("the file is gone")
        assert "the file is gone" in (await refusal(host)).message
        loader.error = None
        host.enter()
        assert await host.loaded() and host.condition == "ready"
        watching.cancel()
        await host.close()

    asyncio.run(go())


def test_an_engine_that_is_stuck_is_waited_for_and_one_that_ended_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("moegraph.server.host._LOOK_S", 0.005)
    monkeypatch.setattr(logging.getLogger("moegraph"), "propagate", True)
    caplog.set_level(logging.INFO, "moegraph")

    async def go() -> None:
        loader = Loader()
        host = ModelHost(loader, FACTS)
        await host.start()
        watching = asyncio.ensure_future(host.watch())
        loader.service.failure, loader.service.busy_s = "busy for 300 s", 300.0
        await until_so(lambda: "no answers: busy for 300 s" in caplog.text)
        loader.service.failure = None
        await until_so(lambda: "works again" in caplog.text or watching.done())
        loader.service.failure, loader.service.busy_s = "broken", 0.0
        assert await asyncio.wait_for(watching, PATIENCE_S) == "broken"
        await host.close()

    asyncio.run(go())


def test_draining_waits_for_requests_and_refuses_new_ones() -> None:
    async def go() -> None:
        host = ModelHost(Loader(), FACTS)
        await host.start()
        host.enter()
        draining = asyncio.ensure_future(host.drain(PATIENCE_S))
        await asyncio.sleep(0.02)
        assert not draining.done() and (await refusal(host)).code == "closing"
        host.leave()
        assert await draining
        host.enter()
        assert not await host.drain(0.01)
        await host.close()

    asyncio.run(go())


def test_closing_does_not_wait_for_a_model_that_is_being_loaded() -> None:
    async def go() -> None:
        loader = Loader()
        loader.gate.clear()
        host = ModelHost(loader, FACTS)
        loading = asyncio.ensure_future(host.start())
        await asyncio.sleep(0.01)
        await asyncio.wait_for(host.close(), PATIENCE_S / 2)
        assert host.is_loading and host.condition == "closing"
        loader.gate.set()
        await loading

    asyncio.run(go())


def test_a_busy_port_is_a_setting_that_is_wrong() -> None:
    with closing(listen("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        assert url_of(first, "127.0.0.1") == f"http://127.0.0.1:{port}"
        assert url_of(first, "localhost") == f"http://localhost:{port}"
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(ConfigError):
        listen(host, 0)


def test_an_address_for_all_is_shown_as_one_that_works() -> None:
    with closing(listen("0.0.0.0", 0)) as sock:
        assert url_of(sock, "0.0.0.0").startswith("http://127.0.0.1:")
        socket.create_connection(("127.0.0.1", sock.getsockname()[1]), PATIENCE_S).close()
