"""Tests of /v1/chat/completions with a scripted service."""

from __future__ import annotations

import pytest
from helpers.server_case import CHAT, Case

from moegraph.errors import ContextOverflow, NativeError, QueueFull, RequestError, ServiceClosed


def test_an_answer_has_the_form_of_openai() -> None:
    answer = Case(["?think;", "Hello", " world"]).chat()
    assert answer["object"] == "chat.completion" and answer["model"] == "fake"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant", "content": "Hello world", "reasoning_content": "think",
            },
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]  # fmt: skip
    assert answer["usage"]["prompt_tokens"] == len("user: hi")
    assert answer["usage"]["completion_tokens"] == len("?think;Hello world")
    assert answer["timings"]["predicted_n"] == len("?think;Hello world")
    assert answer["timings"]["predicted_per_second"] == pytest.approx(1000)


def test_a_stream_has_the_same_answer_in_pieces() -> None:
    body = {**CHAT, "stream_options": {"include_usage": True}}
    *chunks, done = Case(["?think;", "Hello", " world"]).events("/v1/chat/completions", body)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": None}
    assert "".join(d.get("content") or "" for d in deltas) == "Hello world"
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == "think"
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-2:] == [None, "stop"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 18


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("no"), 400, None),
        (ContextOverflow("long"), 400, "context_length_exceeded"),
        (QueueFull("full", 2.2), 429, "queue_full"),
        (ServiceClosed("end"), 503, "closing"),
        (NativeError("broken"), 500, None),
        (ZeroDivisionError("secret"), 500, None),
    ],
)
def test_an_error_before_the_answer_has_a_status(
    error: Exception, status: int, code: str | None
) -> None:
    for stream in (False, True):
        response = Case(refusal=error).post("/v1/chat/completions", {**CHAT, "stream": stream})
        found = response.json()["error"]
        assert (response.status_code, found["code"]) == (status, code)
        assert "secret" not in response.text and found["message"]
        assert (response.headers.get("retry-after") == "3") == isinstance(error, QueueFull)


def test_an_error_in_the_answer_ends_the_stream_with_its_object() -> None:
    case = Case(["Hel", NativeError("the device is gone")])
    events = case.events("/v1/chat/completions", CHAT)
    assert events[-1]["error"]["message"] == "the device is gone"
    response = case.post("/v1/chat/completions", CHAT)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
