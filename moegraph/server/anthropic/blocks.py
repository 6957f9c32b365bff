"""Blocks of Anthropic's messages, as messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..schemas.anthropic import (
    Document,
    MessageParam,
    SearchResult,
    TextBlock,
    ThinkingBlock,
    ToolResult,
    ToolUse,
)
from ..schemas.parts import kind_of, read, refuse, text_parts

Block = Mapping[str, Any]
Message = dict[str, Any]

# Reasoning that only Anthropic can read.
_OPAQUE = ("redacted_thinking",)


def system_text(system: str | Sequence[Block] | None) -> str:
    """Return the instructions of a request.

    Raises:
        ApiError: a block is malformed, or no text.
    """
    if isinstance(system, str):
        return system
    return _joined([_text(block, f"system[{at}]") for at, block in enumerate(system or ())])


def read_message(value: Block, where: str) -> list[Message]:
    """Return the messages that one message stands for: each result of a tool is one of its own.

    Raises:
        ApiError: it is malformed, or has a block that this server cannot read.
    """
    message = read(MessageParam, value, where)
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    blocks = [(block, f"{where}.content[{at}]") for at, block in enumerate(message.content)]
    if message.role == "assistant":
        return [_answer(blocks)]
    return _question(message.role, blocks)


def _answer(blocks: Sequence[tuple[Block, str]]) -> Message:
    """Return an earlier answer as one message."""
    found: Message = {"role": "assistant", "content": ""}
    for block, where in blocks:
        kind = kind_of(block)
        if kind == "text":
            found["content"] += read(TextBlock, block, where).text
        elif kind == "thinking":
            thinking = read(ThinkingBlock, block, where).thinking
            found["reasoning_content"] = found.get("reasoning_content", "") + thinking
        elif kind == "tool_use":
            found.setdefault("tool_calls", []).append(_call(read(ToolUse, block, where)))
        elif kind not in _OPAQUE:
            _refuse_block(kind, where)
    return found


def _call(use: ToolUse) -> dict[str, Any]:
    arguments = json.dumps(use.input, ensure_ascii=False)
    function = {"name": use.name, "arguments": arguments}
    return {"id": use.id, "type": "function", "function": function}


def _question(role: str, blocks: Sequence[tuple[Block, str]]) -> list[Message]:
    """Return results of tools and texts in their order; neighbouring texts are one message.

    The template joins its parts.
    """
    found: list[Message] = []
    texts: list[str] = []

    def close() -> None:
        if texts:
            found.append({"role": role, "content": text_parts(texts)})
            texts.clear()

    for block, where in blocks:
        if kind_of(block) == "tool_result":
            close()
            found.append(_result(read(ToolResult, block, where), where))
        else:
            texts.append(_part(block, where))
    close()
    return found


def _result(result: ToolResult, where: str) -> Message:
    content = result.content
    if isinstance(content, str):
        parts = [content]
    else:
        parts = [_part(part, f"{where}.content[{at}]") for at, part in enumerate(content)]
    if result.is_error:
        parts[:1] = [f"Error: {''.join(parts[:1])}"]
    return {"role": "tool", "tool_call_id": result.tool_use_id, "content": text_parts(parts)}


def _part(block: Block, where: str) -> str:
    """Return the text of a block; what is no plain text ends its line."""
    return _text(block, where) + ("" if kind_of(block) == "text" else "\n")


def _text(block: Block, where: str) -> str:
    """Return the text of a block that a user, a tool or a system prompt may have."""
    kind = kind_of(block)
    if kind == "text":
        return read(TextBlock, block, where).text
    if kind == "search_result":
        result = read(SearchResult, block, where)
        parts = [_text(part, f"{where}.content[{at}]") for at, part in enumerate(result.content)]
        return _joined([f"{result.title} ({result.source})", *parts])
    if kind == "document":
        document = read(Document, block, where)
        if document.source.type != "text":
            refuse(f"{where}.source.type", "this server reads only documents of plain text")
        head = [line for line in (document.title, document.context) if line]
        return _joined([*head, document.source.data])
    _refuse_block(kind, where)
    return ""


def _refuse_block(kind: object, where: str) -> None:
    if kind == "image":
        refuse(where, "this server does not read images")
    refuse(f"{where}.type", f"blocks of type {kind!r:.80} are not supported here")


def _joined(texts: Sequence[str]) -> str:
    """Return texts as one, each from a line of its own."""
    found = ""
    for text in texts:
        found += ("\n" if found and not found.endswith("\n") else "") + text
    return found
