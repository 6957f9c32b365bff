"""An answer as Anthropic's message while it is made: its blocks, and what changes, as events."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from ...loop.requests import Step, Usage
from ...text.chat import CallArguments, CallBegin, CallEnd, Part, ReasoningPart
from ..errors import ApiError
from .errors import anthropic_body

Event = dict[str, Any]

# Clients send it back beside the reasoning; it proves nothing here, but must not be empty.
SIGNATURE = "moegraph"
# Kind of block -> the kind of its deltas, and the field of both that has the text.
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


@dataclass
class _Block:
    """A block that grows; head: its fields that do not change."""

    head: dict[str, Any]
    text: str = ""

    @property
    def kind(self) -> str:
        kind: str = self.head["type"]
        return kind

    def json(self) -> dict[str, Any]:
        """Return the block as it is now."""
        if self.kind == "tool_use":
            return {**self.head, "input": _arguments(self.text)}
        if self.kind == "thinking":
            return {**self.head, "thinking": self.text, "signature": SIGNATURE}
        return {**self.head, "text": self.text}

    def opening(self) -> dict[str, Any]:
        """Return the block as it is announced: nothing in it yet."""
        if self.kind == "tool_use":
            return {**self.head, "input": {}}
        if self.kind == "thinking":
            return {**self.head, "thinking": "", "signature": ""}
        return {**self.head, "text": ""}


class MessageWriter:
    """Makes one message: `start`, then `take` for each step's parts, then `finish`.

    Each returns the events that a stream shows; `message` is the object as it is.
    """

    def __init__(self, model: str, max_tokens: int, *, shows_thinking: bool = True) -> None:
        """max_tokens: of the request. shows_thinking: else blocks of reasoning stay empty."""
        self._head = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant"}
        self._head["model"] = model
        self._max_tokens = max_tokens
        self._shows_thinking = shows_thinking
        self._blocks: list[_Block] = []
        self._is_open = False
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._usage = usage_json(Usage(0))

    def message(self) -> dict[str, Any]:
        """Return the message as it is now."""
        blocks = [block.json() for block in self._blocks]
        return {**self._head, "content": blocks, **self._stop, "usage": self._usage}

    def start(self, usage: Usage) -> list[Event]:
        """Return the events that come before the answer."""
        self._usage = usage_json(usage)
        return [{"type": "message_start", "message": self.message()}]

    def take(self, parts: Iterable[Part]) -> list[Event]:
        """Take the parts of a step."""
        return [event for part in parts for event in self._part(part)]

    def finish(self, last: Step) -> list[Event]:
        """End the message with the last step; its parts have been taken."""
        events = self._close()
        self._usage = usage_json(last.usage)
        self._stop = {"stop_reason": self._reason(last), "stop_sequence": last.stop}
        delta = {"type": "message_delta", "delta": self._stop, "usage": self._usage}
        return [*events, delta, {"type": "message_stop"}]

    def fail(self, error: ApiError) -> list[Event]:
        """Return the event of an error in the middle of a stream, which ends it."""
        return [anthropic_body(error)]

    def _reason(self, last: Step) -> str:
        if last.finish_reason == "length":
            # fewer tokens than it asked for: the context was full before
            full = last.usage.n_generated < self._max_tokens
            return "model_context_window_exceeded" if full else "max_tokens"
        if last.finish_reason == "deadline":
            return "max_tokens"
        if last.stop is not None:
            return "stop_sequence"
        has_calls = any(block.kind == "tool_use" for block in self._blocks)
        return "tool_use" if has_calls else "end_turn"

    def _part(self, part: Part) -> list[Event]:
        if isinstance(part, CallEnd):
            return self._close()
        if isinstance(part, CallBegin):
            return self._begin({"type": "tool_use", "id": part.id, "name": part.name})
        if isinstance(part, CallArguments):
            return self._grow(part.text)
        kind = "thinking" if isinstance(part, ReasoningPart) else "text"
        events = []
        if not self._is_open or self._blocks[-1].kind != kind:
            events = self._begin({"type": kind})
        if kind == "thinking" and not self._shows_thinking:
            return events
        return events + self._grow(part.text)

    def _begin(self, head: dict[str, Any]) -> list[Event]:
        events = self._close()
        block = _Block(head)
        self._blocks.append(block)
        self._is_open = True
        start = {"type": "content_block_start", "index": self._at, "content_block": block.opening()}
        return [*events, start]

    def _grow(self, text: str) -> list[Event]:
        block = self._blocks[-1]
        block.text += text
        kind, field = _DELTAS[block.kind]
        return [self._delta({"type": kind, field: text})]

    def _close(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        events = []
        if self._blocks[-1].kind == "thinking":
            events.append(self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        return [*events, {"type": "content_block_stop", "index": self._at}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._at, "delta": delta}

    @property
    def _at(self) -> int:
        return len(self._blocks) - 1


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return what a message has cost; as there, input_tokens leaves out what was cached."""
    return {
        "input_tokens": usage.n_prompt - usage.n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.n_cached,
        "output_tokens": usage.n_generated,
    }


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; of one that was cut short, none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
