"""Errors of the HTTP interface: a status, and the object that OpenAI's clients expect."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ..errors import (
    ConfigError,
    ContextOverflow,
    InternalError,
    MoegraphError,
    QueueFull,
    RequestError,
    ServiceClosed,
)

log = logging.getLogger("moegraph.server")
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
    504: "timeout_error",
}
# OpenAI's code, and llama-server's type with the fields n_prompt_tokens and n_ctx.
_CONTEXT_CODE, _CONTEXT_KIND = "context_length_exceeded", "exceed_context_size_error"
# Seconds that a refused client should wait for, if nothing better is known.
RETRY_S = 5.0
# Longest part of a client's own words that an error repeats.
_MAX_ECHO = 80
# Pydantic's names of forms that a field may have; those of longer ones have brackets.
_FORMS = ("bool", "int", "float", "str")


class ApiError(Exception):
    """A request fails with this HTTP status.

    param: the field that is wrong, such as "messages[0].role". code: a word that programs can
    compare. retry_after_s: when to try again, in seconds; None says nothing about it.
    kind: the type of error in OpenAI's words; None: that of the status. facts: more fields of the
    error object.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        kind: str | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind or _KINDS.get(status, "invalid_request_error")
        self.facts = dict(facts or {})
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))


def object_schema(**fields: Any) -> dict[str, Any]:
    """Return the JSON schema of an object that has all these fields, each with its schema."""
    return {"type": "object", "required": [*fields], "properties": fields}


TEXT_SCHEMA = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}
OPENAI_ERROR = object_schema(
    error=object_schema(
        message=TEXT_SCHEMA, type=TEXT_SCHEMA, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL
    )
)


def openai_body(error: ApiError) -> dict[str, Any]:
    """Return the error object of OpenAI's interface."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
            **error.facts,
        }
    }


def from_failure(error: BaseException) -> ApiError:
    """Return the error that a client sees for one that was raised while its request was served."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return from_validation(error)
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", retry_after_s=error.retry_after_s)
    if isinstance(error, ServiceClosed):
        return ApiError(503, str(error), code="closing", retry_after_s=RETRY_S)
    if isinstance(error, ContextOverflow):
        facts = {"n_prompt_tokens": error.n_prompt, "n_ctx": error.n_ctx}
        known = {name: n for name, n in facts.items() if n is not None}
        return ApiError(400, str(error), code=_CONTEXT_CODE, kind=_CONTEXT_KIND, facts=known)
    if isinstance(error, RequestError | ConfigError):
        return ApiError(400, str(error))
    if isinstance(error, MemoryError):
        return ApiError(503, "out of host memory", code="out_of_memory", retry_after_s=RETRY_S)
    if isinstance(error, MoegraphError):
        return ApiError(500, str(error))
    # its text may hold a client's words or a path of this machine: it goes to the log only
    return ApiError(500, str(InternalError(type(error).__name__)))


def public_error(failure: BaseException, path: str) -> ApiError:
    """Return the error that a client sees, and log what is our fault."""
    error = from_failure(failure)
    if error.status == 500:
        cause = failure.__cause__ if isinstance(failure, ApiError) else failure
        is_known = cause is None or isinstance(cause, MoegraphError)
        log.error(
            "request failed: %s", error.message, exc_info=None if is_known else failure,
            extra={"path": path},
        )  # fmt: skip
    return error


def forget_frames(failure: BaseException) -> None:
    """Drop the frames of an error that was answered, and its causes.

    They hold what the client sent. A frame that holds the error too would keep all of that until
    Python looks for cycles, and it seldom looks at objects that have lived a little.
    """
    waiting = [failure]
    while waiting:
        one = waiting.pop()
        waiting += [cause for cause in (one.__cause__, one.__context__) if cause is not None]
        one.__traceback__ = one.__cause__ = one.__context__ = None


def from_validation(error: ValidationError) -> ApiError:
    """Return the error for a body that does not fit its schema: the first wrong field."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = field_path(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        message = "this field is required"
    elif isinstance(first["input"], bool | int | float | str):
        message += f"; it is {_shown(first['input'])}"
    where = f"{param}: " if param else ""
    return ApiError(400, f"{where}{message}", param=param or None, code="invalid_value")


def field_path(parts: tuple[int | str, ...]) -> str:
    """Return a place in a body as OpenAI writes it: messages[0].content."""
    path = ""
    for part in parts:
        if part in _FORMS or "[" in str(part):  # a form that the field may have, not a field
            continue
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path[:_MAX_ECHO]


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= _MAX_ECHO else f"{text[:_MAX_ECHO]}..."
