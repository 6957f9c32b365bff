"""Tests of the protocol on real sockets: heads that never come, heads that are too long."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from helpers.fake_service import FixedBackend
from helpers.server_case import CHAT, Case

from moegraph.server.listening import listen, web_server


def with_server(act: Callable[[int], Awaitable[Any]], case: Case | None = None) -> Any:
    """Serve a fake model and do something with its port."""
    case = case or Case()

    async def go() -> Any:
        sock = listen("127.0.0.1", 0)
        web = web_server(case.app)
        serving = asyncio.ensure_future(web.serve(sockets=[sock]))
        while not web.started:
            await asyncio.sleep(0.005)
        try:
            return await asyncio.wait_for(act(sock.getsockname()[1]), 60)
        finally:
            web.should_exit = True
            await serving

    return asyncio.run(go())


async def sent(port: int, *pieces: bytes, wait_s: float = 0.0) -> bytes:
    """Send pieces and return all that comes until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(wait_s)
    answer = await reader.read()
    writer.close()
    return answer


def test_a_head_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraph.server.listening.HEAD_S", 0.1)
    assert with_server(lambda port: sent(port, b"GET /health HTTP/1.1\r\nHost: loc")) == b""
    assert with_server(lambda port: sent(port)) == b""


@pytest.mark.parametrize("limit", ["connections", "open files"])
def test_of_too_many_connections_the_longest_idle_one_gives_way(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit == "connections":
        monkeypatch.setattr("moegraph.server.listening.MAX_CONNECTIONS", 3)
    else:  # and it cannot be raised
        monkeypatch.setattr(resource, "getrlimit", lambda what: (6, 6))
        monkeypatch.setattr(resource, "setrlimit", lambda what, limits: None)
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"

    async def go(port: int) -> None:
        first, *others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert b"ok" in await sent(port, head + b"Connection: close\r\n\r\n")
        with suppress(ConnectionResetError):
            assert await first[0].read() == b""
        for reader, writer in others:
            writer.write(head + b"\r\n")
            assert b"200" in await reader.readline()
            writer.close()
        first[1].close()

    with_server(go)


def test_a_connection_that_is_too_many_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraph.server.listening.MAX_CONNECTIONS", 1)
    body = json.dumps({**CHAT, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"

    async def go(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        assert b"200" in await reader.readline()
        found = await sent(port)
        writer.close()
        return found

    found = with_server(go, Case(["a"] * 10_000, step_s=0.001))
    assert found.startswith(b"HTTP/1.1 503") and b"Retry-After" in found


def test_many_clients_may_come_while_the_server_is_busy() -> None:
    async def go(port: int) -> bytes:
        with ExitStack() as opened:  # nothing is accepted meanwhile
            for _ in range(300):
                opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        return await sent(port, b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")

    assert with_server(go).startswith(b"HTTP/1.1 200")


def test_a_client_that_vanished_is_found_out() -> None:
    with listen("127.0.0.1", 0) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


def test_a_second_head_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraph.server.listening.HEAD_S", 0.3)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = with_server(lambda port: sent(port, whole, b"GET /hea", wait_s=0.1))
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1


def test_a_head_that_comes_in_time_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraph.server.listening.HEAD_S", 5)
    head = (b"GET /health HTTP/1.1\r\n", b"Host: localhost\r\n", b"Connection: close\r\n\r\n")
    assert b'{"status":"ok"}' in with_server(lambda port: sent(port, *head, wait_s=0.05))


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 66_000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 no http\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: x\r\n\r\n",
    ],
)
def test_a_broken_head_is_refused(head: bytes) -> None:
    answer = with_server(lambda port: sent(port, head))
    assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 501"))


class Counted(FixedBackend):
    """Counts the requests that use the model."""

    n_users = 0

    def enter(self) -> None:
        self.n_users += 1

    def leave(self) -> None:
        self.n_users -= 1


async def leave_sometime(port: int, chance: random.Random) -> None:
    """Ask for an answer, whole or streamed, and hang up at a random moment."""
    path = chance.choice(["/v1/completions", "/v1/chat/completions", "/v1/messages"])
    body = json.dumps(
        {"prompt": "x", **CHAT, "stream": chance.random() < 0.7, "max_tokens": 1 << 30}
    ).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await asyncio.sleep(chance.random() * chance.choice([0.001, 0.02, 0.1]))
    if chance.random() < 0.5:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(chance.choice([1, 500, 50_000])), 0.05)
    if chance.random() < 0.5:
        writer.transport.abort()
    writer.close()


def test_clients_that_leave_at_random_moments_leave_nothing_behind() -> None:
    case = Case(["a"] * 1_000_000, step_s=0.001, n_read_steps=2)  # nobody hears its end
    found = case.state.backend.peek()
    assert found is not None
    backend = case.state.backend = Counted(found)

    async def go(port: int) -> None:
        chances = [random.Random(seed) for seed in range(80)]
        await asyncio.gather(*(leave_sometime(port, chance) for chance in chances))
        for _ in range(1000):
            if not backend.n_users and not case.state.metrics.n_open:
                break
            await asyncio.sleep(0.005)

    with_server(go, case)
    assert len(case.service.tickets) > 20
    assert all(ticket.gone.is_set() for ticket in case.service.tickets)
    assert (backend.n_users, case.state.metrics.n_open, case.state.metrics.n_queued) == (0, 0, 0)


def test_a_body_that_was_refused_cannot_hold_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moegraph.server.listening.HEAD_S", 0.3)

    async def dribble(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999\r\n\r\n")
        answer = asyncio.ensure_future(reader.read())
        for _ in range(60):
            await asyncio.sleep(0.05)
            if answer.done():
                break
            writer.write(b"x")
        assert answer.done()
        return answer.result()

    assert with_server(dribble).startswith(b"HTTP/1.1 415")


LONG = b'{"content": "' + b"a" * 3_000_000 + b'"}'
TOKENIZE = (
    b"POST /tokenize HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(LONG)
)


@pytest.mark.parametrize("reads", [True, False])
def test_only_a_client_that_reads_nothing_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    monkeypatch.setattr("moegraph.server.listening.STALL_S", 1.0)

    async def read(port: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(TOKENIZE + LONG)
        n_bytes = len(await reader.read(1000))
        for _ in range(20):
            await asyncio.sleep(0.1)
            n_bytes += len(await reader.read(200_000)) if reads else 0
        try:
            while piece := await reader.read(1 << 20):
                n_bytes += len(piece)
        except ConnectionResetError:
            pass
        writer.close()
        return n_bytes

    assert (with_server(read) > 3 * len(LONG) // 2) == reads
