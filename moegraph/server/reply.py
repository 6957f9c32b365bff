"""JSON responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from .sse import encode


def reply(
    value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response with a JSON value; text that UTF-8 cannot hold is replaced."""
    given: dict[str, Any] = dict(headers or {})
    body = encode(value).encode(errors="replace")
    return Response(body, status, given, "application/json")
