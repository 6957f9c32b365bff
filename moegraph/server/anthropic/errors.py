"""Errors in the form that Anthropic's clients expect."""

from __future__ import annotations

from typing import Any

from ..errors import ApiError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


_TEXT = {"type": "string"}
ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": _TEXT, "message": _TEXT},
        },
    },
}


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """Return the error object of Anthropic's interface."""
    kind = _KINDS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": _message(error)}}


def _message(error: ApiError) -> str:
    """Return the text of an error; agents look for these words before they shorten a chat."""
    if error.code == "context_length_exceeded":
        return f"prompt is too long: {error.message}"
    return error.message
