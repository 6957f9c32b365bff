"""Tests of what all interfaces do with a request: submit it, answer it, and give it up."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.server_case import CHAT, Case


@pytest.mark.parametrize(
    ("path", "body", "what"),
    [
        ("/v1/completions", {"prompt": "x"}, "completions._Run"),
        ("/v1/chat/completions", CHAT, "openai_chat._Run"),
        ("/v1/messages", {**CHAT, "max_tokens": 500}, "anthropic.MessageWriter"),
        ("/v1/responses", {"input": "x"}, "responses.response_fields"),
    ],
)
def test_what_fails_after_it_was_accepted_is_given_up(
    path: str, body: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(f"moegraph.server.{what}", broken)
    case = Case(["a"] * 500, step_s=0.01)
    assert case.post(path, body).status_code == 500
    (ticket,) = case.service.tickets
    assert ticket.gone.is_set()
    assert case.state.backend.line.n_users == case.state.metrics.n_open == 0


@pytest.mark.parametrize("field", ["reasoning", "text", "metadata", "truncation"])
def test_null_in_a_response_is_what_was_not_given(field: str) -> None:
    given = Case().answer("/v1/responses", {"input": "x", field: None})
    assert given[field] == Case().answer("/v1/responses", {"input": "x"})[field]


def test_a_stream_that_ended_is_not_logged_as_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "moegraph.requests")
    for _ in range(3):
        Case().events("/v1/completions", {"prompt": "x"})
    found = [vars(one)["finish"] for one in caplog.records if one.name == "moegraph.requests"]
    assert found == ["stop"] * 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "n": 13}),
        ("/v1/completions", {"prompt": ["a"] * 13}),
        ("/v1/completions", {"prompt": ["a"] * 5, "n": 3}),
    ],
)
def test_more_answers_than_the_server_takes_are_no_reason_to_try_again(
    path: str, body: dict[str, Any]
) -> None:
    case = Case(capacity=12)
    response = case.post(path, body)
    said = response.json()["error"]["message"]
    assert response.status_code == 400 and "retry-after" not in response.headers
    assert "this server takes 12 requests (-np and --queue together): ask for fewer" in said
    assert not case.service.requests
    fewer = case.post("/v1/chat/completions", {**CHAT, "n": 12})
    assert fewer.status_code == 200 and len(fewer.json()["choices"]) == 12
