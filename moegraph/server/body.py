"""The JSON body of a request: read within limits, and checked against its schema."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import pydantic
import pydantic_core
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from ..errors import InternalError
from ..units import format_bytes
from .errors import ApiError, from_validation
from .limits import Limits
from .state import state_of
from .talk import ClientLeft
from .workers import BODY_BYTES, SMALL

# Where the scope of a request has the schemas that its route declares.
BODIES = "moegraph.bodies"
Schema = TypeVar("Schema", bound=pydantic.BaseModel)
T = TypeVar("T")


async def read_schema(request: HttpRequest, schema: type[Schema]) -> Schema:
    """Return the body of a request as an object of the schema; unknown fields are ignored.

    Raises:
        ApiError: the body is too large, not JSON, or does not fit; it names the field.
        ClientLeft: the client left before the body was complete.
    """
    value = await read_object(request)
    return await _aside(request, lambda: fit(request, schema, value))


async def _aside(request: HttpRequest, call: Callable[[], T]) -> T:
    """Return what a call returns; it delays other requests little, however large the body is."""
    return call() if BODY_BYTES.get() <= SMALL else await state_of(request).work(call)


async def read_object(request: HttpRequest) -> dict[str, Any]:
    """Return the JSON object of a body; raises as `read_schema`, which checks its fields too."""
    limits = state_of(request).limits
    body = await read_body(request, limits)
    if body.count(b",") > limits.commas:
        message = f"the body has more than {limits.commas:,} values, or commas in its texts"
        raise ApiError(413, message, code="body_too_large")
    value = await _aside(request, lambda: parse_json(body))
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return value


def fit(request: HttpRequest, schema: type[Schema], value: dict[str, Any]) -> Schema:
    """Return an object of a schema.

    Raises:
        ApiError: the value does not fit; it names the field.
        InternalError: the route does not declare the schema, so no document tells of it.
    """
    if schema not in request.scope[BODIES]:
        raise InternalError(f"{request.url.path} does not declare {schema.__name__}")
    try:
        return schema.model_validate(value)
    except pydantic.ValidationError as error:
        raise from_validation(error) from None


async def read_body(request: HttpRequest, limits: Limits) -> bytes:
    """Return the bytes of a body; refuse a large one before it has arrived."""
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:18]) > limits.body_bytes:
        raise _too_large(limits)
    try:
        body = await asyncio.wait_for(_gather(request, limits), limits.body_s)
    except ClientDisconnect:
        raise ClientLeft from None
    except asyncio.TimeoutError:
        message = f"the body did not arrive within {limits.body_s:.0f} s"
        raise ApiError(408, message, headers={"Connection": "close"}) from None
    BODY_BYTES.set(len(body))
    return body


async def _gather(request: HttpRequest, limits: Limits) -> bytes:
    found = bytearray()
    async for piece in request.stream():
        found += piece
        if len(found) > limits.body_bytes:
            raise _too_large(limits)
    return bytes(found)


def _too_large(limits: Limits) -> ApiError:
    message = f"the body is larger than {format_bytes(limits.body_bytes)}"
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


def parse_json(body: bytes) -> Any:
    """Return the value of a JSON text; NaN, Infinity and deep nesting are refused."""
    try:
        return pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None


def json_depth(value: object) -> int:
    """Return how deep the objects and lists of a JSON value are nested; a number has depth 0."""
    depth, front = 0, [value]
    while front := [inner for one in front for inner in _inside(one)]:
        depth += 1
    return depth


def _inside(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values()) or [None]
    if isinstance(value, list):
        return value or [None]
    return []
