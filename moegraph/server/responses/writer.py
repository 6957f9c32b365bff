"""A response while it is made: parts of an answer become items, and what changes, events."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...loop.requests import Step, Usage
from ...text.chat import CallArguments, CallBegin, CallEnd, ContentPart, Part, ReasoningPart
from ..errors import ApiError
from .output import (
    CustomCall,
    Event,
    FunctionCall,
    Logprobs,
    Message,
    OutputItem,
    Reasoning,
    new_id,
)
from .tools import Tools

# Status of an error -> its code in a response object; others are the server's.
_FAILURES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponseWriter:
    """Makes one response: `start`, then `take` for each step's parts, then `finish`.

    Each returns the events that a stream shows; `response` is the object as it is.
    """

    def __init__(self, fields: Mapping[str, Any], tools: Tools, response_id: str) -> None:
        """fields: of the response object that do not change: model, created_at, tools, ..."""
        self._fields = dict(fields)
        self._tools = tools
        self._id = response_id
        self._numbers = itertools.count()
        self._items: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._held: list[dict[str, Any]] = []
        self._ended: dict[str, Any] = {"status": "in_progress"}

    def response(self) -> dict[str, Any]:
        """Return the response object as it is now."""
        empty = {"error": None, "incomplete_details": None, "completed_at": None, "usage": None}
        made = {"id": self._id, "object": "response", **self._fields, **empty, **self._ended}
        return {**made, "output": self.output()}

    def output(self) -> list[dict[str, Any]]:
        """Return the items."""
        return [item.json() for item in self._items]

    def start(self) -> list[Event]:
        """Return the events that come before the answer."""
        return self._numbered(
            {"type": f"response.{name}", "response": self.response()}
            for name in ("created", "in_progress")
        )

    def progress(self, found: Mapping[str, Any]) -> Event:
        """Return an event, in llama-server's form, that tells how far the prompt is read."""
        event = {"type": "response.in_progress", "response": self.response()}
        return self._numbered([{**event, "prompt_progress": found}])[0]

    def take(self, parts: Sequence[Part], logprobs: Logprobs = ()) -> list[Event]:
        """Take the parts of a step; logprobs: of its tokens, if the client wants them.

        Those of tokens whose text is held back are told with the text that comes of them.
        """
        events: list[Event] = []
        held = [*self._held, *logprobs]
        for part in parts:
            events += self._part(part, held)
            held = [] if isinstance(part, ContentPart) or not held else list(logprobs)
        self._held = [] if parts else held
        return self._numbered(events)

    def finish(self, last: Step, completed_at: int, n_reasoning: int = 0) -> list[Event]:
        """End the response with the last step; its parts have been taken.

        completed_at: seconds since the epoch. n_reasoning: tokens of reasoning.
        """
        self._ended["usage"] = usage_json(last.usage, n_reasoning)
        if last.finish_reason == "stop":
            self._ended["completed_at"] = completed_at
            return self._end("completed", "completed", [])
        self._ended["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._end("incomplete", "incomplete", [])

    def fail(self, error: ApiError) -> list[Event]:
        """End the response with an error; clients read it in the stream's last events."""
        message = {"code": error.code or error.kind, "message": error.message}
        # the names that clients know are few; what programs compare is in the event
        self._ended["error"] = {**message, "code": _FAILURES.get(error.status, "server_error")}
        return self._end("failed", "incomplete", [{"type": "error", **message, "param": None}])

    def _end(self, status: str, item_status: str, notices: list[Event]) -> list[Event]:
        events = self._close(item_status) + notices
        self._ended["status"] = status
        last = {"type": f"response.{status}", "response": self.response()}
        return self._numbered([*events, last])

    def _part(self, part: Part, logprobs: Logprobs) -> list[Event]:
        if isinstance(part, CallEnd):
            return self._close("completed" if part.is_whole else "incomplete")
        if isinstance(part, CallBegin):
            return self._begin(self._call(part))
        if isinstance(part, CallArguments):
            return self._open.grow(part.text) if self._open else []
        kind = Reasoning if isinstance(part, ReasoningPart) else Message
        events = []
        if not isinstance(self._open, kind):
            made = kind(len(self._items), new_id("rs" if kind is Reasoning else "msg"))
            events = self._begin(made)
        assert self._open is not None
        return events + self._open.grow(part.text, logprobs)

    def _call(self, begin: CallBegin) -> OutputItem:
        name = self._tools.name(begin.name)
        kind = CustomCall if name.kind == "custom" else FunctionCall
        return kind(len(self._items), begin, name)

    def _begin(self, item: OutputItem) -> list[Event]:
        events = self._close("completed")
        self._items.append(item)
        self._open = item
        return events + item.begin()

    def _close(self, status: str) -> list[Event]:
        item, self._open = self._open, None
        return item.end(status) if item else []

    def _numbered(self, events: Iterable[Event]) -> list[Event]:
        return [{**event, "sequence_number": next(self._numbers)} for event in events]


def usage_json(usage: Usage, n_reasoning: int) -> dict[str, Any]:
    """Return what a response has cost; nothing is written to a cache that is paid for."""
    return {
        "input_tokens": usage.n_prompt,
        "input_tokens_details": {"cached_tokens": usage.n_cached, "cache_write_tokens": 0},
        "output_tokens": usage.n_generated,
        "output_tokens_details": {"reasoning_tokens": n_reasoning},
        "total_tokens": usage.n_prompt + usage.n_generated,
    }
