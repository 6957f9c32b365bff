"""Requests of all interfaces with one value replaced by another: for servers under load."""

from __future__ import annotations

import copy
import random
from typing import Any

_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
_ASK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "q"}]},
]
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA, "strict": True}}]
# Path and body of requests that are answered.
VALID: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {
        "prompt": ["x", [65, 66]], "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "seed": 1,
        "stop": ["END"], "logit_bias": {"65": 1}, "logprobs": 1, "stream": False, "echo": False,
        "grammar": 'root ::= "a" [b-c]*', "frequency_penalty": 0.5,
    }),
    ("/v1/chat/completions", {
        "messages": [*_ASK, {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                     {"role": "tool", "tool_call_id": "c", "content": "1"}],
        "max_tokens": 4, "n": 1, "tools": _TOOLS, "tool_choice": "auto", "top_k": 3,
        "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low",
    }),
    ("/v1/chat/completions", {
        "messages": _ASK, "max_tokens": 4, "min_p": 0.1, "stream": True, "response_format": {
            "type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
    }),
    ("/v1/messages", {
        "messages": [*_ASK[1:], {"role": "assistant", "content": [
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": "r"}]}],
        "max_tokens": 4, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["END"],
        "tools": [{"name": "f", "input_schema": _SCHEMA}], "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"},
    }),
    ("/v1/responses", {
        "input": [{"role": "user", "content": "q"},
                  {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                  {"type": "function_call_output", "call_id": "c", "output": "1"}],
        "max_output_tokens": 4, "store": True, "instructions": "i", "top_p": 0.9,
        "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA, "strict": False}],
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"},
    }),
)  # fmt: skip
# What takes the place of a value.
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 10**6, 1 << 31, 1 << 63, 10**30, -0.0, 0.5, 1e300, "", "x",
    "auto", "\x00", "\ud800", "a" * 5000, "{}", "[", "<|im_end|>", [], [[]], ["x"], [0], [None], {},
    {"type": "text"}, {"type": "object"}, {"": 1}, {"$ref": "#"},
)  # fmt: skip
# Without their limits, answers would be long.
_KEPT = ("max_tokens", "max_output_tokens")


def mutated(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request, one value of which is another, or is missing."""
    path, body = copy.deepcopy(rng.choice(VALID))
    holder, key = rng.choice([one for one in _places(body) if one[1] not in _KEPT])
    if rng.random() < 0.1:
        del holder[key]
    else:
        holder[key] = copy.deepcopy(rng.choice(_VALUES))
    return path, body


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return all members of an object or list: what holds them, and their key."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    found: list[tuple[Any, Any]] = []
    for key in keys:
        found.append((value, key))
        if isinstance(value[key], dict | list):
            found += _places(value[key])
    return found
