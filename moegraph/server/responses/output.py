"""Items of a response while they are made: each tells what became of it as events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from ...text.chat import CallBegin
from .tools import INPUT, ToolName

# An event: its fields, but not yet its number.
Event = dict[str, Any]
Logprobs = Sequence[dict[str, Any]]


@dataclass
class OutputItem:
    """An item that grows: `begin`, then `grow` as text comes, then `end`.

    at: its place in the output. status: as OpenAI has it, in_progress until it has ended.
    """

    at: int
    id: str
    text: str = ""
    status: str = "in_progress"

    def json(self) -> dict[str, Any]:
        """Return the item as it is now."""
        raise NotImplementedError

    def begin(self) -> list[Event]:
        """Return the events of a new item."""
        return [self._event("response.output_item.added", own=False, item=self.json())]

    def grow(self, text: str, logprobs: Logprobs = ()) -> list[Event]:
        """Add text; return the events of that."""
        raise NotImplementedError

    def end(self, status: str) -> list[Event]:
        """Close the item; return the events of that."""
        events = self._last()
        self.status = status
        return [*events, self._event("response.output_item.done", own=False, item=self.json())]

    def _last(self) -> list[Event]:
        """Return the events that come before the one of the whole item."""
        raise NotImplementedError

    def _event(self, kind: str, *, own: bool = True, **fields: Any) -> Event:
        item = {"item_id": self.id} if own else {}
        return {"type": kind, "output_index": self.at, **item, **fields}


class Reasoning(OutputItem):
    """What the model thought; a summary is never made."""

    def json(self) -> dict[str, Any]:
        """Return the item as it is now."""
        content = [_reasoning_text(self.text)] if self.text else []
        made = {"id": self.id, "type": "reasoning", "summary": [], "content": content}
        return {**made, "encrypted_content": None, "status": self.status}

    def begin(self) -> list[Event]:
        """Return the events of a new item and its only content."""
        part = self._event("response.content_part.added", content_index=0, part=_reasoning_text(""))
        return [*super().begin(), part]

    def grow(self, text: str, logprobs: Logprobs = ()) -> list[Event]:
        """Add text; return the events of that."""
        self.text += text
        return [self._event("response.reasoning_text.delta", content_index=0, delta=text)]

    def _last(self) -> list[Event]:
        part = _reasoning_text(self.text)
        return [
            self._event("response.reasoning_text.done", content_index=0, text=self.text),
            self._event("response.content_part.done", content_index=0, part=part),
        ]


class Message(OutputItem):
    """What the model says."""

    logprobs: list[dict[str, Any]]

    def __init__(self, at: int, id: str) -> None:
        super().__init__(at, id)
        self.logprobs = []
        self._has_part = False

    def json(self) -> dict[str, Any]:
        """Return the item as it is now."""
        content = [self._part()] if self._has_part else []
        made = {"id": self.id, "type": "message", "role": "assistant"}
        return {**made, "status": self.status, "content": content}

    def begin(self) -> list[Event]:
        """Return the events of a new item and its only content."""
        events = super().begin()
        self._has_part = True
        part = self._event("response.content_part.added", content_index=0, part=self._part())
        return [*events, part]

    def grow(self, text: str, logprobs: Logprobs = ()) -> list[Event]:
        """Add text; return the events of that."""
        self.text += text
        self.logprobs += logprobs
        kind = "response.output_text.delta"
        return [self._event(kind, content_index=0, delta=text, logprobs=list(logprobs))]

    def _last(self) -> list[Event]:
        kind, logprobs = "response.output_text.done", self.logprobs
        return [
            self._event(kind, content_index=0, text=self.text, logprobs=logprobs),
            self._event("response.content_part.done", content_index=0, part=self._part()),
        ]

    def _part(self) -> dict[str, Any]:
        made = {"type": "output_text", "text": self.text, "annotations": []}
        return {**made, "logprobs": self.logprobs}


class FunctionCall(OutputItem):
    """A call of a function; its text is that of a JSON object."""

    def __init__(self, at: int, call: CallBegin, name: ToolName) -> None:
        super().__init__(at, new_id("fc"))
        self.call_id = call.id
        self.name = name

    def json(self) -> dict[str, Any]:
        """Return the item as it is now."""
        made = {"id": self.id, "type": "function_call", "call_id": self.call_id}
        made |= {"name": self.name.name, "arguments": self.text, "status": self.status}
        return {**made, "namespace": self.name.namespace} if self.name.namespace else made

    def grow(self, text: str, logprobs: Logprobs = ()) -> list[Event]:
        """Add text of the arguments; return the events of that."""
        self.text += text
        return [self._event("response.function_call_arguments.delta", delta=text)]

    def _last(self) -> list[Event]:
        kind, name = "response.function_call_arguments.done", self.name.name
        return [self._event(kind, name=name, arguments=self.text)]


class CustomCall(OutputItem):
    """A call of a tool whose input is plain text: known when the call has ended."""

    def __init__(self, at: int, call: CallBegin, name: ToolName) -> None:
        super().__init__(at, new_id("ctc"))
        self.call_id = call.id
        self.name = name
        self.input = ""

    def json(self) -> dict[str, Any]:
        """Return the item as it is now."""
        made = {"id": self.id, "type": "custom_tool_call", "call_id": self.call_id}
        made |= {"name": self.name.name, "input": self.input, "status": self.status}
        return {**made, "namespace": self.name.namespace} if self.name.namespace else made

    def grow(self, text: str, logprobs: Logprobs = ()) -> list[Event]:
        """Add text of the arguments that stand for the input."""
        self.text += text
        return []

    def _last(self) -> list[Event]:
        self.input = plain_input(self.text)
        kind = "response.custom_tool_call_input"
        return [
            self._event(f"{kind}.delta", delta=self.input),
            self._event(f"{kind}.done", input=self.input),
        ]


def plain_input(arguments: str) -> str:
    """Return the plain text in a function's arguments; what is no such object stays as it is."""
    try:
        found = json.loads(arguments)[INPUT]
    except (ValueError, KeyError, TypeError):
        return arguments
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def new_id(kind: str) -> str:
    """Return an id that nobody guesses: a store hands responses to whoever knows theirs."""
    return f"{kind}_{uuid4().hex}"


def _reasoning_text(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}
