"""One line for each request, without what it asked or was answered."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..loop.requests import Usage

log = logging.getLogger("moegraph.requests")
_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)
_FACTS = "moegraph.facts"
_MAX_PATH = 200
# The header that tells a client what of its request is passed over.
WARNING = "X-Moegraph-Warning"
_UNPRINTABLE, _MAX_WARNING = re.compile(r"[^ -~]"), 500
_POLLED = (200, 503)


def request_id(request: HttpRequest) -> str:
    """Return the id of a request: the client's X-Request-Id if it is a plain word, or a new one."""
    found: str = request.scope[_FACTS]["id"]
    return found


def note_usage(request: HttpRequest, usage: Usage, finish: str | None) -> None:
    """Add to the line of a request what its answer has cost, and why it ended."""
    request.scope[_FACTS].update(
        n_prompt=usage.n_prompt, n_cached=usage.n_cached, n_generated=usage.n_generated,
        finish=finish,
    )  # fmt: skip


def note_warnings(request: HttpRequest, warnings: Sequence[str]) -> str:
    """Add warnings to the line of a request; return them as the value of a header."""
    found = _UNPRINTABLE.sub("?", "; ".join(warnings))[:_MAX_WARNING]
    request.scope[_FACTS].update(warning=found)
    return found


class RequestLog:
    """Give each request an id, send it back as X-Request-Id, and log one line at the end.

    A GET that succeeds, or comes too early, is not logged: programs poll.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if _ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        facts: dict[str, Any] = {"id": name, "status": 0}
        scope[_FACTS] = facts
        began = time.monotonic()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                facts["status"] = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            # the server ends; uvicorn would print a traceback
            facts["finish"] = "cut off"
        finally:
            seconds = round(time.monotonic() - began, 4)
            path = scope["path"][:_MAX_PATH]
            if scope["method"] != "GET" or facts["status"] not in _POLLED:
                what = {"method": scope["method"], "path": path, "s": seconds, **facts}
                log.info("request", extra=what)
