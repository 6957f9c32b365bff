"""OpenAI's own client uses /v1/responses of a server with a scripted service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pydantic
import pytest
from helpers.served import served
from helpers.server_case import Case

from moegraph.errors import ContextOverflow, NativeError, QueueFull
from moegraph.server.answers import Answers


def look(a: int) -> str:
    """Return a call in the form that Qwen's models write."""
    inner = f"<function=look>\n<parameter=a>\n{a}\n</parameter>\n</function>"
    return f"<tool_call>\n{inner}\n</tool_call>"


CALLING = ["<think>I should look", "</think>Let me see.", *map(look, (1, 2))]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL: Any = {"type": "function", "name": "look", "strict": False, "parameters": SCHEMA}


@contextmanager
def client_of(case: Case) -> Iterator[openai.OpenAI]:
    with served(case.app) as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client:
            yield client


def test_a_response_at_once() -> None:
    case = Case(["<think>hm</think>", "Hello", " world"], n_cached=3)
    with client_of(case) as client:
        found = client.responses.create(model="m", input="hi", instructions="brief")
    assert (found.output_text, found.status, found.model) == ("Hello world", "completed", "fake")
    assert found.usage is not None and found.usage.input_tokens == len("system: brief\nuser: hi")
    assert found.usage.output_tokens == len("<think>hm</think>Hello world")
    assert found.usage.input_tokens_details.cached_tokens == 3
    assert 0 < found.usage.output_tokens_details.reasoning_tokens <= len("<think>hm</think>")
    assert found.model_extra is not None and found.model_extra["timings"]["predicted_n"] == 28


def test_a_stream_makes_the_response_that_comes_at_once() -> None:
    case = Case(CALLING, n_read_steps=2)
    with client_of(case) as client:
        whole = client.responses.create(model="m", input="hi", tools=[TOOL])
        with client.responses.stream(model="m", input="hi", tools=[TOOL]) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed" and "response.reasoning_text.delta" in kinds
    assert [item.type for item in whole.output] == [
        "reasoning", "message", "function_call", "function_call"
    ]  # fmt: skip
    unlike: Any = {
        "id": True,
        "call_id": True,
        "parsed_arguments": True,
        "content": {"__all__": {"parsed"}},
    }
    for one, other in zip(whole.output, streamed.output):
        assert one.model_dump(exclude=unlike) == other.model_dump(exclude=unlike)


def test_what_a_stream_costs_is_told_with_its_last_event_or_with_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Answers, "_next", lambda talk: talk._steps.popleft())  # none is merged
    for each in (None, True):
        case, body = Case(["Hello", " world"]), {"input": "hi", "timings_per_token": each}
        events = case.events("/v1/responses", body)
        timed = [event["type"] for event in events if "timings" in event]
        assert timed[-1] == "response.completed" and events[-1]["timings"]["predicted_n"] == 11
        assert ("response.output_text.delta" in timed) == (each is True)


def test_a_tool_makes_its_round() -> None:
    case = Case(CALLING, ["It is 42."])
    with client_of(case) as client:
        first = client.responses.create(model="m", input="hi", tools=[TOOL], store=False)
        calls = [item for item in first.output if item.type == "function_call"]
        items: list[Any] = [{"role": "user", "content": "hi"}]
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
            for call in calls
        ]
        second = client.responses.create(model="m", input=items, tools=[TOOL])
    assert second.output_text == "It is 42."
    _, answer, one, two = case.model.chats[1].messages
    assert answer["reasoning_content"] == "I should look" and answer["content"] == "Let me see."
    assert [call["id"] for call in answer["tool_calls"]] == [call.call_id for call in calls]
    arguments = [call["function"]["arguments"] for call in answer["tool_calls"]]
    assert arguments == ['{"a": 1}', '{"a": 2}']
    assert [one["tool_call_id"], two["tool_call_id"]] == [call.call_id for call in calls]


def test_a_conversation_goes_on_from_its_last_response() -> None:
    case = Case(["one"], ["two"])
    with client_of(case) as client:
        first = client.responses.create(model="m", input="a")
        with client.responses.stream(model="m", input="b", previous_response_id=first.id) as stream:
            second = stream.get_final_response()
        third = client.responses.create(model="m", input="c", previous_response_id=second.id)
        contents = [message["content"] for message in case.model.chats[2].messages]
        assert contents == ["a", "one", "b", "two", "c"]
        assert client.responses.retrieve(second.id).output_text == "two"
        client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(second.id)
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="m", input="d", previous_response_id=third.id)
    assert caught.value.code == "previous_response_not_found"


def test_what_is_not_to_be_stored_is_not() -> None:
    case = Case()
    with client_of(case) as client:
        found = client.responses.create(model="m", input="a", store=False)
    assert len(case.state.responses) == 0 and found.model_dump()["store"] is False


class City(pydantic.BaseModel):
    name: str


def test_structured_output_is_parsed() -> None:
    case = Case(['{"name": "Oslo"}'])
    with client_of(case) as client:
        found = client.responses.parse(model="m", input="a", text_format=City)
    assert found.output_parsed == City(name="Oslo")
    form = case.model.chats[0].format
    assert form is not None and form.kind == "json_schema"
    assert isinstance(form.source, dict) and form.source["required"] == ["name"]


def test_log_probabilities() -> None:
    case = Case(["ab"])
    with client_of(case) as client:
        found = client.responses.create(
            model="m", input="a", include=["message.output_text.logprobs"], top_logprobs=2
        )
    message: Any = found.output[0]
    entries = message.content[0].logprobs
    assert [entry.token for entry in entries] == ["a", "b"]
    assert [len(entry.top_logprobs) for entry in entries] == [2, 2]


def test_an_answer_that_is_cut_is_incomplete() -> None:
    with client_of(Case(["Hello"])) as client:
        with client.responses.stream(model="m", input="a", max_output_tokens=3) as stream:
            last = list(stream)[-1]
    assert last.type == "response.incomplete"
    details = last.response.incomplete_details
    assert last.response.output_text == "Hel" and details and details.reason == "max_output_tokens"


def test_tokens_are_counted_without_an_answer() -> None:
    case = Case()
    with client_of(case) as client:
        found = client.responses.input_tokens.count(model="m", input="hi")
    assert (found.input_tokens, case.service.requests) == (len("user: hi"), [])


@pytest.mark.parametrize(
    "refusal, kind, code",
    [
        (ContextOverflow("long"), openai.BadRequestError, "context_length_exceeded"),
        (QueueFull("full", 1.0), openai.RateLimitError, "queue_full"),
    ],
)
def test_a_refusal_is_the_clients_exception(
    refusal: Exception, kind: type[openai.APIStatusError], code: str
) -> None:
    with client_of(Case(refusal=refusal)) as client:
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                client.responses.create(model="m", input="a", stream=stream)
            assert caught.value.code == code


def test_a_wrong_field_is_named() -> None:
    audio: Any = [{"role": "user", "content": [{"type": "input_audio", "data": "data:"}]}]
    wrong: Any = 5
    with client_of(Case()) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="m", input=audio)
        assert caught.value.param == "input[0].content[0]"
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="m", input=wrong)
        assert caught.value.param == "input"


def test_a_failure_in_the_middle_reaches_the_client() -> None:
    with client_of(Case(["Hel", NativeError("the device is gone")])) as client:
        events = list(client.responses.create(model="m", input="a", stream=True))
        assert [event.type for event in events[-2:]] == ["error", "response.failed"]
        last: Any = events[-1]
        assert last.response.error.message == "the device is gone"
        with pytest.raises(openai.InternalServerError, match="the device is gone"):
            client.responses.create(model="m", input="a")


def test_a_client_that_leaves_ends_its_request() -> None:
    case = Case(["a"] * 1000, step_s=0.01)
    with client_of(case) as client:
        with client.responses.create(model="m", input="a", stream=True) as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    break
        assert case.service.tickets[0].gone.wait(120)
    assert len(case.state.responses) == 0
