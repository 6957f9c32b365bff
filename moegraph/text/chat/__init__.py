"""Conversations: messages, and the chat template that turns them into a prompt."""

from __future__ import annotations

from .answer import AnswerParser
from .history import History, Message
from .marks import parting_places, token_marks
from .parts import CallArguments, CallBegin, CallEnd, ContentPart, Part, ReasoningPart, Reply
from .reasoning import ReasoningSplitter
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
    "parting_places",
    "require_template",
    "token_marks",
]
