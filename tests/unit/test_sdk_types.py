"""Answers of the server have the types of the official packages."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers.server_case import Case
from openai.types.chat import ChatCompletion

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import check_sdk_types

CALL = "<tool_call>\n<function=FUNCTION>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
SCRIPT = ["<think>hm</think>", "Hello", CALL]


def answers(path: str, body: Mapping[str, Any] | None) -> Case:
    """Return a server whose model calls the first tool of a request."""
    first = ((body or {}).get("tools") or [{}])[0]
    name = first.get("function", first).get("name", "none")
    return Case([piece.replace("FUNCTION", name) for piece in SCRIPT], n_read_steps=2)


def test_every_answer_has_the_types_of_the_official_packages() -> None:
    kept = Case()

    def post(method: str, path: str, body: Mapping[str, Any] | None) -> str:
        case = kept if path.startswith("/v1/responses") else answers(path, body)
        if body and body.get("tools"):
            case = answers(path, body)
        text: str = case.client.request(method, path, json=body).text
        return text

    checker = check_sdk_types.check_all(post)
    assert not checker.differences, checker.report()
    assert all(checker.passed.values()) and len(checker.passed) == 15


def test_a_difference_is_found() -> None:
    answer = Case().chat()
    for change in ({"object": "chat"}, {"created": "now"}, {"choices": None}):
        checker = check_sdk_types.Checker()
        checker.check("ChatCompletion", ChatCompletion, json.dumps({**answer, **change}))
        (line,) = checker.differences
        assert not checker.passed["ChatCompletion"]
        assert line.startswith(f"ChatCompletion: {next(iter(change))}: ")
