#!/usr/bin/env python3
"""Check that answers of `moegraph serve` have the types of OpenAI's and Anthropic's packages.

Every answer, every event of a stream and every error is read strictly with the pydantic models of
the installed packages `openai` and `anthropic`: no field that is required may lack, and no value
may be of another type, or other than those listed. Prints how many objects of each kind passed, and
the differences. The exit status is 1 if there is one.

    scripts/check_sdk_types.py                            # the shipped model
    scripts/check_sdk_types.py http://127.0.0.1:8080      # a server that runs
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic.types as theirs
import httpx
import openai.types as ours
from anthropic.types.shared import ErrorResponse
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from openai.types.shared import ErrorObject
from pydantic import TypeAdapter, ValidationError

ROOT = Path(__file__).resolve().parent.parent

# Where a service sends otherwise than the types of its own package say: a completion's chunks have
# no reason to end until the last one, though the type has none without.
AS_SENT = {("Completion (chunk)", "choices.0.finish_reason")}

Post = Callable[[str, str, Mapping[str, Any] | None], str]


@dataclass
class Checked:
    """What became of the objects of one type."""

    n_passed: int = 0
    problems: Counter[str] = field(default_factory=Counter)


class Checker:
    """Reads answers with the types of the packages, and remembers what it found."""

    def __init__(self) -> None:
        self.found: dict[str, Checked] = defaultdict(Checked)

    def check(self, name: str, kind: Any, text: str) -> None:
        """Read the JSON text of one object."""
        one = self.found[name]
        try:
            TypeAdapter(kind).validate_json(text, strict=True)
        except ValidationError as error:
            for problem in error.errors():
                where = ".".join(map(str, problem["loc"]))
                if (name, where) not in AS_SENT:
                    one.problems[f"{where}: {problem['msg']}"] += 1
        one.n_passed += not one.problems

    @property
    def differences(self) -> list[str]:
        """Differences, one line each."""
        return [
            f"{name}: {problem} ({n} times)"
            for name, one in self.found.items()
            for problem, n in one.problems.items()
        ]

    def table(self) -> Iterator[str]:
        """Yield the lines of the table."""
        yield "passed"
        for name, one in self.found.items():
            yield f"  {one.n_passed:5d}  {name}"
        yield "differences"
        yield from [f"  {line}" for line in self.differences] or ["  none"]


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "What is 1 + 1?"}]
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
LOGPROBS = {"logprobs": True, "top_logprobs": 2}
INCLUDE = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
SCHEMA_TOOL = {"name": "add", "input_schema": SCHEMA}
CUSTOM = {"type": "custom", "name": "say", "description": "Says it."}
FUNCTION_TOOL = {"type": "function", **FUNCTION}


def chats() -> Iterator[dict[str, Any]]:
    """Yield bodies of chat completions."""
    body: dict[str, Any] = {"messages": ASK, "max_tokens": 60}
    for more in (
        {}, {"n": 2, "reasoning_effort": "none"}, {**LOGPROBS, "max_tokens": 3},
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": TOOLS, "tool_choice": "required", "max_tokens": 12},
        {"response_format": FORMAT, "reasoning_effort": "none"},
    ):  # fmt: skip
        yield {**body, **more}


def texts() -> Iterator[dict[str, Any]]:
    """Yield bodies of text completions."""
    body: dict[str, Any] = {"prompt": "def f(", "max_tokens": 5}
    yield from ({**body, **more} for more in ({}, {"n": 2, "echo": True}, {"logprobs": 2}))


def responses() -> Iterator[dict[str, Any]]:
    """Yield bodies of responses."""
    body: dict[str, Any] = {"model": "any", "input": "What is 1 + 1?", "max_output_tokens": 60}
    for more in (
        {}, {"reasoning": {"effort": "none"}, **INCLUDE},
        {"tools": [FUNCTION_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": [CUSTOM], "tool_choice": "required", "parallel_tool_calls": False},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        {"max_output_tokens": 1},
    ):  # fmt: skip
        yield {**body, **more}


def messages() -> Iterator[dict[str, Any]]:
    """Yield bodies of Anthropic's messages."""
    body: dict[str, Any] = {"model": "any", "messages": ASK, "max_tokens": 60}
    for more in (
        {}, {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"tools": [SCHEMA_TOOL], "tool_choice": {"type": "any"}}, {"stop_sequences": ["e"]},
        {"tools": [SCHEMA_TOOL], "tool_choice": {"type": "any"}, "max_tokens": 12},
    ):  # fmt: skip
        yield {**body, **more}


def check_all(post: Post) -> Checker:
    """Ask for all kinds of answers and check them. post: (method, path, body) -> the text."""
    checker = Checker()

    def ask(name: str, kind: Any, path: str, body: Mapping[str, Any]) -> None:
        checker.check(name, kind, post("POST", path, body))

    def stream(name: str, kind: Any, path: str, body: Mapping[str, Any]) -> None:
        lines = post("POST", path, {**body, "stream": True}).splitlines()
        found = [line[6:] for line in lines if line.startswith("data: ")]
        for text in found:
            if text != "[DONE]":
                checker.check(f"{name} (chunk)", kind, text)
        if not found:
            checker.found[f"{name} (chunk)"].problems["no events"] += 1

    usage = {"stream_options": {"include_usage": True}}
    for body in chats():
        ask("ChatCompletion", ours.chat.ChatCompletion, "/v1/chat/completions", body)
        kind = ours.chat.ChatCompletionChunk
        stream("ChatCompletion", kind, "/v1/chat/completions", {**body, **usage})
    for body in texts():
        ask("Completion", ours.Completion, "/v1/completions", body)
        stream("Completion", ours.Completion, "/v1/completions", {**body, **usage})
    response = ours.responses.Response
    for body in responses():
        ask("Response", response, "/v1/responses", body)
        stream("Response", ours.responses.ResponseStreamEvent, "/v1/responses", body)
    counted = {"model": "any", "input": "a"}
    ask("InputTokenCount", InputTokenCountResponse, "/v1/responses/input_tokens", counted)
    kept = json.loads(post("POST", "/v1/responses", {**counted, "max_output_tokens": 2}))["id"]
    checker.check("Response (kept)", response, post("GET", f"/v1/responses/{kept}", None))
    for body in messages():
        ask("Message", theirs.Message, "/v1/messages", body)
        stream("Message", theirs.RawMessageStreamEvent, "/v1/messages", body)
    count = {"model": "any", "messages": ASK}
    ask("MessageTokensCount", theirs.MessageTokensCount, "/v1/messages/count_tokens", count)
    for model in json.loads(post("GET", "/v1/models", None))["data"]:
        checker.check("Model", ours.Model, json.dumps(model))
        checker.check("ModelInfo", theirs.ModelInfo, json.dumps(model))
    error = json.loads(post("POST", "/v1/chat/completions", {"messages": 1}))["error"]
    checker.check("ErrorObject", ErrorObject, json.dumps(error))
    ask("ErrorResponse", ErrorResponse, "/v1/messages", {"messages": 1})
    return checker


def main() -> int:
    """Run the checks; return 1 if there is a difference."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("url", nargs="?", help="of a server; default: one with the shipped model")
    url = p.parse_args().url
    if url:
        return report(url)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from helpers.server_process import serving

    with serving("-c", 4096, "-np", 2) as server:
        return report(server.url)


def report(url: str) -> int:
    """Check a server and print the table."""
    key = os.environ.get("MOEGRAPH_API_KEY", "-")
    with httpx.Client(base_url=url, headers={"X-Api-Key": key}, timeout=600) as client:
        checker = check_all(lambda method, path, body: client.request(method, path, json=body).text)
    print("\n".join(checker.table()))
    return 1 if checker.differences else 0


if __name__ == "__main__":
    raise SystemExit(main())
