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
from helpers.patience import PATIENCE_S, until_so
from helpers.server_case import CHAT, Case

from moegraph.server.running import PatientProtocol, listen, web_server


def with_server(act: Callable[[int], Awaitable[Any]], case: Case | None = None) -> Any:
    """Serve a fake model and do something with its port."""
    case = case or Case()

    async def go() -> Any:
        sock = listen("127.0.0.1", 0)
        web = web_server(case.app)
        serving = asyncio.ensure_future(web.serve(sockets=[sock]))
        await until_so(lambda: web.started)
        try:
            return await asyncio.wait_for(act(sock.getsockname()[1]), PATIENCE_S)
        finally:
            web.should_exit = True
            await serving

    return asyncio.run(go())


async def rest(reader: asyncio.StreamReader) -> bytes:
    """Return all that comes until the server closes the connection, or ends it with a reset."""
    found = b""
    with suppress(ConnectionResetError):
        while piece := await reader.read(1 << 20):
            found += piece
    return found


async def sent(port: int, *pieces: bytes, wait_s: float = 0.0) -> bytes:
    """Send pieces and return all that comes until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(wait_s)
    answer = await rest(reader)
    writer.close()
    return answer


def test_a_head_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraph.server.running.HEAD_S", 0.1)
    assert with_server(lambda port: sent(port, b"GET /health HTTP/1.1\r\nHost: loc")) == b""
    assert with_server(lambda port: sent(port)) == b""


@pytest.mark.parametrize("limit", ["connections", "open files"])
def test_of_too_many_connections_the_longest_idle_one_gives_way(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit == "connections":
        monkeypatch.setattr("moegraph.server.running.MAX_CONNECTIONS", 3)
    else:  # and it cannot be raised
        monkeypatch.setattr(resource, "getrlimit", lambda what: (6, 6))
        monkeypatch.setattr(resource, "setrlimit", lambda what, limits: None)
    monkeypatch.setattr("moegraph.server.running.HEAD_S", PATIENCE_S)
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
    monkeypatch.setattr("moegraph.server.running.MAX_CONNECTIONS", 1)
    body = json.dumps({**CHAT, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"

    async def go(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        assert b"200" in await reader.readline()
        found = await sent(port)
        writer.close()
        return found

    found = with_server(go, Case(["a"] * 1_000_000, step_s=0.001))
    assert found.startswith(b"HTTP/1.1 503") and b"Retry-After" in found


def test_many_clients_may_come_while_the_server_is_busy() -> None:
    async def go(port: int) -> bytes:
        with ExitStack() as opened:  # nothing is accepted meanwhile
            for _ in range(300):
                opened.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S))
        return await sent(port, b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")

    assert with_server(go).startswith(b"HTTP/1.1 200")


def test_a_client_that_vanished_is_found_out() -> None:
    with listen("127.0.0.1", 0) as sock:
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


def test_a_second_head_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraph.server.running.HEAD_S", 0.3)

    async def go(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
        writer.write(b"GET /hea")
        assert await rest(reader) == b""
        writer.close()

    with_server(go)


def test_a_head_that_comes_in_time_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraph.server.running.HEAD_S", PATIENCE_S)
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


_GET, _HOST = b"GET /health HTTP/1.1\r\n", b"Host: localhost\r\n"
_POST = b"POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\n" + _HOST
AMBIGUOUS = {
    "length beside coding": _POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    "coding beside length": _POST + b"transfer-encoding: chunked\r\nCONTENT-LENGTH: 5\r\n\r\n",
    "lines that end with LF": _GET + b"Host: localhost\n\r\n",
    "a head that ends with LF": _GET + b"Host: localhost\n\n",
    "a request line that ends with LF": b"GET /health HTTP/1.1\n" + _HOST + b"\r\n",
    "a CR alone": _GET + b"Host: localhost\rX: 1\r\n\r\n",
    "a folded line": _GET + _HOST + b"X: 1\r\n two\r\n\r\n",
    "a line folded with a tab": _GET + _HOST + b"X: 1\r\n\ttwo\r\n\r\n",
    "two lengths": _POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "two hosts": _GET + _HOST + _HOST + b"\r\n",
    "a host with a user": _GET + b"Host: localhost:80@evil\r\n\r\n",
}


@pytest.mark.parametrize("head", AMBIGUOUS.values(), ids=AMBIGUOUS)
@pytest.mark.parametrize("is_second", [False, True])
def test_a_head_that_can_be_read_in_two_ways_is_refused_and_the_connection_closed(
    head: bytes, is_second: bool
) -> None:
    """Another server, such as a proxy before this one, may read it the other way."""
    smuggled = b"5\r\nhello\r\n0\r\n\r\n" + _GET + _HOST + b"\r\n"
    first = _GET + _HOST + b"\r\n"
    pieces = [head + smuggled]
    if is_second:  # after another request, in the same piece and in one of its own
        pieces = [first + head + smuggled]
    for sending in (pieces, [first * is_second, head[:-1], head[-1:] + smuggled]):
        answer = with_server(lambda port: sent(port, *sending, wait_s=0.01))
        codes = [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]]
        assert codes == [b"200"] * is_second + [b"400"]


def test_heads_and_bodies_that_are_allowed_are_read() -> None:
    body = b'{"content":\n"a\r\n b"}'.replace(b"\r\n b", b"b")
    length = _POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    chunked = _POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    last = _GET + b"Host:localhost:8080\r\nX-Empty:\r\nConnection: close\r\n\r\n"
    answer = with_server(lambda port: sent(port, length + chunked + length + last))
    assert answer.count(b"HTTP/1.1 200") == 4 and answer.count(b'"count":2') == 3


async def leave_sometime(port: int, chance: random.Random) -> None:
    """Ask for an answer, whole or streamed, and hang up at a random moment, or a while after it."""
    path = chance.choice(["/v1/completions", "/v1/chat/completions", "/v1/messages"])
    is_streamed = chance.random() < 0.7
    body = json.dumps(
        {"prompt": "x", **CHAT, "stream": is_streamed, "max_tokens": 1 << 30}
    ).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await asyncio.sleep(chance.random() * chance.choice([0.001, 0.02, 0.1]))
    if is_streamed and chance.random() < 0.7:
        await reader.read(chance.choice([1, 500, 50_000]))
    if chance.random() < 0.5:
        writer.transport.abort()
    writer.close()


def test_clients_that_leave_at_random_moments_leave_nothing_behind() -> None:
    case = Case(["a"] * 1_000_000, step_s=0.001, n_read_steps=2)  # nobody hears its end
    line = case.state.backend.line

    async def go(port: int) -> None:
        chances = [random.Random(seed) for seed in range(80)]
        await asyncio.gather(*(leave_sometime(port, chance) for chance in chances))
        await until_so(lambda: not line.n_users and not case.state.metrics.n_open)

    with_server(go, case)
    assert len(case.service.tickets) > 20
    assert all(ticket.gone.is_set() for ticket in case.service.tickets)
    assert (line.n_users, case.state.metrics.n_open, case.state.metrics.n_queued) == (0, 0, 0)


def test_a_body_that_was_refused_cannot_hold_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moegraph.server.running.HEAD_S", 0.3)

    async def dribble(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999\r\n\r\n")
        answer = asyncio.ensure_future(rest(reader))
        while not answer.done():
            await asyncio.sleep(0.05)
            writer.write(b"x")
        return answer.result()

    assert with_server(dribble).startswith(b"HTTP/1.1 415")


LONG = b'{"content": "' + b"a" * 3_000_000 + b'"}'
TOKENIZE = (
    b"POST /tokenize HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(LONG)
)


async def begun(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for an answer of several MB and return what reads it, when its beginning has come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(TOKENIZE + LONG)
    assert (await reader.read(1000)).startswith(b"HTTP/1.1 200")
    return reader, writer


def test_a_client_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraph.server.running.STALL_S", 0.2)
    lost: list[Any] = []
    real = PatientProtocol.connection_lost
    monkeypatch.setattr(
        PatientProtocol, "connection_lost", lambda self, exc: (lost.append(exc), real(self, exc))
    )

    async def go(port: int) -> int:
        reader, writer = await begun(port)
        await until_so(lambda: lost)
        n_bytes = len(await rest(reader))
        writer.close()
        return n_bytes

    assert with_server(go) < 3 * len(LONG) // 2


def test_a_client_that_reads_slowly_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[tuple[PatientProtocol, int]] = []
    monkeypatch.setattr(PatientProtocol, "_watch", lambda self, n: watched.append((self, n)))

    async def go(port: int) -> int:
        reader, writer = await begun(port)
        await until_so(lambda: watched)
        connection, n_unread = watched[0]
        n_bytes = n_looks = 0
        while n_unread:
            while connection.transport.get_write_buffer_size() >= n_unread:
                n_bytes += len(await reader.read(1 << 16))
            connection._check_progress(n_unread)  # as after STALL_S
            n_unread, n_looks = connection.transport.get_write_buffer_size(), n_looks + 1
        n_bytes += len(await rest(reader))
        assert n_looks > 1
        writer.close()
        return n_bytes

    assert with_server(go) > 3 * len(LONG) // 2
