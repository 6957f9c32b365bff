"""OpenAI's own client uses /v1/chat/completions of a server with a scripted service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pydantic
import pytest
from helpers.served import served
from helpers.server_case import CHAT, Case

XML = "<tool_call>\n<function=look>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
JSON = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
PARAMETERS: Any = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "strict": True, "parameters": PARAMETERS},
}
ASK: Any = {**CHAT, "model": "m"}


@contextmanager
def client_of(case: Case) -> Iterator[openai.OpenAI]:
    with served(case.app) as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client:
            yield client


@pytest.mark.parametrize("call", [XML, JSON])
def test_a_stream_makes_the_completion_that_comes_at_once(call: str) -> None:
    pieces = [
        "<think>I should look",
        "</think>Let me see.",
        *(call[n : n + 9] for n in range(0, 99, 9)),
    ]
    with client_of(Case(pieces, n_read_steps=2)) as client:
        whole = client.chat.completions.create(**ASK, tools=[TOOL])
        with client.chat.completions.stream(
            **ASK, tools=[TOOL], stream_options={"include_usage": True}
        ) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_completion()
    assert {"content.delta", "tool_calls.function.arguments.delta"} <= set(kinds)
    assert kinds.index("tool_calls.function.arguments.done") > kinds.index("content.done")
    (one,), (other,) = whole.choices, streamed.choices
    assert one.finish_reason == other.finish_reason == "tool_calls"
    assert one.message.refusal is other.message.refusal is None
    assert one.message.content == other.message.content == "Let me see."
    for message in (one.message, other.message):
        assert message.tool_calls
        (made,) = message.tool_calls
        assert made.type == "function" and made.function.name == "look"
        assert json.loads(made.function.arguments) == {"a": 1}
    assert streamed.usage and whole.usage
    assert streamed.usage.total_tokens == whole.usage.total_tokens
    for usage in (streamed.usage, whole.usage):
        assert usage.completion_tokens_details
        assert usage.completion_tokens_details.reasoning_tokens
    assert whole.system_fingerprint == streamed.system_fingerprint is not None


def test_an_answer_of_a_given_type() -> None:
    class City(pydantic.BaseModel):
        name: str

    with client_of(Case(['{"name": "Paris"}'])) as client:
        found = client.chat.completions.parse(**ASK, response_format=City)
        with client.chat.completions.stream(**ASK, response_format=City) as stream:
            streamed = stream.get_final_completion()
    for one in (found, streamed):
        assert one.choices[0].message.parsed == City(name="Paris")
