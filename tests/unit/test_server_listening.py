"""Tests of the protocol on real sockets: heads that never come, heads that are too long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from helpers.server_case import Case

from moegraph.server.listening import listen, web_server


def with_server(act: Callable[[int], Awaitable[Any]]) -> Any:
    """Serve a fake model and do something with its port."""

    async def go() -> Any:
        sock = listen("127.0.0.1", 0)
        web = web_server(Case().app)
        serving = asyncio.ensure_future(web.serve(sockets=[sock]))
        while not web.started:
            await asyncio.sleep(0.005)
        try:
            return await asyncio.wait_for(act(sock.getsockname()[1]), 10)
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
