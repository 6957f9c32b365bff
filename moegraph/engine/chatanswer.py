"""The answer to a conversation, as it comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ..events import GenerationEvent
from ..text.chat.answer import AnswerParser
from ..text.chat.parts import Part, Reply
from .generation import Events


class ChatAnswer(Iterator[Part]):
    """Yields the parts of an answer: reasoning, text and calls of tools.

    reply: all parts so far; `reply.message()` is the message to append to the conversation. event:
    the last event of the generation, with its counts and times. finish_reason: None until the end;
    then "stop", "tool_calls", "length" or "cancelled".
    """

    def __init__(self, events: Events, parser: AnswerParser) -> None:
        self.reply = Reply()
        self.event: GenerationEvent | None = None
        self.finish_reason: str | None = None
        self._events, self._parser = events, parser
        self._parts: deque[Part] = deque()

    def __next__(self) -> Part:
        while not self._parts and self.finish_reason is None:
            self._take(next(self._events, None))
        if not self._parts:
            raise StopIteration
        return self._parts.popleft()

    def _take(self, event: GenerationEvent | None) -> None:
        found: list[Part] = []
        reason: str | None = "cancelled"  # the generation was closed
        if event is not None:
            self.event, reason = event, event.finish_reason
            tokens = [] if event.token is None else [event.token]
            found = self._parser.push(event.text, tokens)
        if self._parser.is_done:
            self._events.close()
            reason = "stop"
        elif reason:
            next(self._events, None)  # it ends, and the sequence keeps what it holds
        if reason:
            found += self._parser.flush(is_cut=reason != "stop")
            is_call = reason == "stop" and self._parser.n_calls
            self.finish_reason = "tool_calls" if is_call else reason
        self._parts.extend(found)
        self.reply.add(found)

    def whole(self) -> Reply:
        """Wait for the end of the answer and return all of it."""
        for _ in self:
            pass
        return self.reply

    def close(self) -> None:
        """End the answer and release the engine; a second call does nothing.

        Raises:
            RequestError: the answer is being generated and the engine belongs to another thread.
        """
        self._events.close()
