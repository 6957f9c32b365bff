"""Tests of /openapi.json, and of the routes that it describes."""

from __future__ import annotations

import re
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from helpers.server_case import CHAT, Case
from starlette.routing import Route

from moegraph.server import info
from moegraph.server.completions import DetokenizeBody, TextBody
from moegraph.server.openai_chat import ChatBody


def described() -> dict[str, Any]:
    """Return the document that the server sends."""
    found: dict[str, Any] = Case().client.get("/openapi.json").json()
    return found


def test_the_document_is_valid() -> None:
    found = described()
    schemathesis.openapi.from_dict(found).validate()
    for schema in found["components"]["schemas"].values():
        jsonschema_rs.meta.validate(schema)
    names = [one["operationId"] for path in found["paths"].values() for one in path.values()]
    assert len(set(names)) == len(names)


def test_every_route_is_described() -> None:
    others: Any = [*info.ABSENT.routes, *info.PAGE.routes]
    apart = {route.path for route in others}
    routes = [r for r in Case().app.routes if isinstance(r, Route) and r.path not in apart]
    served = {(re.sub(":[a-z]+}", "}", r.path), m.lower()) for r in routes for m in r.methods or ()}
    found = {(path, method) for path, one in described()["paths"].items() for method in one}
    assert found == {one for one in served if one[1] != "head"}
    # each body may name a model that is not there
    bodies = [one for path in described()["paths"].values() for one in path.values()]
    assert all("404" in one["responses"] for one in bodies if "requestBody" in one)


@pytest.mark.parametrize(
    ("schema", "fits", "does_not"),
    [
        (ChatBody, {**CHAT, "stop": "x", "logit_bias": {"5": 1}}, {**CHAT, "stop": 1}),
        (TextBody, {"prompt": [1, 2]}, {"prompt": [-1]}),
        (DetokenizeBody, {"tokens": [1]}, {"tokens": ["1"]}),
    ],
)
def test_a_body_is_described_as_it_is_checked(schema: Any, fits: Any, does_not: Any) -> None:
    found = described()
    ref = {"$ref": f"#/components/schemas/{schema.__name__}", "components": found["components"]}
    validator = jsonschema_rs.Draft202012Validator(ref)
    assert validator.is_valid(fits) and not validator.is_valid(does_not)
    schema.model_validate(fits)
    with pytest.raises(ValueError, match="validation error"):
        schema.model_validate(does_not)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/chat/completions", CHAT, "choices"),
        ("/chat/completions/input_tokens", CHAT, "input_tokens"),
        ("/responses", {"input": "a"}, "output"),
        ("/responses/input_tokens", {"input": "a"}, "input_tokens"),
    ],
)
def test_openai_is_served_with_and_without_v1(path: str, body: Any, field: str) -> None:
    case = Case()
    assert field in case.answer(path, body) and field in case.answer(f"/v1{path}", body)


def test_a_stored_response_is_found_without_v1() -> None:
    case = Case()
    path = f"/responses/{case.answer('/v1/responses', {'input': 'a'})['id']}"
    assert case.client.get(path).json()["object"] == "response"
    assert case.client.delete(path).json()["deleted"] is True
    assert case.client.get(f"/v1{path}").status_code == 404
