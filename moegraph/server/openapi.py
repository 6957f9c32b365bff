"""/openapi.json: what the server answers, from its routes and the schemas that check requests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from .. import __version__
from .replies import reply
from .routes import Operation, RouteTable

_STREAM = "text/event-stream"
_PARAMETER = re.compile(r"\{(\w+)(:\w+)?\}")
# What may become of every request, and of one with a body or with a name in its path.
_ERRORS = {
    401: "The API key is missing or wrong.",
    403: "The header Host names another server.",
    415: "The body is compressed, or its type is not application/json.",
    500: "The engine failed.",
    503: "The model is not there, or there is no room for the request.",
}
_OF_BODIES = {
    400: "The body is not JSON, a field is wrong, or the prompt does not fit.",
    408: "The body took too long.",
    413: "The body is too large.",
    429: "Too many requests wait.",
}
_OF_NAMES = {404: "There is nothing of this name."}
Schemas = Mapping[type[BaseModel], Mapping[str, Any]]


def document(tables: Sequence[RouteTable]) -> dict[str, Any]:
    """Return the OpenAPI document of tables of routes."""
    found = [(t, r) for t in tables for r in t.routes if isinstance(r, Operation)]
    models = dict.fromkeys(body for _, route in found for body in route.bodies)
    refs, definitions = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    schemas = {model: refs[model, "validation"] for model in models}
    paths: dict[str, dict[str, Any]] = {}
    for table, route in found:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(table, route, path, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "moegraph serve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
        # without keys, the server lets in everyone
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _operation(table: RouteTable, route: Operation, path: str, schemas: Schemas) -> dict[str, Any]:
    names = [name for name, _ in _PARAMETER.findall(route.path)]
    errors = _ERRORS | (_OF_BODIES if route.bodies else {}) | (_OF_NAMES if names else {})
    answers: dict[str, Any] = {route.answer: {"schema": {}}}
    if route.streams:
        answers[_STREAM] = {}
    error = {"application/json": {"schema": table.error_schema}}
    found: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{path}").strip("_"),
        "summary": (route.endpoint.__doc__ or "").strip().partition("\n")[0],
        "responses": {
            "200": {"description": "The answer.", "content": answers},
            **{
                str(status): {"description": words, "content": error}
                for status, words in sorted(errors.items())
            },
        },
    }
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if route.bodies:
        forms = [schemas[body] for body in route.bodies]
        schema = forms[0] if len(forms) == 1 else {"anyOf": forms}
        found["requestBody"] = {
            "required": True, "content": {"application/json": {"schema": schema}},
        }  # fmt: skip
    if route.path in table.public:
        found["security"] = []
    return found


def table(tables: Sequence[RouteTable]) -> RouteTable:
    """Return the route of the document of other tables, and of itself."""
    own: list[RouteTable] = []

    async def describe(request: HttpRequest) -> Response:
        """Return this document."""
        return reply(document([*tables, *own]))

    own.append(RouteTable([Operation("/openapi.json", describe)]))
    return own[0]
