"""Requests of Anthropic's Messages interface, as requests of a chat."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moegraph.engine.chat import ChatRequest, Format
from moegraph.server.anthropic import (
    CountBody,
    MessagesBody,
    anthropic_body,
    read_request,
    shows_thinking,
)
from moegraph.server.errors import ApiError
from moegraph.server.schemas import Defaults

PLAIN = Defaults()
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"name": "look", "description": "d", "input_schema": SCHEMA}


def read(defaults: Any = PLAIN, **fields: Any) -> ChatRequest:
    body = MessagesBody.model_validate({"model": "m", "max_tokens": 9, "messages": HELLO, **fields})
    return read_request(body, defaults)


def messages(*given: dict[str, Any]) -> list[dict[str, Any]]:
    return list(map(dict, read(messages=list(given)).messages))


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def test_the_system_prompt_may_be_a_text_or_blocks() -> None:
    cached = text("b\n", cache_control={"type": "ephemeral"})
    for system, expected in (("a", "a"), ([text("a"), cached, text("c")], "a\nb\nc")):
        assert read(system=system).messages[0] == {"role": "system", "content": expected}
    assert read(system=[]).messages == HELLO


def test_results_of_tools_become_messages_of_their_own() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": "ü"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("4"), text("2")]}
    failed = {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True}
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    found = messages(
        *HELLO,
        {"role": "assistant", "content": [hidden, thought, text("wait"), use, {**use, "id": "t2"}]},
        {"role": "user", "content": [result, failed, text("go"), text("on")]},
    )
    answer, one, two, more = found[1:]
    assert (answer["reasoning_content"], answer["content"]) == ("hm", "wait")
    assert [call["id"] for call in answer["tool_calls"]] == ["t1", "t2"]
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"a": "ü"}
    assert one == {"role": "tool", "tool_call_id": "t1", "content": [text("4"), text("2")]}
    assert two["content"] == "Error: no"
    assert more == {"role": "user", "content": [text("go"), text("on")]}


def test_documents_of_plain_text_and_found_texts_are_read() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "body"}
    document = {"type": "document", "source": source, "title": "T"}
    result = {"type": "search_result", "title": "S", "source": "u", "content": [text("hit")]}
    found = messages({"role": "user", "content": [document, result, text("q")]})
    assert found[0]["content"] == [text("T\nbody\n"), text("S (u)\nhit\n"), text("q")]


def test_tools_are_functions() -> None:
    found = read(tools=[{**TOOL, "cache_control": {"type": "ephemeral"}}])
    assert found.tools == [
        {"type": "function", "function": {"name": "look", "description": "d", "parameters": SCHEMA}}
    ]
    assert (found.tool_choice, found.parallel_tool_calls) == ("auto", True)


@pytest.mark.parametrize(
    "choice, expected",
    [
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", False)),
        ({"type": "any"}, ("required", True)),
        ({"type": "none"}, ("none", True)),
        ({"type": "tool", "name": "look"}, ("look", True)),
    ],
)
def test_choice_of_tools(choice: dict[str, Any], expected: tuple[str, bool]) -> None:
    found = read(tools=[TOOL], tool_choice=choice)
    assert (found.tool_choice, found.parallel_tool_calls) == expected


def test_settings_of_the_answer() -> None:
    output = {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}}
    found = read(
        temperature=1, top_p=0.5, top_k=7, stop_sequences=["END", "\n\n"], output_config=output,
        metadata={"user_id": "u"}, context_management={"edits": []}, service_tier="auto",
    )  # fmt: skip
    sampling = found.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1, 0.5, 7)
    assert (found.max_tokens, found.stop) == (9, ("END", "\n\n"))
    assert found.format == Format("json_schema", SCHEMA)


@pytest.mark.parametrize(
    "thinking, variables, shown",
    [
        (None, {}, True),
        ({"type": "disabled"}, {"enable_thinking": False}, True),
        ({"type": "adaptive"}, {"enable_thinking": True}, True),
        ({"type": "enabled", "budget_tokens": 2000}, {"enable_thinking": True}, True),
        ({"type": "enabled", "display": "omitted"}, {"enable_thinking": True}, False),
    ],
)
def test_reasoning_is_switched_and_shown(
    thinking: Any, variables: dict[str, bool], shown: bool
) -> None:
    assert read(thinking=thinking).variables == {"enable_thinking": False, **variables}
    body = CountBody.model_validate({"messages": HELLO, "thinking": thinking})
    assert shows_thinking(body.thinking) is shown


def test_the_server_says_what_the_request_does_not() -> None:
    server = Defaults(deadline_s=3.0, ignore_eos=True, variables={"enable_thinking": True})
    found = read(server)
    assert found.ignore_eos and found.variables["enable_thinking"] and found.deadline_s == 3.0
    found = read(server, ignore_eos=False, thinking={"type": "disabled"})
    assert not found.ignore_eos and not found.variables["enable_thinking"]


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "messages[0].content[0].source"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {
            "type": "base64", "data": "x"}}]}]}, "messages[0].content[0].source.type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t",
          "content": [{"type": "image"}]}]}]}, "messages[0].content[0].content[0].source"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t"}]}]},
         "messages[0].content[0].name"),
        ({"system": [{"type": "text", "text": 5}]}, "system[0].text"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(param)


@pytest.mark.parametrize(
    "status, kind",
    [(400, "invalid_request_error"), (401, "authentication_error"), (413, "request_too_large"),
     (415, "invalid_request_error"), (429, "rate_limit_error"), (500, "api_error"),
     (503, "overloaded_error")],
)  # fmt: skip
def test_errors_have_anthropics_words(status: int, kind: str) -> None:
    error = {"type": kind, "message": "m"}
    assert anthropic_body(ApiError(status, "m")) == {"type": "error", "error": error}


def test_a_full_context_is_told_in_the_words_that_agents_look_for() -> None:
    error = anthropic_body(ApiError(400, "m", code="context_length_exceeded"))["error"]
    assert error["message"] == "prompt is too long: m"
