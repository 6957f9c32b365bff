"""Log lines on stderr, and one for each request, without what it asked or was answered."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any, TextIO

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..loop.requests import Usage

FORMATS = ("text", "json", "off")
# Attributes that every record has; what else it has was given by the caller.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_ROOTS = ("moegraph", "uvicorn")


def start_logging(format: str, stream: TextIO) -> None:
    """Write the server's log lines to a stream. format: one of FORMATS."""
    for name in _ROOTS:
        logger = logging.getLogger(name)
        logger.propagate = False
        logger.handlers.clear()
        if format == "off":
            logger.addHandler(logging.NullHandler())
            continue
        handler = logging.StreamHandler(stream)
        handler.setFormatter(JsonLines() if format == "json" else TextLines())
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING if name == "uvicorn" else logging.INFO)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    found = {name: value for name, value in vars(record).items() if name not in _OWN}
    return {name: value for name, value in found.items() if value is not None}


class TextLines(logging.Formatter):
    """A time, a message, and fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, and a traceback after it if there is one."""
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        words = [at, _escaped(record.getMessage())]
        if record.levelno >= logging.WARNING:
            words.insert(1, f"{record.levelname.lower()}:")
        words += [f"{name}={_escaped(str(value))}" for name, value in _fields(record).items()]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        found = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)


def _escaped(text: str) -> str:
    """Return text that cannot begin another line or move a terminal's cursor."""
    return text if text.isprintable() else ascii(text)[1:-1]


_requests = logging.getLogger("moegraph.requests")
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
    """Give each request an id, send it back as X-Request-Id, and _requests one line at the end.

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
                _requests.info("request", extra=what)
