"""/v1/messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..app import Operation, RouteTable
from ..body import read_schema
from ..choices import prepared
from ..errors import ApiError
from ..exchange import Exchange, Opened, PromptProgress, begin
from ..reply import reply
from ..requestlog import note_usage, request_id
from ..schemas.anthropic import CountBody, MessagesBody
from ..sse import named
from ..state import state_of
from ..talk import Said
from .errors import ANTHROPIC_ERROR, anthropic_body
from .request import read_request, shows_thinking
from .writer import Event, MessageWriter


@dataclass(frozen=True)
class _Run(Exchange):
    """One message in the making."""

    writer: MessageWriter

    async def whole(self) -> dict[str, Any]:
        """Return the message."""
        async for said in self.talk:
            self.writer.take(said.parts)
            if said.is_last:
                self._finish(said)
        return {**self.writer.message(), **self.report()}

    def _finish(self, said: Said) -> list[Event]:
        note_usage(self.http, said.step.usage, said.step.finish_reason)
        return self.writer.finish(said.step)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the events; the first waits for the first step, which knows what was cached."""
        has_begun, progress = False, PromptProgress()
        async for said in self.talk:
            events = [] if has_begun else self.writer.start(said.step.usage)
            has_begun = True
            events += self.writer.take(said.parts)
            if said.is_last:
                events += self._finish(said)
            for one in events:
                yield named(one)
            for frame in progress.frames(said):
                yield frame

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """Return the event of an error."""
        return map(named, self.writer.fail(error))


async def create(request: HttpRequest) -> Response:
    """Make a message, at once or as it is written."""
    body = await read_schema(request, MessagesBody)
    state, name = state_of(request), request_id(request)
    chat = read_request(body, state, name)

    def made(opened: Opened) -> _Run:
        thinking = shows_thinking(body.thinking)
        name = opened.loaded.facts.name
        return _Run(opened, MessageWriter(name, body.max_tokens, shows_thinking=thinking))

    run = await begin(request, lambda model: [prepared(model, chat, body.logit_bias)], made)
    # the header in which Anthropic's clients look for the request's id
    return await run.respond(body.stream, headers={"request-id": name})


async def count(request: HttpRequest) -> Response:
    """Return how many tokens the prompt of a message would have."""
    body = await read_schema(request, CountBody)
    state = state_of(request)
    return reply({"input_tokens": await state.count(read_request(body, state))})


TABLE = RouteTable(
    [
        Operation("/v1/messages", create, MessagesBody, streams=True),
        Operation("/v1/messages/count_tokens", count, CountBody),
    ],
    error_body=anthropic_body,
    error_schema=ANTHROPIC_ERROR,
    prefixes=("/v1/messages",),
)
