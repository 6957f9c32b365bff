"""The answer to a conversation, as it comes."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator

from ..events import GenerationEvent
from ..text.chat.answer import AnswerParser
from ..text.chat.parts import Part, Reply
from .generation import Events


class _Parts:
    """Takes the events of an answer, and has its parts; fields as in `ChatAnswer`."""

    def __init__(self, parser: AnswerParser) -> None:
        self.reply = Reply()
        self.event: GenerationEvent | None = None
        self.finish_reason: str | None = None
        self._parser = parser
        self._parts: deque[Part] = deque()

    def _push(self, event: GenerationEvent | None) -> str | None:
        """Take an event, or None where the generation was closed; return why the answer ends."""
        found: list[Part] = []
        reason: str | None = "cancelled"
        if event is not None:
            self.event, reason = event, event.finish_reason
            tokens = [] if event.token is None else [event.token]
            found = self._parser.push(event.text, tokens)
        if self._parser.is_done:
            reason = "stop"
        if reason:
            found += self._parser.flush(is_cut=reason != "stop")
            is_call = reason == "stop" and self._parser.n_calls
            self.finish_reason = "tool_calls" if is_call else reason
        self._parts.extend(found)
        self.reply.add(found)
        return reason


class ChatAnswer(_Parts, Iterator[Part]):
    """Yields the parts of an answer: reasoning, text and calls of tools.

    reply: all parts so far; `reply.message()` is the message to append to the conversation. event:
    the last event of the generation, with its counts and times. finish_reason: None until the end;
    then "stop", "tool_calls", "length", "cancelled" or "deadline".
    """

    def __init__(self, events: Events, parser: AnswerParser) -> None:
        super().__init__(parser)
        self._events = events

    def __next__(self) -> Part:
        while not self._parts and self.finish_reason is None:
            if self._push(next(self._events, None)):
                if self._parser.is_done:
                    self._events.close()
                else:
                    next(self._events, None)  # it ends, and the sequence keeps what it holds
        if not self._parts:
            raise StopIteration
        return self._parts.popleft()

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


class AsyncChatAnswer(_Parts, AsyncIterator[Part]):
    """Yields the parts of an answer for asyncio; fields as in `ChatAnswer`."""

    def __init__(self, events: AsyncGenerator[GenerationEvent, None], parser: AnswerParser) -> None:
        super().__init__(parser)
        self._events = events

    async def __anext__(self) -> Part:
        while not self._parts and self.finish_reason is None:
            if self._push(await anext(self._events, None)):
                await self._events.aclose()
        if not self._parts:
            raise StopAsyncIteration
        return self._parts.popleft()

    async def whole(self) -> Reply:
        """Wait for the end of the answer and return all of it."""
        async for _ in self:
            pass
        return self.reply

    async def aclose(self) -> None:
        """End the answer; a second call does nothing."""
        await self._events.aclose()
