"""Structured output and tools with the real server, the shipped model and OpenAI's own client.

The model was not trained for either: what it writes follows from the grammar alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from helpers.server_process import serving

ASK: Any = [{"role": "user", "content": "give me something"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["color", "sizes"],
    "additionalProperties": False,
}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two digits.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 9},
                "b": {"enum": ["one", "two"]},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with serving("-c", 4096, "-np", 2, "--temp", 1, "-s", 7) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=120)


def checked(text: str | None) -> None:
    found = json.loads(text or "")
    assert set(found) == {"color", "sizes"} and found["color"] in ("red", "green")
    assert 1 <= len(found["sizes"]) <= 3 and all(isinstance(n, int) for n in found["sizes"])


def test_an_answer_follows_a_schema(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    given: Any = {"model": "tiny", "messages": ASK, "response_format": form, "max_tokens": 500}
    checked(client.chat.completions.create(**given).choices[0].message.content)
    chunks = client.chat.completions.create(**given, stream=True, seed=3)
    checked("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


def test_an_answer_follows_a_grammar(client: openai.OpenAI) -> None:
    for grammar in (
        'root ::= "yes " ("a" | "b")+ "."',
        '%llguidance {}\nstart: "yes " /[ab]{1,20}/ "."',
    ):
        answer = client.completions.create(
            model="tiny", prompt="x", max_tokens=400, extra_body={"grammar": grammar}
        )
        text = answer.choices[0].text
        assert re.fullmatch(r"yes [ab]+\.", text) or answer.choices[0].finish_reason == "length"


def test_a_tool_is_called_and_its_result_goes_back(client: openai.OpenAI) -> None:
    given: Any = {"model": "tiny", "tools": [ADD], "tool_choice": "required", "max_tokens": 500}
    answer = client.chat.completions.create(
        **given, messages=ASK, parallel_tool_calls=False
    ).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.tool_calls
    call: Any = answer.message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "add" and isinstance(arguments["a"], int)
    assert arguments["b"] in ("one", "two")
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    said: Any = answer.message.model_dump(exclude_none=True)
    again = client.chat.completions.create(
        model="tiny", tools=[ADD], messages=[*ASK, said, result], max_tokens=8
    )
    assert again.choices[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize(
    "given",
    [
        {"grammar": "root ::= ("},
        {"json_schema": {"type": "nothing"}},
        {"grammar": "%llguidance {}\nbroken"},
    ],
)
def test_a_broken_grammar_is_the_clients_error(client: openai.OpenAI, given: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=ASK, extra_body=given)
