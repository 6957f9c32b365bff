"""Tests of Ollama's interface."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.server_case import Case

from moegraph.errors import NativeError
from moegraph.text.infill import Gap

ASK: Any = {"model": "fake:latest", "messages": [{"role": "user", "content": "hi"}]}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = "<tool_call>\n<function=look>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


def lines(case: Case, path: str, body: Any) -> list[dict[str, Any]]:
    response = case.post(path, body)
    assert response.headers["content-type"] == "application/x-ndjson; charset=utf-8", response.text
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_chat_is_streamed_unless_asked_otherwise() -> None:
    case = Case(["<think>hm</think>", "Hello", " you"], step_s=0.01, n_read_steps=3)
    *told, last = lines(case, "/api/chat", ASK)
    assert "".join(one["message"]["content"] for one in told) == "Hello you"
    assert "".join(one["message"].get("thinking", "") for one in told) == "hm"
    assert not any(one["done"] for one in told) and last["model"] == "fake"
    assert last["done"] and last["done_reason"] == "stop" and last["message"]["content"] == ""
    assert last["prompt_eval_count"] == len("user: hi") and last["eval_count"] == 26
    assert last["total_duration"] == sum(
        last[f"{name}_duration"] for name in ("load", "prompt_eval", "eval")
    )
    whole = case.answer("/api/chat", {**ASK, "stream": False})
    assert whole["message"] == {"role": "assistant", "content": "Hello you", "thinking": "hm"}
    assert whole["done"] is True and whole["created_at"].endswith("Z")


def test_calls_have_objects_as_arguments() -> None:
    case = Case(["Let me", " see.", CALL[:40], CALL[40:]], step_s=0.01)
    said = {"role": "assistant", "content": "", "thinking": "hm",
            "tool_calls": [{"function": {"name": "look", "arguments": {"a": 2}}}]}  # fmt: skip
    result = {"role": "tool", "content": "3", "tool_name": "look"}
    body = {"messages": [*ASK["messages"], said, result], "tools": [LOOK]}
    *told, last = lines(case, "/api/chat", body)
    called = [one["message"]["tool_calls"] for one in told if "tool_calls" in one["message"]]
    assert called == [[{"function": {"name": "look", "arguments": {"a": 1}}}]]
    assert last["done_reason"] == "stop"
    whole = case.answer("/api/chat", {**body, "stream": False})
    assert [whole["message"]["tool_calls"]] == called
    _, assistant, tool = case.model.chats[0].messages
    assert assistant["reasoning_content"] == "hm" and tool["name"] == "look"
    assert json.loads(assistant["tool_calls"][0]["function"]["arguments"]) == {"a": 2}


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"options": {"num_predict": 5}}, "max_tokens", 5),
        ({"options": {"num_predict": -2, "num_ctx": 1}}, "max_tokens", None),
        ({"options": {"stop": ["x"]}}, "stop", ("x",)),
        ({"think": True}, "variables", {"enable_thinking": True}),
        ({"think": False}, "variables", {"enable_thinking": False}),
        ({"think": "low"}, "variables", {"enable_thinking": True, "reasoning_effort": "low"}),
        ({"format": "json"}, "format.kind", "json_object"),
        ({"format": {"type": "object"}}, "format.kind", "json_schema"),
        ({"options": {"temperature": 0, "seed": 3}}, "sampling.seed", 3),
        ({"options": {"temperature": 0}}, "sampling.temperature", 0),
    ],
)
def test_settings_are_those_of_a_chat(given: dict[str, Any], field: str, value: Any) -> None:
    case = Case()
    case.answer("/api/chat", {**ASK, **given, "stream": False, "keep_alive": "5m"})
    found: Any = case.model.chats[0]
    for name in field.split("."):
        found = getattr(found, name)
    assert found == value


def test_a_question_and_a_text_and_a_gap() -> None:
    case = Case(["b"])
    found = case.answer("/api/generate", {"prompt": "a", "system": "s", "stream": False})
    assert found["response"] == "b" and "message" not in found
    assert [m["content"] for m in case.model.chats[0].messages] == ["s", "a"]
    told = lines(case, "/api/generate", {"prompt": "a", "raw": True, "options": {"top_k": 7}})
    assert "".join(one["response"] for one in told) == "b"
    case.answer("/api/generate", {"prompt": "a", "suffix": "c", "stream": False})
    raw, gap = case.model.texts
    assert raw.prompt == "a" and raw.sampling.top_k == 7 and gap.gap == Gap("a", "c")


@pytest.mark.parametrize(("path", "field"), [("chat", "message"), ("generate", "response")])
def test_nothing_asked_only_loads_the_model(path: str, field: str) -> None:
    found = Case().answer(f"/api/{path}", {"model": "fake", "keep_alive": 0})
    assert found["done_reason"] == "load" and field in found


def test_models_are_listed_and_described() -> None:
    client = Case().client
    (found,) = client.get("/api/tags").json()["models"]
    assert found["name"] == found["model"] == "fake" and len(found["digest"]) == 64
    assert found["details"]["parameter_size"] == "0.0M" and found["size"] == 1000
    assert client.get("/api/ps").json()["models"] == [found]
    for name in ("model", "name"):
        shown = client.post("/api/show", json={name: "fake"}).json()
        assert shown["details"] == found["details"] and "tools" in shown["capabilities"]
        assert shown["capabilities"][-1] == "insert"
    assert client.get("/api/version").json()["version"].count(".") == 2


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("chat", {**ASK, "options": {"top_k": "x"}}, "options.top_k: Input should be"),
        ("chat", {"messages": [{"role": "user", "images": ["x"]}]}, "model reads text only"),
        ("generate", {"prompt": "a", "images": ["x"]}, "'image_url'; this model reads text only"),
        ("generate", {"images": ["x"]}, "this model reads text only"),
        ("generate", {"prompt": "a", "images": ["x"], "raw": True}, "images: a raw prompt"),
        ("generate", {"prompt": "a", "format": "xml"}, "format: Input should be '' or 'json'; it"),
        ("chat", {**ASK, "think": "max"}, "think: Input should be"),
        ("generate", {"prompt": "a" * 5000, "raw": True}, "the context holds"),
    ],
)
def test_errors_are_one_line(path: str, body: Any, words: str) -> None:
    response = Case().post(f"/api/{path}", body)
    assert response.status_code == 400 and words in response.json()["error"]


def test_a_failure_ends_the_lines_with_an_error() -> None:
    *_, last = lines(Case(["a", NativeError("lost")]), "/api/chat", ASK)
    assert last == {"error": "lost"}
