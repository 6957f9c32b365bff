"""Anthropic's own client uses /v1/messages of a server with a scripted service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import pytest
from helpers.served import served
from helpers.server_case import Case

from moegraph.errors import ContextOverflow, NativeError, QueueFull, ServiceClosed
from moegraph.server.guards import Guard, Keys


def look(a: int) -> str:
    """Return a call in the form that Qwen's models write."""
    inner = f"<function=look>\n<parameter=a>\n{a}\n</parameter>\n</function>"
    return f"<tool_call>\n{inner}\n</tool_call>"


CALLING = ["<think>I should look", "</think>Let me see.", *map(look, (1, 2))]
SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: Any = {"name": "look", "description": "d", "input_schema": SCHEMA}
ASK: Any = {"model": "m", "max_tokens": 1000, "messages": [{"role": "user", "content": "hi"}]}


@contextmanager
def client_of(case: Case, key: str = "x") -> Iterator[anthropic.Anthropic]:
    with served(case.app) as address:
        with anthropic.Anthropic(base_url=address, api_key=key, max_retries=0) as client:
            yield client


def test_a_message_at_once() -> None:
    case = Case(["<think>hm</think>", "Hello", " world"], n_cached=3)
    with client_of(case) as client:
        found = client.messages.create(
            **ASK, system="brief", thinking={"type": "enabled", "budget_tokens": 1024}
        )
    thought, said = found.content
    assert thought.type == "thinking" and thought.thinking == "hm"
    assert said.type == "text" and said.text == "Hello world"
    assert (found.stop_reason, found.model) == ("end_turn", "fake")
    assert found.usage.input_tokens == len("system: brief\nuser: hi") - 3
    assert found.usage.cache_read_input_tokens == 3
    assert found._request_id and found._request_id.startswith("req_")
    assert case.model.chats[0].variables == {"enable_thinking": True}


def test_the_list_of_models_has_its_fields() -> None:
    with client_of(Case()) as client:
        (found,) = client.models.list()
        assert found.type == "model" and found.id == found.display_name == "fake"
        assert found.created_at.tzinfo is not None
        assert client.models.retrieve("fake") == found


def test_a_stream_makes_the_message_that_comes_at_once() -> None:
    case = Case(CALLING, n_read_steps=2)
    with client_of(case) as client:
        whole = client.messages.create(**ASK, tools=[TOOL])
        with client.messages.stream(**ASK, tools=[TOOL]) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert {"thinking", "text", "input_json"} <= set(kinds)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    for one, other in zip(whole.content, streamed.content):
        assert one.model_dump(exclude={"id"}) == other.model_dump(exclude={"id", "parsed_output"})


def test_a_tool_makes_its_round() -> None:
    case = Case(CALLING, ["It is 42."])
    with client_of(case) as client:
        first = client.messages.create(**ASK, tools=[TOOL])
        results: Any = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "42"}
            for block in first.content
            if block.type == "tool_use"
        ]
        more: Any = [
            *ASK["messages"],
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": results},
        ]
        second = client.messages.create(**{**ASK, "messages": more}, tools=[TOOL])
    assert second.content[0].type == "text" and second.content[0].text == "It is 42."
    _, answer, one, two = case.model.chats[1].messages
    assert answer["reasoning_content"] == "I should look" and answer["content"] == "Let me see."
    ids = [block.id for block in first.content if block.type == "tool_use"]
    assert [call["id"] for call in answer["tool_calls"]] == ids
    assert [one["tool_call_id"], two["tool_call_id"]] == ids


def test_tokens_are_counted_without_an_answer() -> None:
    case = Case()
    with client_of(case) as client:
        found = client.messages.count_tokens(model="m", messages=ASK["messages"], system="s")
    assert (found.input_tokens, case.service.requests) == (len("system: s\nuser: hi"), [])


def test_a_key_in_the_header_of_anthropic_is_taken() -> None:
    case = Case(guard=Guard(Keys(["secret"]), hosts=None))
    with client_of(case, "secret") as client:
        assert client.messages.create(**ASK).stop_reason == "end_turn"
    with client_of(case, "wrong") as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            client.messages.create(**ASK)
    assert caught.value.body == {
        "type": "error",
        "error": {"type": "authentication_error", "message": "the API key is wrong"},
    }


@pytest.mark.parametrize(
    "refusal, kind, word",
    [
        (ContextOverflow("long"), anthropic.BadRequestError, "prompt is too long"),
        (QueueFull("full", 1.0), anthropic.RateLimitError, "full"),
        (ServiceClosed("end"), anthropic.APIStatusError, "end"),
    ],
)
def test_a_refusal_is_the_clients_exception(refusal: Exception, kind: type, word: str) -> None:
    with client_of(Case(refusal=refusal)) as client:
        with pytest.raises(kind, match=word):
            client.messages.create(**ASK)
        with pytest.raises(kind, match=word):
            client.messages.create(**ASK, stream=True)


def test_a_failure_in_the_middle_reaches_the_client() -> None:
    with client_of(Case(["Hel", NativeError("the device is gone")])) as client:
        with pytest.raises(anthropic.APIStatusError, match="the device is gone"):
            with client.messages.stream(**ASK) as stream:
                assert next(stream.text_stream) == "Hel"
                list(stream)
        with pytest.raises(anthropic.InternalServerError, match="the device is gone"):
            client.messages.create(**ASK)


def test_a_client_that_leaves_ends_its_request() -> None:
    case = Case(["a"] * 1000, step_s=0.01)
    with client_of(case) as client:
        with client.messages.stream(**ASK) as stream:
            next(stream.text_stream)
        assert case.service.tickets[0].gone.wait(120)


def test_an_unknown_path_is_an_error_in_anthropics_form() -> None:
    response = Case().post("/v1/messages/batches", {"requests": []})
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"
