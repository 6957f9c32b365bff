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

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
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


class Checker:
    """Reads answers with the types of the packages.

    passed: how many objects of each type did. differences: what the others have, and how often.
    """

    def __init__(self) -> None:
        self.passed, self.differences = Counter[str](), Counter[str]()

    def check(self, name: str, kind: Any, text: str) -> None:
        """Read the JSON text of one object."""
        found = []
        try:
            TypeAdapter(kind).validate_json(text, strict=True)
        except ValidationError as error:
            for problem in error.errors():
                where = ".".join(map(str, problem["loc"]))
                if (name, where) not in AS_SENT:
                    found.append(f"{name}: {where}: {problem['msg']}")
        self.differences.update(found)
        self.passed[name] += not found

    def report(self) -> str:
        """Return what passed, and the differences."""
        passed = [f"  {n:5d}  {name}" for name, n in self.passed.items()]
        wrong = [f"  {text} ({n} times)" for text, n in self.differences.items()]
        return "\n".join(["passed", *passed, "differences", *(wrong or ["  none"])])


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
SCHEMA_TOOLS = {
    "tools": [{"name": "add", "input_schema": SCHEMA}], "tool_choice": {"type": "any"},
}  # fmt: skip
CUSTOM = {"type": "custom", "name": "say", "description": "Says it."}
FUNCTION_TOOL = {"type": "function", **FUNCTION}
USAGE = {"stream_options": {"include_usage": True}}


REQUIRED = {"tools": TOOLS, "tool_choice": "required"}
# Of each interface: name, path, types of an answer and of an event, a body, and what else it has.
CASES: tuple[tuple[str, str, Any, Any, dict[str, Any], tuple[dict[str, Any], ...]], ...] = (
    (
        "ChatCompletion", "/v1/chat/completions", ours.chat.ChatCompletion,
        ours.chat.ChatCompletionChunk, {"messages": ASK, "max_tokens": 60, **USAGE},
        (
            {}, {"n": 2, "reasoning_effort": "none"}, {**LOGPROBS, "max_tokens": 3},
            {**REQUIRED, "parallel_tool_calls": False}, {**REQUIRED, "max_tokens": 12},
            {"response_format": FORMAT, "reasoning_effort": "none"},
        ),
    ),
    (
        "Completion", "/v1/completions", ours.Completion, ours.Completion,
        {"prompt": "def f(", "max_tokens": 5, **USAGE},
        ({}, {"n": 2, "echo": True}, {"logprobs": 2}),
    ),
    (
        "Response", "/v1/responses", ours.responses.Response, ours.responses.ResponseStreamEvent,
        {"model": "any", "input": "What is 1 + 1?", "max_output_tokens": 60},
        (
            {}, {"reasoning": {"effort": "none"}, **INCLUDE},
            {**REQUIRED, "tools": [FUNCTION_TOOL], "parallel_tool_calls": False},
            {**REQUIRED, "tools": [CUSTOM], "parallel_tool_calls": False},
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
            {"max_output_tokens": 1},
        ),
    ),
    (
        "Message", "/v1/messages", theirs.Message, theirs.RawMessageStreamEvent,
        {"model": "any", "messages": ASK, "max_tokens": 60},
        (
            {}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"stop_sequences": ["e"]},
            SCHEMA_TOOLS, {**SCHEMA_TOOLS, "max_tokens": 12},
        ),
    ),
)  # fmt: skip


def check_all(post: Post) -> Checker:
    """Ask for all kinds of answers and check them. post: (method, path, body) -> the text."""
    checker = Checker()

    def ask(name: str, kind: Any, path: str, body: Mapping[str, Any]) -> None:
        checker.check(name, kind, post("POST", path, body))

    for name, path, kind, event, common, forms in CASES:
        for more in forms:
            ask(name, kind, path, {**common, **more})
            lines = post("POST", path, {**common, **more, "stream": True}).splitlines()
            found = [line[6:] for line in lines if line.startswith("data: ")] or ["no events"]
            for text in found:
                if text != "[DONE]":
                    checker.check(f"{name} (chunk)", event, text)
    counted = {"model": "any", "input": "a"}
    ask("InputTokenCount", InputTokenCountResponse, "/v1/responses/input_tokens", counted)
    kept = json.loads(post("POST", "/v1/responses", {**counted, "max_output_tokens": 2}))["id"]
    response = post("GET", f"/v1/responses/{kept}", None)
    checker.check("Response (kept)", ours.responses.Response, response)
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
    """Check a server and print the table; return 1 if there is a difference."""
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]
    from _tools import Parser
    from helpers.server_process import serving

    p = Parser(description=__doc__)
    p.add_argument("url", nargs="?", help="of a server; default: one with the shipped model")
    url, key = p.parse_args().url, os.environ.get("MOEGRAPH_API_KEY", "-")
    with ExitStack() as stack:
        url = url or stack.enter_context(serving("-c", 4096, "-np", 2)).url
        client = httpx.Client(base_url=url, headers={"X-Api-Key": key}, timeout=600)
        post = stack.enter_context(client).request
        checker = check_all(lambda method, path, body: post(method, path, json=body).text)
    print(checker.report())
    return 1 if checker.differences else 0


if __name__ == "__main__":
    raise SystemExit(main())
