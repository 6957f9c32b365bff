"""Responses and their events, judged by the types and accumulators of OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from moegraph.loop.requests import Step, Usage
from moegraph.sampling import SamplingParams
from moegraph.server.errors import ApiError
from moegraph.server.responses import ResponsesBody, ResponseWriter, read_tools, response_fields
from moegraph.text.chat.parts import (
    CallArguments,
    CallBegin,
    CallEnd,
    ContentPart,
    Part,
    ReasoningPart,
)

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = Usage(n_prompt=10, n_cached=4, n_generated=5)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "look", "parameters": {"type": "object"}},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "agents", "description": "d", "tools": [
        {"type": "function", "name": "close", "parameters": {"type": "object"}}]},
]  # fmt: skip


def writer(**fields: Any) -> ResponseWriter:
    body = ResponsesBody.model_validate({"input": "q", "tools": TOOLS, **fields})
    made = response_fields(body, SamplingParams(), "tiny", 1_700_000_000)
    return ResponseWriter(made, read_tools(TOOLS), "resp_1")


def run(
    *parts: Part, reason: str = "stop", logprobs: list[dict[str, Any]] | None = None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the events of an answer, and the response; the client's types accept both."""
    made = writer()
    events = made.start()
    for part in parts:
        events += made.take([part], logprobs or [])
    events += made.finish(Step(USAGE, finish_reason=reason), 1_700_000_001, 2)
    check(events)
    whole = made.response()
    Response.model_validate(whole)
    assert whole == events[-1]["response"] and "response" in events[0]
    return events, whole


def check(events: list[dict[str, Any]]) -> None:
    """Feed events to the client's accumulator, which checks items and indices."""
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=omit)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        json.dumps(event)
        state.handle_event(EVENT.validate_python(event))


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_a_text_has_the_events_that_openai_documents() -> None:
    events, whole = run(ContentPart("Hel"), ContentPart("lo"))
    assert (
        kinds(events)
        == (
            "created in_progress output_item.added content_part.added output_text.delta "
            "output_text.delta output_text.done content_part.done output_item.done completed"
        ).split()
    )
    assert events[0]["response"]["status"] == "in_progress"
    assert (whole["status"], whole["completed_at"]) == ("completed", 1_700_000_001)
    assert Response.model_validate(whole).output_text == "Hello"
    assert whole["output"][0]["status"] == "completed"


def test_reasoning_comes_before_the_message_as_an_item_of_its_own() -> None:
    events, whole = run(ReasoningPart("h"), ReasoningPart("m"), ContentPart("yes"))
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert kinds(events).count("reasoning_text.delta") == 2
    assert [event["output_index"] for event in events if "output_index" in event][-1] == 1


def test_parallel_calls_are_items_with_their_own_arguments() -> None:
    events, whole = run(
        ContentPart("let me see"),
        CallBegin(0, "call_a", "look"), CallArguments(0, '{"a"'), CallArguments(0, ":1}"),
        CallEnd(0),
        CallBegin(1, "call_b", "agents__close"), CallArguments(1, "{}"), CallEnd(1),
    )  # fmt: skip
    first, second = whole["output"][1:]
    assert (first["call_id"], first["name"], first["arguments"]) == ("call_a", "look", '{"a":1}')
    assert (second["name"], second["namespace"]) == ("close", "agents")
    done = [event for event in events if event["type"].endswith("arguments.done")]
    assert [event["arguments"] for event in done] == ['{"a":1}', "{}"]
    assert len({item["id"] for item in whole["output"]}) == 3


def test_the_input_of_a_custom_tool_is_plain_text() -> None:
    arguments = json.dumps({"input": 'say "x"\n'})
    events, whole = run(
        CallBegin(0, "c", "patch"), CallArguments(0, arguments[:9]),
        CallArguments(0, arguments[9:]), CallEnd(0),
    )  # fmt: skip
    assert whole["output"][0]["type"] == "custom_tool_call"
    assert whole["output"][0]["input"] == 'say "x"\n'
    deltas = [event["delta"] for event in events if event["type"].endswith("input.delta")]
    assert "".join(deltas) == 'say "x"\n'


def test_arguments_without_the_input_are_handed_on_as_they_are() -> None:
    _, whole = run(CallBegin(0, "c", "patch"), CallArguments(0, '{"patch": 1}'), CallEnd(0))
    assert whole["output"][0]["input"] == '{"patch": 1}'


@pytest.mark.parametrize("reason", ["length", "deadline"])
def test_an_answer_that_was_cut_is_incomplete(reason: str) -> None:
    events, whole = run(CallBegin(0, "c", "look"), CallArguments(0, '{"a'), reason=reason)
    assert kinds(events)[-2:] == ["output_item.done", "incomplete"]
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (whole["status"], whole["output"][0]["status"]) == ("incomplete", "incomplete")


def test_usage_counts_what_was_cached_and_reasoned() -> None:
    usage = Response.model_validate(run(ReasoningPart("h"), ContentPart("x"))[1]).usage
    assert usage is not None and usage.total_tokens == 15
    assert usage.input_tokens_details.cached_tokens == 4
    assert usage.output_tokens_details.reasoning_tokens == 2


def test_an_answer_of_nothing_has_no_items() -> None:
    events, whole = run()
    assert (kinds(events), whole["output"]) == (["created", "in_progress", "completed"], [])


def test_log_probabilities_are_beside_the_text() -> None:
    entry = {"token": "x", "bytes": [120], "logprob": -0.5, "top_logprobs": []}
    events, whole = run(ContentPart("x"), logprobs=[entry])
    assert whole["output"][0]["content"][0]["logprobs"] == [entry]
    assert next(e for e in events if e["type"].endswith("text.delta"))["logprobs"] == [entry]


def test_probabilities_of_held_back_tokens_come_with_their_text() -> None:
    first, second, thought, end = ({"token": word} for word in (" ", "x", "hm", "</think>"))
    made = writer()
    made.start()
    made.take([ReasoningPart("hm")], [thought])
    made.take([ReasoningPart("."), ContentPart("a")], [end])
    made.take([], [first])
    events = made.take([ContentPart(" x")], [second])
    assert [event["logprobs"] for event in events] == [[first, second]]
    (message,) = (item for item in made.response()["output"] if item["type"] == "message")
    assert message["content"][0]["logprobs"] == [end, first, second]
    made.take([], [first])
    made.take([ReasoningPart("hm")], [thought])
    made.take([ContentPart("b")], [second])
    assert made.response()["output"][-1]["content"][0]["logprobs"] == [second]


def test_a_failure_in_the_middle_ends_the_stream_with_both_events() -> None:
    made = writer()
    events = [*made.start(), *made.take([ContentPart("x")])]
    events += made.fail(ApiError(500, "the device is gone"))
    check(events)
    assert kinds(events)[-3:] == ["output_item.done", "error", "failed"]
    whole = Response.model_validate(made.response())
    assert whole.status == "failed" and whole.error is not None
    assert (whole.error.code, whole.error.message) == ("server_error", "the device is gone")
    assert made.response()["output"][0]["status"] == "incomplete"


def test_the_response_repeats_what_was_asked() -> None:
    schema = {"type": "object"}
    asked = {"type": "json_schema", "name": "n", "schema": schema}
    choice = {"type": "function", "name": "look"}
    made = writer(
        metadata={"k": "v"}, temperature=0.5, max_output_tokens=9, instructions="i",
        text={"format": asked}, tool_choice=choice, reasoning={"effort": "low"}, unknown=1,
    ).response()  # fmt: skip
    parsed = Response.model_validate(made)
    assert parsed.metadata == {"k": "v"} and parsed.max_output_tokens == 9
    assert made["text"]["format"] == asked and made["tool_choice"] == choice
    assert made["model"] == "tiny" and made["tools"][0]["strict"] is False
    assert parsed.reasoning is not None and parsed.reasoning.effort == "low"


@pytest.mark.parametrize("status, code", [(429, "rate_limit_exceeded"), (503, "server_error")])
def test_codes_of_failures_are_those_that_clients_know(status: int, code: str) -> None:
    made = writer()
    made.fail(ApiError(status, "busy", code="queue_full"))
    assert made.response()["error"]["code"] == code
