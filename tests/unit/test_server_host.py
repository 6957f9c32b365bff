"""Tests of the model's life behind the server: loading, sleeping, failing, ending."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import pytest
from helpers.fake_service import FakeChatModel, FakeService
from helpers.patience import PATIENCE_S, until_so

from moegraph.errors import ConfigError, ModelFileError, QueueFull
from moegraph.server.errors import ApiError
from moegraph.server.host import LoadedModel, Model, ModelFacts, ModelHost
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


async def loaded(host: ModelHost, which: int = 0) -> LoadedModel:
    """Return a model for a request that begins now and ends at once."""
    use = host.line.enter(host.models[which])
    try:
        return await host.loaded(use)
    finally:
        host.line.leave(use)


def refusal(host: ModelHost, which: int = 0) -> Any:
    async def ask() -> ApiError:
        with pytest.raises(ApiError) as caught:
            await loaded(host, which)
        return caught.value

    return ask()


def test_requests_are_refused_until_the_model_is_loaded() -> None:
    async def go() -> None:
        loader = Loader()
        loader.gate.clear()
        host = ModelHost([Model(loader, FACTS)])
        loading = asyncio.ensure_future(host.start())
        await asyncio.sleep(0.01)
        error = await refusal(host)
        assert (host.condition, error.status, error.code) == ("loading", 503, "loading")
        assert "Retry-After" in error.headers and host.is_loading
        loader.gate.set()
        await loading
        assert host.condition == "ready" and (await loaded(host)).service is loader.service
        await host.close()
        assert loader.n_closed == 1

    asyncio.run(go())


def test_an_idle_model_sleeps_and_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraph.server.host._LOOK_S", 0.005)

    async def go() -> None:
        loader = Loader()
        host = ModelHost([Model(loader, FACTS)], sleep_s=0.05)
        await host.start()
        watching = asyncio.ensure_future(host.watch())
        use = host.line.enter(host.models[0])
        await asyncio.sleep(0.15)
        assert host.condition == "ready"
        host.line.leave(use)
        await until_so(lambda: host.condition == "sleeping" and loader.n_closed == 1)
        assert host.peek() is None
        both = await asyncio.gather(loaded(host), loaded(host))
        assert both[0] is both[1] and loader.n_loaded == 2 and host.condition == "ready"
        watching.cancel()
        await host.close()

    asyncio.run(go())


def test_a_model_that_cannot_wake_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraph.server.host._LOOK_S", 0.005)

    async def go() -> None:
        loader = Loader()
        host = ModelHost([Model(loader, FACTS)], sleep_s=0.01)
        await host.start()
        watching = asyncio.ensure_future(host.watch())
        await until_so(lambda: host.condition == "sleeping")
        loader.error = ModelFileError("the file is gone")
        assert "the file is gone" in (await refusal(host)).message
        loader.error = None
        assert await loaded(host) and host.condition == "ready"
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
        host = ModelHost([Model(loader, FACTS)])
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
        host = ModelHost([Model(Loader(), FACTS)])
        await host.start()
        use = host.line.enter(host.models[0])
        draining = asyncio.ensure_future(host.drain(PATIENCE_S))
        await asyncio.sleep(0.02)
        assert not draining.done() and (await refusal(host)).code == "closing"
        host.line.leave(use)
        assert await draining
        host.line.enter(host.models[0])
        assert not await host.drain(0.01)
        await host.close()

    asyncio.run(go())


def test_closing_does_not_wait_for_a_model_that_is_being_loaded() -> None:
    async def go() -> None:
        loader = Loader()
        loader.gate.clear()
        host = ModelHost([Model(loader, FACTS)])
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


class Several:
    """Loaders of models, in one list of what happened; names of models that fail."""

    def __init__(self, names: str = "ab", n_most: int = 100) -> None:
        self.told: list[str] = []
        self.wrong: dict[str, Exception] = {}
        self.gate, self.checks = threading.Event(), threading.Event()
        self.gate.set()
        self.checks.set()
        self.loaded: set[str] = set()
        self.host = ModelHost([self._model(name) for name in names], None, False, n_most)

    def _model(self, name: str) -> Model:
        facts = ModelFacts(name)

        def load() -> LoadedModel:
            self.gate.wait(PATIENCE_S)
            assert not self.loaded, "two models are in memory"
            if name in self.wrong:
                raise self.wrong[name]
            self.told.append(f"+{name}")
            self.loaded.add(name)
            return LoadedModel(FakeService(), FakeChatModel(), facts, close)

        def close() -> None:
            self.told.append(f"-{name}")
            self.loaded.remove(name)

        def check() -> None:
            self.checks.wait(PATIENCE_S)
            if isinstance(self.wrong.get(name), ModelFileError):
                raise self.wrong[name]

        return Model(load, facts, check=check, path=f"/secret/{name}")

    async def run(self, which: int, gate: asyncio.Event | None = None) -> None:
        """Be a request: find the right model, and run until the gate opens."""
        use = self.host.line.enter(self.host.models[which])
        try:
            found = await self.host.loaded(use)
            name = found.facts.name
            assert name == "abc"[which] and self.loaded == {name}
            self.told.append(name)
            if gate is not None:
                await gate.wait()
                assert self.loaded == {name}, "the model left while a request ran"
        finally:
            self.host.line.leave(use)


def with_several(case: Several, go: Callable[[], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        await case.host.start()
        assert case.host.condition == "sleeping" and case.told == []
        await go()
        await case.host.close()

    asyncio.run(all_of_it())


def test_requests_for_another_model_wait_in_order_and_none_starves() -> None:
    case = Several("abc")

    async def go() -> None:
        gate = asyncio.Event()
        running = [asyncio.ensure_future(case.run(0, gate)) for _ in range(2)]
        await until_so(lambda: case.told.count("a") == 2)
        for which in (1, 0, 2, 1):  # the second a waits behind b, although a is in memory
            running.append(asyncio.ensure_future(case.run(which)))
            await asyncio.sleep(0.001)
        assert case.told == ["+a", "a", "a"]
        assert [case.host.status(one) for one in case.host.models] == [
            "loaded", "unloaded", "unloaded",
        ]  # fmt: skip
        gate.set()
        await asyncio.gather(*running)
        told = "+a a a -a +b b b -b +a a -a +c c"
        assert case.told == told.split()

    with_several(case, go)
    assert case.told[-1] == "-c"


def test_alternating_requests_each_get_their_model() -> None:
    case = Several()

    async def go() -> None:
        await asyncio.gather(*(case.run(i % 2) for i in range(40)))
        for i in range(6):
            await case.run(i % 2)
        assert case.told.count("a") == case.told.count("b") == 23

    with_several(case, go)


def test_a_client_that_leaves_the_line_neither_blocks_nor_cuts_a_load() -> None:
    case = Several()

    async def go() -> None:
        case.gate.clear()
        first = asyncio.ensure_future(case.run(0))
        await until_so(lambda: case.host.status(case.host.models[0]) == "loading")
        second = asyncio.ensure_future(case.run(1))
        await asyncio.sleep(0.005)
        first.cancel()
        second.cancel()
        await asyncio.sleep(0.005)
        assert case.host.line.n_users == 0 and not case.host.line.waiting
        case.gate.set()
        await until_so(lambda: case.told == ["+a"])
        await case.run(1)
        assert case.told == ["+a", "-a", "+b", "b"]

    with_several(case, go)


def test_a_model_stays_for_a_request_that_comes_while_the_file_of_another_is_looked_at() -> None:
    case = Several()

    async def go() -> None:
        await case.run(0)
        case.checks.clear()
        leaving = asyncio.ensure_future(case.run(1))
        await until_so(lambda: case.host.is_loading)
        leaving.cancel()
        await until_so(lambda: not case.host.line.waiting)
        gate = asyncio.Event()
        running = asyncio.ensure_future(case.run(0, gate))
        await until_so(lambda: case.told.count("a") == 2)
        other = asyncio.ensure_future(case.run(1))
        case.checks.set()
        await until_so(lambda: not case.host.is_loading)
        gate.set()
        await asyncio.gather(running, other)
        assert case.told == ["+a", "a", "a", "-a", "+b", "b"]

    with_several(case, go)


@pytest.mark.parametrize(
    "error, is_kept", [(ModelFileError("/secret/b: bad"), True), (MemoryError(), False)]
)
def test_a_model_that_cannot_be_loaded_is_an_error_of_its_requests(
    error: Exception, is_kept: bool
) -> None:
    """A file that is wrong is seen before the other model leaves the memory for it."""
    case = Several()
    case.wrong["b"] = error

    async def go() -> None:
        await case.run(0)
        both = await asyncio.gather(refusal(case.host, 1), refusal(case.host, 1))
        assert both[0] is not both[1]
        for found in both:
            assert (found.status, found.code) == (503, "model_not_loaded")
            assert "the model b could not be loaded: " in found.message
            assert "secret" not in found.message
            assert ("X-Should-Retry" in found.headers) == is_kept
        assert case.loaded == ({"a"} if is_kept else set())
        await case.run(0)
        case.wrong.clear()
        await case.run(1)

    with_several(case, go)


def test_as_many_wait_as_may() -> None:
    case = Several(n_most=1)

    async def go() -> None:
        case.gate.clear()
        first = asyncio.ensure_future(case.run(0))
        await asyncio.sleep(0.005)
        with pytest.raises(QueueFull):
            await case.run(1)
        case.gate.set()
        await first

    with_several(case, go)


def test_who_waits_when_the_server_ends_is_refused_at_once() -> None:
    case = Several()

    async def go() -> None:
        gate = asyncio.Event()
        first = asyncio.ensure_future(case.run(0, gate))
        await until_so(lambda: "a" in case.told)
        second = asyncio.ensure_future(refusal(case.host, 1))
        await asyncio.sleep(0.005)
        draining = asyncio.ensure_future(case.host.drain(PATIENCE_S))
        assert (await second).code == "closing" and not draining.done()
        gate.set()
        await first
        assert await draining

    with_several(case, go)
