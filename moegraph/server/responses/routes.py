"""/v1/responses."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..app import RouteTable, either, operations
from ..body import read_schema
from ..choices import chat_logprobs, prepared
from ..errors import ApiError
from ..exchange import Exchange, Opened, PromptProgress, begin
from ..guards import owner_of
from ..reply import reply
from ..requestlog import note_usage, request_id
from ..schemas.responses import ResponsesBody
from ..sse import named
from ..state import state_of
from ..talk import Said
from .fields import response_fields
from .output import Event, new_id
from .request import ReadRequest, read_request
from .store import ResponseStore
from .writer import ResponseWriter


@dataclass(frozen=True)
class _Run(Exchange):
    """One response in the making.

    keeps: it is kept for later requests. shows_progress: events tell how far its prompt is read.
    times_steps: the last event of each step has timings.
    """

    read: ReadRequest
    writer: ResponseWriter
    keeps: bool
    shows_progress: bool
    times_steps: bool

    def _take(self, said: Said) -> list[Event]:
        """Return the events of a step; the last one stores the response."""
        piece = self.opened.loaded.chat.piece
        logprobs = chat_logprobs(said.step.logprobs, piece)["content"]
        events = self.writer.take(said.parts, logprobs)
        if said.is_last:
            events += self.writer.finish(said.step, int(time.time()), self.talk.n_reasoning)
            note_usage(self.http, said.step.usage, said.step.finish_reason)
            if self.keeps:
                stores = state_of(self.http).responses
                stores.put(owner_of(self.http), self.writer.response(), self.read.items)
        return events

    async def whole(self) -> dict[str, Any]:
        """Return the response, and what the engine did for it."""
        async for said in self.talk:
            self._take(said)
        return {**self.writer.response(), **self.costs()}

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the events."""
        for one in self.writer.start():
            yield named(one)
        progress = PromptProgress(self._progress if self.shows_progress else None)
        async for said in self.talk:
            for frame in progress.frames(said):
                yield frame
            events = self._take(said)
            if events and (said.is_last or self.times_steps):
                events[-1] = {**events[-1], "timings": self.timings()}
            for one in events:
                yield named(one)

    def _progress(self, _: int, found: dict[str, Any]) -> bytes:
        return named(self.writer.progress(found))

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """Return the events of an error."""
        return map(named, self.writer.fail(error))


def _own(request: HttpRequest) -> ResponseStore:
    """Return the responses that the client of a request may use."""
    return state_of(request).responses.of(owner_of(request))


async def create(request: HttpRequest) -> Response:
    """Make a response, at once or as it is written."""
    body = await read_schema(request, ResponsesBody)
    state = state_of(request)
    read = read_request(body, _own(request), state, request_id(request))
    chat = read.chat

    def made(opened: Opened) -> _Run:
        name = opened.loaded.facts.name
        fields = response_fields(body, chat.sampling, name, int(time.time()))
        writer = ResponseWriter(fields, read.tools, new_id("resp"))
        return _Run(
            opened, read, writer, body.store is not False, bool(body.return_progress),
            bool(body.timings_per_token),
        )  # fmt: skip

    run = await begin(request, lambda model: [prepared(model, chat, body.logit_bias)], made)
    return await run.respond(body.stream)


async def count(request: HttpRequest) -> Response:
    """Return how many tokens the prompt of a response would have."""
    body = await read_schema(request, ResponsesBody)
    state = state_of(request)
    n_tokens = await state.count(read_request(body, _own(request), state).chat)
    return reply({"object": "response.input_tokens", "input_tokens": n_tokens})


async def retrieve(request: HttpRequest) -> Response:
    """Return a response that is stored."""
    return reply(_own(request).response(request.path_params["id"]))


async def delete(request: HttpRequest) -> Response:
    """Forget a response."""
    response_id = request.path_params["id"]
    _own(request).delete(response_id)
    return reply({"id": response_id, "object": "response", "deleted": True})


TABLE = RouteTable(
    [
        *operations(either("/v1/responses"), create, ResponsesBody, streams=True),
        *operations(either("/v1/responses/input_tokens"), count, ResponsesBody),
        *operations(either("/v1/responses/{id}"), retrieve),
        *operations(either("/v1/responses/{id}"), delete, method="DELETE"),
    ]
)
