"""The parts of an answer: reasoning, text, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ReasoningPart:
    """Text that the model wrote before its answer."""

    text: str


@dataclass(frozen=True)
class ContentPart:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """The beginning of a tool call; index: 0 for the first of an answer. id: made up by us."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The end of a call; is_whole: False if its text is no JSON object, such as a cut one."""

    index: int
    is_whole: bool = True


def call_of(call_id: str, name: str, arguments: object) -> dict[str, Any]:
    """Return a call in OpenAI's form."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


Part = ReasoningPart | ContentPart | CallBegin | CallArguments | CallEnd


@dataclass
class ToolCall:
    """A call of a tool; arguments: JSON text."""

    id: str
    name: str
    arguments: str = ""
    is_whole: bool = False


@dataclass
class Reply:
    """A whole answer, put together from its parts."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
        """Take the next parts."""
        for part in parts:
            if isinstance(part, ReasoningPart):
                self.reasoning += part.text
            elif isinstance(part, ContentPart):
                self.content += part.text
            elif isinstance(part, CallBegin):
                self.calls.append(ToolCall(part.id, part.name))
            elif isinstance(part, CallArguments):
                self.calls[part.index].arguments += part.text
            else:
                self.calls[part.index].is_whole = part.is_whole

    def message(self) -> dict[str, Any]:
        """Return the answer as an assistant message in OpenAI's form, to append to the messages."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.calls:
            found["content"] = self.content or None
            found["tool_calls"] = [call_of(one.id, one.name, one.arguments) for one in self.calls]
        return found
