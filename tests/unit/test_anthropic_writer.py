"""Messages and their events, judged by the types and the accumulator of Anthropic's client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from moegraph.loop.requests import Step, Usage
from moegraph.server.anthropic import MessageWriter
from moegraph.server.errors import ApiError
from moegraph.text.chat.parts import (
    CallArguments,
    CallBegin,
    CallEnd,
    ContentPart,
    Part,
    ReasoningPart,
)

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USAGE = Usage(n_prompt=10, n_cached=4, n_generated=5)
CALL = (
    CallBegin(0, "call_a", "look"),
    CallArguments(0, '{"a"'),
    CallArguments(0, ":1}"),
    CallEnd(0),
)


def run(
    *parts: Part, last: Step | None = None, shows_thinking: bool = True
) -> tuple[list[dict[str, Any]], Message]:
    """Return the events of an answer, and the message; both accumulators agree on it."""
    made = MessageWriter("tiny", 9, shows_thinking=shows_thinking)
    events = made.start(Usage(n_prompt=10, n_cached=4))
    for part in parts:
        events += made.take([part])
    events += made.finish(last or Step(USAGE, finish_reason="stop"))
    whole = Message.model_validate(made.message())
    assert accumulated(events) == whole.model_dump(exclude_none=True)
    return events, whole


def accumulated(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the client makes of events."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        json.dumps(event)
        parsed = EVENT.validate_python(event)
        snapshot = accumulate_event(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    found: dict[str, Any] = snapshot.model_dump(exclude_none=True)
    found["content"] = [
        {key: value for key, value in block.items() if key != "parsed_output"}
        for block in found["content"]
    ]
    return found


def test_a_text_has_the_events_that_anthropic_documents() -> None:
    events, whole = run(ContentPart("Hel"), ContentPart("lo"))
    assert [event["type"] for event in events] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta",
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    assert (whole.stop_reason, whole.stop_sequence, whole.model) == ("end_turn", None, "tiny")
    assert whole.content[0].model_dump(exclude_none=True) == {"type": "text", "text": "Hello"}


def test_reasoning_is_a_block_with_a_signature() -> None:
    events, whole = run(ReasoningPart("h"), ReasoningPart("m"), ContentPart("yes"))
    thought, said = whole.content
    assert thought.type == "thinking" and thought.thinking == "hm" and thought.signature
    assert said.type == "text"
    assert [event["index"] for event in events if "index" in event] == [0] * 5 + [1] * 3


def test_reasoning_that_is_not_shown_is_an_empty_block() -> None:
    _, whole = run(ReasoningPart("hm"), ContentPart("yes"), shows_thinking=False)
    thought = whole.content[0]
    assert thought.type == "thinking" and thought.thinking == "" and thought.signature


def test_parallel_calls_are_blocks_with_their_own_input() -> None:
    second = (CallBegin(1, "call_b", "close"), CallArguments(1, "{}"), CallEnd(1))
    events, whole = run(ContentPart("see"), *CALL, *second)
    uses = [block for block in whole.content if block.type == "tool_use"]
    assert [(use.id, use.name, use.input) for use in uses] == [
        ("call_a", "look", {"a": 1}), ("call_b", "close", {})
    ]  # fmt: skip
    assert whole.stop_reason == "tool_use"
    starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert [block.get("input") for block in starts] == [None, {}, {}]


@pytest.mark.parametrize(
    "last, reason",
    [
        (Step(Usage(10, n_generated=9), finish_reason="length"), "max_tokens"),
        (Step(USAGE, finish_reason="length"), "model_context_window_exceeded"),
        (Step(USAGE, finish_reason="deadline"), "max_tokens"),
        (Step(USAGE, finish_reason="stop", stop="END"), "stop_sequence"),
    ],
)
def test_why_an_answer_ended(last: Step, reason: str) -> None:
    _, whole = run(ContentPart("x"), last=last)
    assert (whole.stop_reason, whole.stop_sequence) == (reason, last.stop)


def test_a_call_that_was_cut_has_no_input() -> None:
    made = MessageWriter("tiny", 9)
    made.take(CALL[:2])
    made.finish(Step(Usage(10, n_generated=9), finish_reason="length"))
    whole = Message.model_validate(made.message())
    assert whole.stop_reason == "max_tokens"
    assert whole.content[0].type == "tool_use" and whole.content[0].input == {}


def test_usage_tells_cached_tokens_apart() -> None:
    events, whole = run(ContentPart("x"))
    usage = whole.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (6, 4)
    assert usage.output_tokens == 5
    assert events[0]["message"]["usage"]["output_tokens"] == 0


def test_a_failure_in_the_middle_is_an_event_of_its_own() -> None:
    made = MessageWriter("tiny", 9)
    made.take([ContentPart("x")])
    (event,) = made.fail(ApiError(503, "the server is ending"))
    assert event["type"] == "error" and event["error"]["type"] == "overloaded_error"
