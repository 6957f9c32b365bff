"""What Codex and Claude Code use, with the real server, the shipped model and official clients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest
from helpers.server_process import ServerProcess, serving

SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Lima"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"name": "weather", "description": "Tell the weather.", "input_schema": SCHEMA}
FUNCTION: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
HEAD = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=cli; cch={};"
RULES = "You help with software. " * 20
ASK: Any = [{"role": "user", "content": "write a function"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("-c", 4096, "-np", 2, "--temp", 0) as process:
        assert process.url
        yield process


@pytest.fixture
def client(server: ServerProcess) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0, timeout=120)


@pytest.fixture
def other(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=120)


def test_messages_responses_and_chats_give_the_same_text(
    client: anthropic.Anthropic, other: openai.OpenAI
) -> None:
    message = client.messages.create(model="m", max_tokens=16, messages=ASK)
    with client.messages.stream(model="m", max_tokens=16, messages=ASK) as stream:
        text = "".join(stream.text_stream)
    response = other.responses.create(
        model="m", max_output_tokens=16, input=ASK, reasoning={"effort": "none"}
    )
    chat = other.chat.completions.create(
        model="m", max_tokens=16, messages=ASK, reasoning_effort="none"
    )
    assert message.content[0].type == "text" and message.stop_reason == "max_tokens"
    assert message.content[0].text == text == chat.choices[0].message.content
    assert response.output_text == text and text


def test_a_line_that_is_different_each_time_costs_nothing(client: anthropic.Anthropic) -> None:
    def ask(word: str) -> anthropic.types.Usage:
        system: Any = [
            {"type": "text", "text": HEAD.format(word, word)},
            {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}},
        ]
        found = client.messages.create(model="m", max_tokens=2, messages=ASK, system=system)
        return found.usage

    first, second = ask("aaa"), ask("bbb")
    both = [u.input_tokens + (u.cache_read_input_tokens or 0) for u in (first, second)]
    assert both[0] == both[1]
    assert (second.cache_read_input_tokens or 0) >= both[0] // 2
    counted = client.messages.count_tokens(model="m", messages=ASK, system=RULES)
    assert counted.input_tokens == both[0]


def test_a_second_turn_goes_on_from_the_first(
    client: anthropic.Anthropic, other: openai.OpenAI
) -> None:
    given: Any = {"model": "m", "max_tokens": 8, "system": RULES + "Second turns.", "tools": [TOOL]}
    first = client.messages.create(**given, messages=ASK)
    more: Any = [
        *ASK,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "again"},
    ]
    usage = client.messages.create(**given, messages=more).usage
    n_first = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)
    assert (usage.cache_read_input_tokens or 0) >= n_first - 8
    asked: Any = {"model": "m", "max_output_tokens": 8, "reasoning": {"effort": "none"}}
    one = other.responses.create(**asked, input=RULES + "Linked turns.")
    two = other.responses.create(**asked, input="again", previous_response_id=one.id)
    assert one.usage and two.usage
    assert two.usage.input_tokens_details.cached_tokens >= one.usage.input_tokens - 8


def test_a_tool_that_must_be_called_makes_its_round(client: anthropic.Anthropic) -> None:
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    given: Any = {"model": "m", "max_tokens": 100, "tools": [TOOL]}
    with client.messages.stream(**given, messages=ASK, tool_choice=choice) as stream:
        first = stream.get_final_message()
    use = first.content[-1]
    assert first.stop_reason == "tool_use" and use.type == "tool_use"
    assert use.input in ({"city": "Oslo"}, {"city": "Lima"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    more: Any = [
        *ASK,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(**{**given, "max_tokens": 4}, messages=more).stop_reason


def test_a_conversation_of_responses_goes_on(other: openai.OpenAI) -> None:
    given: Any = {"model": "m", "tools": [FUNCTION], "parallel_tool_calls": False}
    with other.responses.stream(**given, input="weather?", tool_choice="required") as stream:
        kinds = {event.type for event in stream}
        first = stream.get_final_response()
    call: Any = first.output[-1]
    assert call.type == "function_call" and call.parsed_arguments["city"] in ("Oslo", "Lima")
    assert "response.function_call_arguments.delta" in kinds and first.status == "completed"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    limit: Any = {**given, "max_output_tokens": 4}
    linked = other.responses.create(**limit, input=[output], previous_response_id=first.id)
    whole: Any = [{"role": "user", "content": "weather?"}, *first.output, output]
    alone = other.responses.create(**limit, input=whole)
    assert linked.usage and alone.usage
    assert linked.usage.input_tokens == alone.usage.input_tokens
    assert linked.output_text == alone.output_text


def test_agents_beside_one_another_get_their_own_answers(
    client: anthropic.Anthropic, other: openai.OpenAI
) -> None:
    def message(word: str) -> str:
        asked: Any = [{"role": "user", "content": word}]
        with client.messages.stream(model="m", max_tokens=12, messages=asked) as stream:
            return "".join(stream.text_stream)

    def response(word: str) -> str:
        found = other.responses.create(
            model="m", max_output_tokens=12, input=word, reasoning={"effort": "none"}
        )
        return found.output_text

    words = ["sort a list", "read a file", "a class"]
    alone = {word: message(word) for word in words}
    together: dict[tuple[str, str], str] = {}

    def keep(word: str, ask: Callable[[str], str]) -> None:
        together[word, ask.__name__] = ask(word)

    threads = [
        threading.Thread(target=keep, args=(word, ask))
        for word in words
        for ask in (message, response)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(together) == 6
    assert all(text == alone[word] for (word, _), text in together.items())
