"""Prompts, formats, calls in JSON and progress of the real server, with the shipped model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.patience import PATIENCE_S
from helpers.qwen_template import JSON_CALLS
from helpers.server_process import ServerProcess, serving

ASK = [{"role": "user", "content": "write a function"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "minLength": 2000}},
            "required": ["text"],
        },
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    template: Path = tmp_path_factory.mktemp("template") / "json.jinja"
    template.write_text(JSON_CALLS, encoding="utf-8")
    given = ("-c", 4096, "-ub", 64, "--reasoning", "off", "--chat-template-file", template)
    with serving(*given, "-s", 3) as process:
        yield process


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> Any:
    response = httpx.post(server.url + path, json=body, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    return response.json()


def events(server: ServerProcess, path: str, body: dict[str, Any]) -> list[Any]:
    body = {**body, "stream": True}
    lines = httpx.post(server.url + path, json=body, timeout=PATIENCE_S).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


SAID = {"role": "assistant", "content": "def f("}


@pytest.mark.parametrize(
    ("given", "end"),
    [
        ({}, "assistant\n<think>\n\n</think>\n\n"),
        ({"reasoning_effort": "high"}, "assistant\n<think>\n"),
        ({"messages": [*ASK, SAID]}, "</think>\n\ndef f("),
        ({"add_generation_prompt": False}, "write a function<|im_end|>\n"),
    ],
)
def test_the_prompt_that_is_shown_is_the_one_that_is_read(
    server: ServerProcess, given: dict[str, Any], end: str
) -> None:
    body = {"messages": ASK, **given, "max_tokens": 12, "temperature": 0}
    text = post(server, "/apply-template", body)["prompt"]
    tokens = post(server, "/tokenize", body)["tokens"]
    assert text.endswith(end)
    assert post(server, "/detokenize", {"tokens": tokens})["content"] == text
    chat = post(server, "/v1/chat/completions", {**body, "reasoning_format": "none"})
    plain = {"prompt": tokens, "max_tokens": 12, "temperature": 0}
    assert chat["usage"]["prompt_tokens"] == len(tokens)
    begun = re.search(r"<think>\s*(</think>\s*)?\Z", end)
    answer = (begun.group() if begun else "") + post(server, "/v1/completions", plain)["choices"][
        0
    ]["text"]
    assert chat["choices"][0]["message"]["content"] == answer


@pytest.mark.parametrize("n_words", [1, 600])
def test_how_far_a_prompt_is_read(server: ServerProcess, n_words: int) -> None:
    messages = [{"role": "user", "content": f"word{n_words} " * n_words}]
    body = {"messages": messages, "max_tokens": 2, "return_progress": True}
    for is_known in (False, True):
        chunks = events(server, "/v1/chat/completions", body)
        found = [one["prompt_progress"] for one in chunks if "prompt_progress" in one]
        first, last = found[0], found[-1]
        assert first["processed"] == first["cache"] and last["processed"] == last["total"]
        assert (first["cache"] > 0) == is_known or n_words == 1
        assert [one["processed"] for one in found] == sorted({one["processed"] for one in found})


def test_a_call_in_json_comes_in_pieces_and_is_told_if_it_is_cut(server: ServerProcess) -> None:
    choice: Any = {"type": "function", "function": {"name": "add"}}
    body = {"messages": ASK, "tools": [ADD], "tool_choice": choice, "max_tokens": 120}
    body |= {"temperature": 0}
    *chunks, last = events(server, "/v1/chat/completions", body)
    calls = [c for one in chunks for c in one["choices"][0]["delta"].get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "add" and calls[0]["id"]
    pieces = [call["function"]["arguments"] for call in calls[1:]]
    assert len(pieces) > 3 and last["choices"][0]["finish_reason"] == "length"
    choice = post(server, "/v1/chat/completions", body)["choices"][0]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == "".join(pieces)
    assert "".join(call["function"]["arguments"].split()).startswith('{"text":"')


FORM = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["color", "sizes"],
    "additionalProperties": False,
}


def test_an_answer_follows_a_schema_and_its_stream_too(server: ServerProcess) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}
    body = {"messages": ASK, "response_format": form, "max_tokens": 500}
    whole = post(server, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
    chunks = events(server, "/v1/chat/completions", body)
    pieces = [one["choices"][0]["delta"].get("content") for one in chunks if one["choices"]]
    for text in (whole, "".join(piece or "" for piece in pieces)):
        found = json.loads(text)
        assert set(found) == {"color", "sizes"} and found["color"] in ("red", "green")
        assert 1 <= len(found["sizes"]) <= 3 and all(isinstance(n, int) for n in found["sizes"])


def test_an_answer_follows_a_grammar_and_a_broken_one_is_the_clients_error(
    server: ServerProcess,
) -> None:
    for grammar in (
        'root ::= "yes " ("a" | "b")+ "."',
        '%llguidance {}\nstart: "yes " /[ab]{1,20}/ "."',
    ):
        body = {"prompt": "x", "max_tokens": 400, "grammar": grammar}
        answer = post(server, "/v1/completions", body)["choices"][0]
        assert re.fullmatch(r"yes [ab]+\.", answer["text"]) or answer["finish_reason"] == "length"
    for given in ({"grammar": "root ::= ("}, {"json_schema": {"type": "nothing"}}):
        body = {"messages": ASK, **given}
        url = f"{server.url}/v1/chat/completions"
        assert httpx.post(url, json=body, timeout=PATIENCE_S).status_code == 400
