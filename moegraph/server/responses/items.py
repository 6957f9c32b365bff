"""Items of a conversation in the Responses interface, as messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..schemas.parts import Texts, kind_of, read, refuse, text_parts
from ..schemas.responses import (
    CallOutput,
    CustomCall,
    FunctionCall,
    Message,
    ReasoningItem,
    RefusalPart,
    TextPart,
)
from .tools import INPUT, function_name

Item = Mapping[str, Any]

# An answer reasons, speaks, then calls.
_REASONS, _SPEAKS, _CALLS = range(3)
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_MEDIA = ("input_image", "input_file", "input_audio", "computer_screenshot", "image_url")


class Conversation:
    """Messages of a chat, from items: what one answer consists of becomes one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._answer: dict[str, Any] | None = None
        self._stage = _REASONS

    def add(self, item: Item, where: str) -> None:
        """Take the next item.

        Raises:
            ApiError: it is malformed, or of a type that this server cannot read.
        """
        kind = kind_of(item) or ("message" if "role" in item else "")
        take = self._takers().get(kind)
        if take is None:
            text = "images, files and audio" if kind in _MEDIA else f"items of type {kind!r:.80}"
            refuse(f"{where}.type", f"{text} are not supported")
        take(item, where)

    def _takers(self) -> dict[str, Callable[[Item, str], None]]:
        return {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._function_call,
            "custom_tool_call": self._custom_call,
            "function_call_output": self._output,
            "custom_tool_call_output": self._output,
        }

    def _message(self, item: Item, where: str) -> None:
        message = read(Message, item, where)
        content = contents(message.content, f"{where}.content")
        if message.role != "assistant":
            self._answer = None
            self.messages.append({"role": message.role, "content": content})
            return
        self._assistant(_SPEAKS)["content"] += _plain(content)

    def _reasoning(self, item: Item, where: str) -> None:
        reasoning = read(ReasoningItem, item, where)
        parts = reasoning.content or reasoning.summary or []
        if text := _plain(contents(parts, f"{where}.content")):
            answer = self._assistant(_REASONS)
            answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def _function_call(self, item: Item, where: str) -> None:
        call = read(FunctionCall, item, where)
        self._call(call.call_id, function_name(call.name, call.namespace), call.arguments)

    def _custom_call(self, item: Item, where: str) -> None:
        call = read(CustomCall, item, where)
        arguments = json.dumps({INPUT: call.input}, ensure_ascii=False)
        self._call(call.call_id, function_name(call.name, call.namespace), arguments)

    def _call(self, call_id: str, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        calls = self._assistant(_CALLS).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _output(self, item: Item, where: str) -> None:
        output = read(CallOutput, item, where)
        content = contents(output.output, f"{where}.output")
        self._answer = None
        self.messages.append({"role": "tool", "tool_call_id": output.call_id, "content": content})

    def _assistant(self, stage: int) -> dict[str, Any]:
        """Return the message of the answer; a new one if the last has gone on past this stage."""
        if self._answer is None or stage < self._stage:
            self._answer = {"role": "assistant", "content": ""}
            self.messages.append(self._answer)
        self._stage = stage
        return self._answer


def contents(content: str | Sequence[Any], where: str) -> Texts:
    """Return a content as a message of a chat has it: a text, or parts, which the template joins.

    Raises:
        ApiError: a part is malformed, or no text.
    """
    if isinstance(content, str):
        return content
    found = []
    for at, part in enumerate(content):
        kind = kind_of(part)
        if kind in _TEXTS:
            found.append(read(TextPart, part, f"{where}[{at}]").text)
        elif kind == "refusal":
            found.append(read(RefusalPart, part, f"{where}[{at}]").refusal)
        elif kind in _MEDIA:
            refuse(f"{where}[{at}]", f"{kind}: this server reads text only")
        else:
            refuse(f"{where}[{at}].type", f"content of type {kind!r:.80} is not supported")
    return text_parts(found)


def _plain(content: Texts) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
