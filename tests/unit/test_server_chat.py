"""Tests of /v1/chat/completions with a scripted service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from helpers.server_case import CHAT, Case

from moegraph.engine.chat import Format
from moegraph.errors import (
    ConfigError,
    ContextOverflow,
    NativeError,
    QueueFull,
    RequestError,
    ServiceClosed,
)
from moegraph.sampling import SamplingParams, settings
from moegraph.text.chat.answer import AnswerParser
from moegraph.text.chat.parts import Part


def test_an_answer_has_the_form_of_openai() -> None:
    answer = Case(["<think>think</think>", "Hello", " world"]).chat()
    assert answer["object"] == "chat.completion" and answer["model"] == "fake"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant", "content": "Hello world", "reasoning_content": "think",
                "refusal": None,
            },
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]  # fmt: skip
    assert answer["usage"]["prompt_tokens"] == len("user: hi")
    assert answer["usage"]["completion_tokens"] == len("<think>think</think>Hello world")
    assert answer["timings"]["predicted_n"] == len("<think>think</think>Hello world")
    # the fake takes 1 ms a token; the first costs no pass of its own, as llama-server counts
    n = answer["timings"]["predicted_n"]
    assert answer["timings"]["predicted_per_second"] == pytest.approx(1000 * (n - 1) / n)
    assert answer["timings"]["predicted_per_token_ms"] == pytest.approx(n / (n - 1))


def test_a_stream_has_the_same_answer_in_pieces() -> None:
    body = {**CHAT, "stream_options": {"include_usage": True}}
    *chunks, done = Case(["<think>think</think>", "Hello", " world"]).events(
        "/v1/chat/completions", body
    )
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": None, "refusal": None}
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert "".join(d.get("content") or "" for d in deltas) == "Hello world"
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == "think"
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]][-2:] == [None, "stop"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == len(
        "<think>think</think>Hello world"
    )


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("no"), 400, None),
        (ConfigError("llguidance is not installed"), 400, None),
        (ContextOverflow("long"), 400, "context_length_exceeded"),
        (QueueFull("full", 2.2), 429, "queue_full"),
        (ServiceClosed("end"), 503, "closing"),
        (NativeError("broken"), 500, None),
        (ZeroDivisionError("secret"), 500, None),
    ],
)
def test_an_error_before_the_answer_has_a_status(
    error: Exception, status: int, code: str | None
) -> None:
    for stream in (False, True):
        response = Case(refusal=error).post("/v1/chat/completions", {**CHAT, "stream": stream})
        found = response.json()["error"]
        assert (response.status_code, found["code"]) == (status, code)
        assert "secret" not in response.text and found["message"]
        assert (response.headers.get("retry-after") == "3") == isinstance(error, QueueFull)


def test_an_error_in_the_answer_ends_the_stream_with_its_object() -> None:
    case = Case(["Hel", NativeError("the device is gone")])
    events = case.events("/v1/chat/completions", CHAT)
    assert events[-1]["error"]["message"] == "the device is gone"
    response = case.post("/v1/chat/completions", CHAT)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"


CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def test_without_parallel_calls_the_answer_ends_after_the_first() -> None:
    case = Case([CALL, CALL, *["never"] * 500], step_s=0.002)
    answer = case.chat(tools=[TOOL], parallel_tool_calls=False)
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert case.service.tickets[0].gone.is_set()


@pytest.mark.parametrize(("max_tokens", "arguments"), [(56, '{"a": '), (99, '{"a": 1}')])
def test_only_a_call_that_was_cut_stays_without_an_end(max_tokens: int, arguments: str) -> None:
    answer = Case([CALL[:56]]).chat(tools=[TOOL], max_tokens=max_tokens)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == arguments


def test_a_conversation_with_a_tool_reaches_the_model_as_it_is() -> None:
    case, text = Case(), {"type": "text", "text": "Be"}
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": "é"}}}
    given = [
        {"role": "developer", "content": [text, text]},
        {"role": "user", "content": "1+1?", "unknown": 1},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "2"},
    ]
    case.chat(messages=given, tools=[TOOL], tool_choice="required")
    (chat,) = case.model.chats
    assert chat.messages[0] == given[0], "the template joins parts"
    assert chat.messages[2]["tool_calls"][0]["function"]["arguments"] == '{"a": "é"}'
    assert chat.messages[3] == given[3]
    assert chat.tools == [TOOL] and chat.tool_choice == "required"


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


TOOLS = [{"type": "function", "function": {"name": name}} for name in "fg"]


def test_only_tools_that_are_allowed_are_shown() -> None:
    for names, mode in ("f", "auto"), ("fg", "required"):
        case = Case()
        case.chat(tools=TOOLS, tool_choice=allowed(*names, mode=mode))
        (chat,) = case.model.chats
        assert [tool["function"]["name"] for tool in chat.tools] == list(names)
        assert chat.tool_choice == mode
    case = Case()
    case.chat(tools=TOOLS, tool_choice=TOOLS[1])
    assert case.model.chats[0].tool_choice == "g" and case.model.chats[0].tools == TOOLS


def test_every_sampling_setting_reaches_the_engine() -> None:
    given = {
        "temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9,
        "repeat_penalty": 1.1, "repeat_last_n": 8, "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
    }  # fmt: skip
    assert {s.name for s in settings()} - set(given) == {"seed"}
    case = Case()
    case.chat(**given, seed=7, logit_bias={"65": -100, "B": 1}, stop="x", max_tokens=3)
    (request,) = case.service.requests
    found = {name: getattr(request.sampling, name) for name in given}
    assert found == given and request.sampling.seed == 7
    assert request.sampling.logit_bias == {65: -100.0, 66: 1.0}
    assert (request.stop, request.max_tokens) == (("x",), 3)


def test_names_of_other_servers_are_known() -> None:
    case = Case()
    case.chat(repetition_penalty=1.2, repeat_last_n=-1, n_predict=3, top_k=-1)
    (request,) = case.service.requests
    assert request.sampling.repeat_penalty == 1.2 and request.sampling.n_recent > 10**6
    assert request.max_tokens == 3
    response = case.post("/v1/chat/completions", {**CHAT, "repeat_last_n": -2})
    assert response.json()["error"]["param"] == "repeat_last_n"


def test_what_a_request_does_not_say_is_the_servers() -> None:
    sampling = SamplingParams(temperature=0.25, top_k=3, seed=5)
    given = {"sampling": sampling, "max_tokens": 9, "variables": {"enable_thinking": False}}
    case = Case(defaults=given)
    case.chat(top_k=4, temperature=None)
    (request,) = case.service.requests
    assert request.sampling == replace(sampling, top_k=4) and request.max_tokens == 9
    assert case.model.chats[0].variables == {"enable_thinking": False}
    case.chat(reasoning_effort="low", max_tokens=-1)
    assert case.model.chats[1].variables["enable_thinking"] is True
    assert case.model.chats[1].max_tokens is None


def test_what_the_answer_begins_with_reaches_the_model() -> None:
    case, begun = Case(), {"role": "assistant", "content": "a"}
    given: list[dict[str, Any]] = [
        {}, {"add_generation_prompt": False}, {"continue_final_message": "content"},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"continue_final_message": False, "add_generation_prompt": True},
    ]  # fmt: skip
    for fields in given:
        case.chat(messages=[*CHAT["messages"], begun], **fields)
    found = [(c.add_generation_prompt, c.continue_final_message) for c in case.model.chats]
    assert found == [(True, None), (False, None), (True, "content"), (False, True), (True, False)]
    case.chat(messages=[*CHAT["messages"], begun], echo=True)
    assert [chat.echo for chat in case.model.chats] == [False] * 5 + [True]


def test_seeds_of_64_bits_are_folded() -> None:
    case = Case()
    for seed in (-1, 2**40 + 3, -5, 0xFFFFFFFF):
        case.chat(seed=seed)
    seeds = [request.sampling.seed for request in case.service.requests]
    assert seeds[0] == seeds[3] == -1 and all(s is not None and s < 2**32 for s in seeds)


def test_choices_have_seeds_of_their_own() -> None:
    case = Case(["a"], ["b"], ["c"])
    answer = case.chat(n=3, seed=10)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert {c["message"]["content"] for c in answer["choices"]} == {"a", "b", "c"}
    assert [r.sampling.seed for r in case.service.requests] == [10, 11, 12]
    assert answer["usage"]["prompt_tokens"] == len("user: hi")
    assert answer["usage"]["completion_tokens"] == 3


def test_probabilities_stand_beside_their_tokens() -> None:
    answer = Case(["ab", "c"]).chat(logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in content] == ["a", "b", "c"]
    assert answer["choices"][0]["logprobs"]["refusal"] is None
    assert content[0]["bytes"] == [97] and content[0]["logprob"] == -0.5
    assert [one["token"] for one in content[0]["top_logprobs"]] == ["a", "b"]
    body = {**CHAT, "logprobs": True}
    *chunks, _ = Case(["ab", "c"]).events("/v1/chat/completions", body)
    found = [c["choices"][0]["logprobs"] for c in chunks]
    assert "".join(t["token"] for f in found if f for t in f["content"]) == "abc"


# What no grammar can hold an answer to is passed over, unless the client wants it strict.
LOOSE = {"x-guidance": {"lenient": True}}


@pytest.mark.parametrize(
    ("given", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", None),
        (
            {"response_format": {"type": "json_object", "schema": {"a": 1}}},
            "json_schema", {"a": 1, **LOOSE},
        ),
        (
            {"response_format": {"type": "json_schema",
                                 "json_schema": {"name": "x", "schema": {"b": 2}}}},
            "json_schema", {"b": 2, **LOOSE},
        ),
        (
            {"response_format": {"type": "json_schema",
                                 "json_schema": {"schema": {"b": 2}, "strict": True}}},
            "json_schema", {"b": 2},
        ),
        ({"json_schema": {"c": 3}}, "json_schema", {"c": 3, **LOOSE}),
        ({"grammar": 'root ::= "a"'}, "gbnf", 'root ::= "a"'),
        ({"grammar": "%llguidance {}\nstart: /a/"}, "lark", "%llguidance {}\nstart: /a/"),
    ],
)  # fmt: skip
def test_formats_of_answers(given: dict[str, Any], kind: str, source: Any) -> None:
    case = Case()
    case.chat(**given)
    assert case.model.chats[0].format == Format(kind, source)


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_is_passed_over_is_told(is_stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    case = Case()
    case.model.warnings = ("schema keywords passed over: not", "é\r\nX: y")
    told = "schema keywords passed over: not; ???X: y"
    with caplog.at_level("INFO", "moegraph.requests"):
        response = case.post("/v1/chat/completions", {**CHAT, "n": 2, "stream": is_stream})
    assert response.status_code == 200 and response.headers["X-Moegraph-Warning"] == told
    assert [vars(record).get("warning") for record in caplog.records] == [told]
    case.model.warnings = ()
    assert "X-Moegraph-Warning" not in case.post("/v1/chat/completions", CHAT).headers


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "contents": "x"}]}, "messages[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "data": ""}]}]},
            "messages[0].content",
        ),
        ({"temperature": "0.7"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": 7}, "top_p"),
        ({"stream": "true"}, "stream"),
        ({"n": 0}, "n"),
        ({"n": 1000000}, "n"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["x"] * 1000}, "stop"),
        ({"stop": ""}, "stop[0]"),
        ({"logit_bias": {"1": "much"}}, "logit_bias"),
        ({"logit_bias": 3}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [3]}}},
            "tool_choice",
        ),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("f", mode="none")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("f", "h")}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"grammar": "x", "json_schema": {}}, "grammar"),
        ({"reasoning_effort": "heroic"}, "reasoning_effort"),
        ({"reasoning_format": "deep"}, "reasoning_format"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        ({"continue_final_message": "name"}, "continue_final_message"),
        ({"continue_final_message": 1}, "continue_final_message"),
        (
            {"messages": [{"role": "assistant", "content": "a"}] * 2},
            "continue_final_message",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        (
            {"chat_template_kwargs": {"enable_thinking": "false"}},
            "chat_template_kwargs.enable_thinking",
        ),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_a_wrong_field_is_named(given: dict[str, Any], param: str) -> None:
    response = Case().post("/v1/chat/completions", {**CHAT, **given})
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and error["message"]


def test_deep_and_large_schemas_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"properties": {"a": deep}}
    large = {"enum": ["x" * 1000] * 1000}
    for schema in (deep, large):
        for given in (
            {"json_schema": schema},
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]},
        ):
            assert Case().post("/v1/chat/completions", {**CHAT, **given}).status_code == 400


@pytest.mark.parametrize("n_cached", [0, 3, 7])
@pytest.mark.parametrize("n_read_steps", [0, 1, 5])
def test_reports_of_a_prompt_begin_with_what_is_cached_and_end_with_all_of_it(
    n_cached: int, n_read_steps: int
) -> None:
    n_prompt, given = len("user: hi"), {"return_progress": True, "n": 2}
    chat = "/v1/chat/completions", {**CHAT, **given}, "chat.completion.chunk"
    text = "/v1/completions", {"prompt": "user: hi", **given}, "text_completion"
    response = "/v1/responses", {"input": "hi", **given}, "response.in_progress"
    for path, body, kind in (chat, text, response):
        events = Case(n_read_steps=n_read_steps, n_cached=n_cached).events(path, body)
        reports = [event for event in events if "prompt_progress" in event]
        assert all(kind in (one.get("object"), one.get("type")) for one in reports)
        found = [one["prompt_progress"] for one in reports]
        n_told = [one["processed"] for one in found]
        assert n_told[0] == n_cached and n_told[-1] == n_prompt
        assert n_told == sorted(set(n_told)) and found[-1]["time_ms"] >= found[0]["time_ms"]
        assert {(one["total"], one["cache"]) for one in found} == {(n_prompt, n_cached)}


class Faulty(AnswerParser):
    """A parser with a mistake."""

    def push(self, text: str, tokens: Sequence[int] = ()) -> list[Part]:
        raise KeyError("inner")


def test_a_mistake_of_ours_ends_the_stream_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helpers.fake_service.AnswerParser", Faulty)
    case = Case()
    assert case.events("/v1/chat/completions", CHAT)[-1]["error"]["type"] == "server_error"
    response = case.post("/v1/chat/completions", CHAT)
    assert response.status_code == 500 and "inner" not in response.text
    assert all(ticket.gone.is_set() for ticket in case.service.tickets)
    assert case.state.metrics.n_open == 0


def test_answers_name_what_made_them() -> None:
    bodies = {"/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "a"}}
    for path, body in bodies.items():
        case = Case()
        found = [case.answer(path, body), *case.events(path, body)[:-1]]
        names = {one["system_fingerprint"] for one in found}
        assert len(names) == 1 and names.pop().startswith("b")
