"""Messages and their events, judged by the types and the accumulator of Anthropic's client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from moegraph.loop.requests import Step, Usage
from moegraph.server.anthropic import MessageWriter, anthropic_body
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


def test_reasoning_that_is_not_shown_is_an_empty_block() -> None:
    _, whole = run(ReasoningPart("hm"), ContentPart("yes"), shows_thinking=False)
    thought = whole.content[0]
    assert thought.type == "thinking" and thought.thinking == "" and thought.signature


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
    event = anthropic_body(ApiError(503, "the server is ending"))
    assert event["type"] == "error" and event["error"]["type"] == "overloaded_error"
