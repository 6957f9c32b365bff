"""/v1/responses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from ...engine.chat import ChatRequest, Prepared
from ..app import RouteTable
from ..body import read_schema
from ..choices import chat_logprobs, timings_object, with_biases
from ..contract import ChatModel
from ..errors import told
from ..reply import reply
from ..requestlog import note_usage, request_id
from ..schemas.responses import ResponsesBody
from ..sse import EventStream, comment, event
from ..state import ServerState, state_of
from ..statistics import Statistics
from ..talk import Said, Talk, unless_left
from .fields import response_fields
from .output import Event, new_id
from .request import ReadRequest, read_request
from .writer import ResponseWriter


@dataclass(frozen=True)
class _Run:
    """One response in the making."""

    http: HttpRequest
    read: ReadRequest
    writer: ResponseWriter
    talk: Talk
    model: ChatModel
    statistics: Statistics
    keeps: bool

    def take(self, said: Said) -> list[Event]:
        """Return the events of a step; the last one stores the response."""
        logprobs = chat_logprobs(said.step.logprobs, self.model.piece)["content"]
        events = self.writer.take(said.parts, logprobs, len(said.step.tokens))
        if said.is_last:
            events += self.writer.finish(said.step, int(time.time()))
            note_usage(self.http, said.step.usage, said.step.finish_reason)
            self.store()
        return events

    def store(self) -> None:
        """Keep the response for later requests, unless the client does not want that."""
        if self.keeps:
            state_of(self.http).responses.put(self.writer.response(), self.read.items)

    def response(self) -> dict[str, Any]:
        """Return the response, and what the engine did for it."""
        usage = self.talk.usage
        extra = {"timings": timings_object(usage), "moegraph": self.statistics.report(usage)}
        return {**self.writer.response(), **extra}


async def create(request: HttpRequest) -> Response:
    """Make a response, at once or as it is written."""
    body = await read_schema(request, ResponsesBody)
    run = await unless_left(request, _open(request, body, state_of(request)))
    if body.stream:
        return EventStream(_stream(run), close=run.talk.close)
    with run.talk:
        return reply(await unless_left(request, _whole(run)))


async def _open(request: HttpRequest, body: ResponsesBody, state: ServerState) -> _Run:
    read = read_request(body, state.responses, state.sampling)
    chat = replace(
        read.chat,
        max_tokens=read.chat.max_tokens or state.max_tokens,
        ignore_eos=read.chat.ignore_eos or state.ignore_eos,
        variables={**state.variables, **read.chat.variables},
        deadline_s=state.deadline_s,
        name=request_id(request),
    )
    statistics = Statistics(state.backend)
    talk = await state.open_talk(lambda model: [_prepared(model, chat, body)])
    loaded = state.in_use()
    fields = response_fields(body, chat.sampling, loaded.facts.name, int(time.time()))
    writer = ResponseWriter(fields, read.tools, new_id("resp"))
    keeps = body.store is not False
    return _Run(request, read, writer, talk, loaded.chat, statistics, keeps)


def _prepared(model: ChatModel, chat: ChatRequest, body: ResponsesBody) -> Prepared:
    sampling = with_biases(chat.sampling, body.logit_bias, model)
    return model.prepare(replace(chat, sampling=sampling))


async def _whole(run: _Run) -> dict[str, Any]:
    with run.talk as talk:
        async for said in talk:
            run.take(said)
    return run.response()


async def _stream(run: _Run) -> AsyncGenerator[bytes, None]:
    with run.talk as talk:
        try:
            for one in run.writer.start():
                yield _frame(one)
            async for said in talk:
                for one in run.take(said):
                    yield _frame(one)
                if not said.step.tokens and not said.is_last:
                    usage = said.step.usage
                    yield comment(f"read {usage.n_read} of {usage.n_prompt} tokens of the prompt")
        except Exception as failure:  # noqa: BLE001 - whatever fails, the client is told
            note_usage(run.http, talk.usage, "error")
            for one in run.writer.fail(told(failure, run.http.url.path)):
                yield _frame(one)
        except (GeneratorExit, asyncio.CancelledError):
            note_usage(run.http, talk.usage, "left")
            raise


def _frame(one: Event) -> bytes:
    return event(one["type"], one)


async def count(request: HttpRequest) -> Response:
    """Return how many tokens the prompt of a response would have."""
    body = await read_schema(request, ResponsesBody)
    state = state_of(request)
    read = read_request(body, state.responses, state.sampling)
    chat = replace(read.chat, variables={**state.variables, **read.chat.variables})
    async with state.model() as loaded:
        prepared = await state.work(partial(loaded.chat.prepare, chat))
    n_tokens = len(prepared.request.prompt)
    return reply({"object": "response.input_tokens", "input_tokens": n_tokens})


async def retrieve(request: HttpRequest) -> Response:
    """Return a response that is stored."""
    return reply(state_of(request).responses.response(request.path_params["id"]))


async def delete(request: HttpRequest) -> Response:
    """Forget a response."""
    response_id = request.path_params["id"]
    state_of(request).responses.delete(response_id)
    return reply({"id": response_id, "object": "response", "deleted": True})


TABLE = RouteTable(
    [
        Route("/v1/responses", create, methods=["POST"]),
        Route("/v1/responses/input_tokens", count, methods=["POST"]),
        Route("/v1/responses/{id}", retrieve, methods=["GET"]),
        Route("/v1/responses/{id}", delete, methods=["DELETE"]),
    ]
)
