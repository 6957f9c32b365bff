"""Conversations: messages, and the chat template that turns them into a prompt."""

from __future__ import annotations

from .answer import AnswerParser, ReasoningSplitter
from .messages import History, Message
from .parts import (
    CallArguments,
    CallBegin,
    CallEnd,
    ContentPart,
    Part,
    ReasoningPart,
    Reply,
    ToolCall,
)
from .template import ChatTemplate, require_template

__all__ = [
    "AnswerParser",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "ChatTemplate",
    "ContentPart",
    "History",
    "Message",
    "Part",
    "ReasoningPart",
    "ReasoningSplitter",
    "Reply",
    "ToolCall",
    "require_template",
]
