"""Bodies of agents with one value replaced: refused with status 400, or answered; never a 500."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from helpers.server_case import Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}
RESPONSES: dict[str, Any] = {
    "model": "m", "instructions": "i", "store": True, "temperature": 0.5, "top_logprobs": 1,
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"role": "user", "content": "q"},
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "s"}],
         "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "d", "name": "p", "input": "x"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "d",
         "output": [{"type": "input_text", "text": "2"}]},
    ],
    "tools": [
        FUNCTION, {"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "lark",
                                                             "definition": "start: /a/"}},
        {"type": "namespace", "name": "n", "tools": [FUNCTION]}, {"type": "web_search"},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto",
                    "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    "reasoning": {"effort": "low"}, "include": ["message.output_text.logprobs"],
    "metadata": {"k": "v"}, "max_output_tokens": 5, "logit_bias": {"1": 2},
}  # fmt: skip
MESSAGES: dict[str, Any] = {
    "model": "m", "max_tokens": 5, "temperature": 1, "stop_sequences": ["END"],
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "q"},
            {"type": "document", "source": {"type": "text", "data": "d"}, "title": "t"},
            {"type": "search_result", "title": "t", "source": "u",
             "content": [{"type": "text", "text": "x"}]}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "is_error": False,
             "content": [{"type": "text", "text": "r"}]}]},
        {"role": "system", "content": "late"},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
}  # fmt: skip
CHAT: dict[str, Any] = {
    "model": "m", "n": 1, "max_tokens": 5, "max_completion_tokens": 5, "temperature": 0.5,
    "top_p": 0.5, "top_k": 3, "seed": 1, "stop": ["x"], "logprobs": True, "top_logprobs": 2,
    "logit_bias": {"1": 2, "a": False}, "presence_penalty": 0.5, "reasoning_effort": "low",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "q"}], "name": "n"},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d",
                                                "parameters": SCHEMA, "strict": True}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": True,
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    "chat_template_kwargs": {"enable_thinking": False}, "stream_options": {"include_usage": True},
    "return_progress": True, "timings_per_token": True, "ignore_eos": False, "min_p": 0.1,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "prompt": ["a", [1, 2]], "n": 2, "max_tokens": 5, "logprobs": 2, "stop": "x", "best_of": 1,
    "suffix": None, "echo": False, "logit_bias": [[1, 0.5], ["a", False]], "grammar": "root ::= x",
    "repeat_penalty": 1.1, "stream_options": {"include_usage": True}, "n_predict": 3,
}  # fmt: skip
TOKENS: dict[str, Any] = {
    "content": "a", "prompt": None, "messages": None, "add_special": True, "with_pieces": True,
    "tokens": [1, 2],
}  # fmt: skip
TEMPLATE = {name: CHAT[name] for name in ("messages", "tools", "chat_template_kwargs")}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 1 << 70) | st.floats(allow_nan=False,
    allow_infinity=False) | st.text(max_size=8) | st.sampled_from(["message", "text", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner,
                                                                max_size=3),
    max_leaves=6,
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all values inside of a value."""
    if not isinstance(value, dict | list):
        return [path]
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    return [path, *(found for key, one in inner for found in places(one, (*path, key)))]


def replaced(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a body with another value in one place."""
    if not path:
        return value
    found = copy.deepcopy(body)
    at = found
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return found


CALL = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def case() -> Case:
    return Case(["<think>hm</think>", "y", CALL])


@pytest.mark.parametrize(
    "path, body",
    [("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES),
     ("/v1/messages/count_tokens", MESSAGES), ("/v1/chat/completions", CHAT),
     ("/v1/completions", TEXT), ("/tokenize", TOKENS), ("/detokenize", TOKENS),
     ("/apply-template", TEMPLATE)],
)  # fmt: skip
@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_value_of_another_type_is_never_a_failure_of_the_server(
    case: Case, path: str, body: dict[str, Any], data: st.DataObject
) -> None:
    place = data.draw(st.sampled_from(places(body)))
    changed = replaced(body, place, data.draw(VALUES))
    if isinstance(changed, dict):
        changed["stream"] = data.draw(st.booleans())
    head = {"Content-Type": "application/json"}
    response = case.client.post(path, content=json.dumps(changed), headers=head)
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["message"]
    elif "event-stream" in response.headers["content-type"]:
        assert "event: error" not in response.text and '{"error"' not in response.text


def test_the_bodies_themselves_are_answered(case: Case) -> None:
    assert case.answer("/v1/responses", RESPONSES)["status"] == "incomplete"
    assert case.answer("/v1/messages", MESSAGES)["stop_reason"] == "max_tokens"
    assert case.answer("/v1/chat/completions", CHAT)["choices"][0]["finish_reason"] == "length"
    assert len(case.answer("/v1/completions", TEXT)["choices"]) == 4
    assert case.answer("/tokenize", TOKENS) and case.answer("/detokenize", TOKENS)
    assert case.answer("/apply-template", TEMPLATE)["prompt"]
