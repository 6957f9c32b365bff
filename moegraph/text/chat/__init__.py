"""Conversations: messages, and the chat template that turns them into a prompt."""

from __future__ import annotations

from .history import History, Message
from .marks import parting_places, token_marks
from .reasoning import ReasoningSplitter
from .template import ChatTemplate, require_template

__all__ = [
    "ChatTemplate",
    "History",
    "Message",
    "ReasoningSplitter",
    "parting_places",
    "require_template",
    "token_marks",
]
