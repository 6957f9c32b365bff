"""Tests of talks and event streams: order, cancellation, clients that leave or do not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import closing
from typing import Any

import pytest
from helpers.fake_service import FakeChatModel, FakeService
from helpers.patience import PATIENCE_S, until_so

from moegraph.engine.chat import Prepared, TextRequest
from moegraph.errors import QueueFull
from moegraph.loop.requests import Step, Usage
from moegraph.server.answers import Answers, total
from moegraph.server.errors import ApiError
from moegraph.server.replies import EventStream, data


def prepared(*prompts: str) -> list[Prepared]:
    return [FakeChatModel().prepare_text(TextRequest(prompt=prompt)) for prompt in prompts]


async def texts(talk: Answers) -> list[str]:
    """Return what each choice said."""
    found = [""] * len(talk.usages)
    with closing(talk):
        async for said in talk:
            found[said.index] += said.step.text
    return found


def test_choices_do_not_mix() -> None:
    async def go() -> None:
        service = FakeService([["a"] * 50, ["b"] * 60])
        talk = Answers(service, prepared("xx", "xx"))
        assert await texts(talk) == ["a" * 50, "b" * 60]
        assert total(talk.usages).n_prompt == 2 and total(talk.usages).n_generated == 110

    asyncio.run(go())


def test_steps_that_wait_are_merged() -> None:
    async def go() -> int:
        service = FakeService([["a"] * 100])
        talk = Answers(service, prepared("x"))
        await until_so(service.tickets[0].ended.is_set)
        await asyncio.sleep(0.005)
        steps = [said async for said in talk]
        assert "".join(said.step.text for said in steps) == "a" * 100
        assert steps[-1].is_last and len(steps[-1].step.tokens) == 100
        return len(steps)

    assert asyncio.run(go()) == 1


def test_leaving_a_talk_cancels_what_runs() -> None:
    async def go() -> None:
        service = FakeService([["a"] * 10_000], step_s=0.001)
        with closing(Answers(service, prepared("x", "y"))) as talk:
            await anext(talk)
        assert all(ticket.gone.is_set() for ticket in service.tickets)
        with pytest.raises(StopAsyncIteration):
            while True:
                await anext(talk)

    asyncio.run(go())


class FullAfterOne(FakeService):
    """Has room for one request."""

    def submit(self, request: Any, deliver: Any) -> Any:
        if self.tickets:
            raise QueueFull("full", 1.0)
        return super().submit(request, deliver)


def test_if_one_choice_is_refused_none_runs() -> None:
    async def go() -> None:
        service = FullAfterOne([["a"] * 10_000], step_s=0.001)
        with pytest.raises(ApiError) as caught:
            Answers(service, prepared("x", "y"))
        assert caught.value.status == 429 and caught.value.headers["Retry-After"] == "1"
        assert service.tickets[0].gone.is_set()

    asyncio.run(go())


def test_steps_after_the_loop_has_ended_are_dropped() -> None:
    async def go() -> Answers:
        return Answers(FakeService([["a"]]), prepared("x"))

    asyncio.run(go())._deliver(0, Step(Usage(1), (1,), "a"))


class Wire:
    """An ASGI connection: what is sent, and a client that leaves after some messages.

    n_taken: messages that the client takes; then it stops reading. leaves: whether it goes then.
    heard: set when two comments have come.
    """

    def __init__(self, n_taken: int = 1 << 30, leaves: bool = False) -> None:
        self.sent: list[dict[str, Any]] = []
        self.n_taken, self.leaves = n_taken, leaves
        self.gone, self.heard = asyncio.Event(), asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if len(self.sent) >= self.n_taken:
            if self.leaves:
                self.gone.set()
            await asyncio.sleep(3600)
        self.sent.append(message)
        if self.body.count(b": ping") >= 2:
            self.heard.set()

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent)


class Source:
    """Frames for a stream; `is_closed` tells whether its `finally` ran.

    silent: none comes before it is set.
    """

    def __init__(self, n: int, wait_s: float = 0.0, silent: asyncio.Event | None = None) -> None:
        self.n, self.wait_s, self.silent = n, wait_s, silent
        self.is_closed = False

    async def frames(self) -> AsyncGenerator[bytes, None]:
        try:
            if self.silent is not None:
                await self.silent.wait()
            for i in range(self.n):
                await asyncio.sleep(self.wait_s)
                yield data(i)
        finally:
            self.is_closed = True


def play(source: Source, wire: Wire, **given: Any) -> None:
    async def go() -> None:
        stream = EventStream(source.frames(), **given)
        await asyncio.wait_for(stream({"type": "http"}, wire.receive, wire.send), PATIENCE_S)

    asyncio.run(go())


def test_a_silent_stream_sends_comments() -> None:
    wire = Wire()
    play(Source(1, silent=wire.heard), wire, ping_s=0.02)
    assert wire.body.startswith(b": ping\n\n: ping\n\n") and wire.body.endswith(b"data: 0\n\n")


def test_a_client_that_leaves_ends_the_source() -> None:
    source = Source(1 << 30, wait_s=0.0001)
    play(source, Wire(n_taken=20, leaves=True))
    assert source.is_closed


def test_a_client_that_leaves_while_nothing_is_sent_ends_the_source() -> None:
    async def go() -> None:
        source, wire = Source(1, silent=asyncio.Event()), Wire()
        stream = EventStream(source.frames())
        running = asyncio.ensure_future(stream({"type": "http"}, wire.receive, wire.send))
        await asyncio.sleep(0.01)
        wire.gone.set()
        await asyncio.wait_for(running, PATIENCE_S)
        assert source.is_closed

    asyncio.run(go())


def test_a_stream_whose_frames_are_never_asked_for_is_closed_too() -> None:
    async def go() -> None:
        source, wire, ends = Source(3), Wire(n_taken=0, leaves=True), list[int]()
        stream = EventStream(source.frames(), close=lambda: ends.append(1))
        await asyncio.wait_for(stream({"type": "http"}, wire.receive, wire.send), PATIENCE_S)
        assert ends == [1] and not source.is_closed

    asyncio.run(go())


def test_text_that_is_not_utf_8_is_written_too() -> None:
    assert data({"name": "\ud800"}) == b'data: {"name": "\\ud800"}\n\n'
