"""Responses: JSON, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from pydantic_core import PydanticSerializationError, to_json
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")
# A proxy may close a connection on which nothing is sent; comments tell it that we work.
PING_S = 10.0
_NEVER_S = 1e9
DONE = b"data: [DONE]\n\n"
EVENTS, LINES = "text/event-stream", "application/x-ndjson"


def encode(value: object) -> bytes:
    """Return JSON in one line, as every answer of the server is written."""
    try:
        return to_json(value)
    except PydanticSerializationError:  # a lone surrogate, as of a file's name that is not UTF-8
        return json.dumps(value).encode()


def data(value: object) -> bytes:
    """Return an event without a name."""
    return b"data: %b\n\n" % encode(value)


def line(value: object) -> bytes:
    """Return a line of JSON."""
    return b"%b\n" % encode(value)


def named(value: Mapping[str, Any]) -> bytes:
    """Return an event that has the name of its type."""
    return b"event: %b\n%b" % (value["type"].encode(), data(value))


def comment(text: str) -> bytes:
    """Return a line that clients ignore; the text has no line end."""
    return f": {text}\n\n".encode()


class EventStream(Response):
    """Send frames as they come; when the client leaves, close their source.

    frames: bytes to send; it is always closed, so that its `finally` runs if it has begun. close:
    called at the end, also if the frames were never asked for. kind: EVENTS, or LINES of JSON, in
    which there is no place for comments.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        close: Callable[[], None] = lambda: None,
        ping_s: float = PING_S,
        kind: str = EVENTS,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # X-Accel-Buffering: nginx would hold events back
        fixed = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})}
        super().__init__(None, headers=fixed, media_type=f"{kind}; charset=utf-8")
        del self.headers["content-length"]
        self._frames = frames
        self._close = close
        self._ping_s = ping_s if kind == EVENTS else _NEVER_S
        self._is_sending = False
        self._last = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all frames; return early when the client has left."""
        work = self._send_all(send)
        try:
            sent = await until_first(work, gone(receive), self._ping(send))
        finally:
            await self._frames.aclose()
            self._close()
        if not sent.cancelled():
            with suppress(OSError):
                sent.result()

    async def _send_all(self, send: Send) -> None:
        start: dict[str, Any] = {"status": self.status_code, "headers": self.raw_headers}
        await self._send(send, {"type": "http.response.start", **start})
        async for frame in self._frames:
            await self._send(send, _chunk(frame))
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: Message) -> None:
        self._is_sending, self._last = True, time.monotonic()
        await send(message)
        self._is_sending, self._last = False, time.monotonic()

    async def _ping(self, send: Send) -> None:
        """Send comments while nothing else is sent."""
        while True:
            waited = 0.0 if self._is_sending else time.monotonic() - self._last
            if waited >= self._ping_s:
                await self._send(send, _chunk(comment("ping")))
                waited = 0.0
            await asyncio.sleep(self._ping_s - waited)


def _chunk(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def until_first(work: Awaitable[T], *others: Awaitable[Any]) -> asyncio.Future[T]:
    """Wait until any of these ends, and cancel the rest; return what became of the first one."""
    first = asyncio.ensure_future(work)
    tasks = [first, *map(asyncio.ensure_future, others)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return first


async def gone(receive: Receive) -> None:
    """Wait until the client has left; the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def reply(
    value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response with a JSON value."""
    return Response(encode(value), status, headers, "application/json")
