"""/v1/messages."""

from __future__ import annotations

import asyncio
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
from ..choices import timings_object, with_biases
from ..contract import ChatModel
from ..errors import told
from ..reply import reply
from ..requestlog import note_usage, request_id
from ..schemas.anthropic import CountBody, MessagesBody
from ..sse import EventStream, comment, event
from ..state import ServerState, state_of
from ..statistics import Statistics
from ..talk import Talk, unless_left
from .errors import anthropic_body
from .request import read_request, shows_thinking
from .writer import Event, MessageWriter


@dataclass(frozen=True)
class _Run:
    """One message in the making."""

    http: HttpRequest
    writer: MessageWriter
    talk: Talk
    statistics: Statistics

    @property
    def headers(self) -> dict[str, str]:
        """Return the header in which Anthropic's clients look for the request's id."""
        return {"request-id": request_id(self.http)}


async def create(request: HttpRequest) -> Response:
    """Make a message, at once or as it is written."""
    body = await read_schema(request, MessagesBody)
    run = await unless_left(request, _open(request, body, state_of(request)))
    if body.stream:
        return EventStream(_stream(run), close=run.talk.close, headers=run.headers)
    with run.talk:
        return reply(await unless_left(request, _whole(run)), headers=run.headers)


async def _open(request: HttpRequest, body: MessagesBody, state: ServerState) -> _Run:
    chat = replace(_chat(body, state), deadline_s=state.deadline_s, name=request_id(request))
    statistics = Statistics(state.backend)
    talk = await state.open_talk(lambda model: [_prepared(model, chat, body)])
    writer = MessageWriter(
        state.in_use().facts.name,
        body.max_tokens,
        shows_thinking=shows_thinking(body.thinking),
    )
    return _Run(request, writer, talk, statistics)


def _chat(body: CountBody, state: ServerState) -> ChatRequest:
    """Return what a body asks for; in this interface a model reasons only if it is asked to."""
    chat = read_request(body, state.sampling)
    variables = {"enable_thinking": False, **state.variables, **chat.variables}
    return replace(chat, variables=variables, ignore_eos=chat.ignore_eos or state.ignore_eos)


def _prepared(model: ChatModel, chat: ChatRequest, body: MessagesBody) -> Prepared:
    sampling = with_biases(chat.sampling, body.logit_bias, model)
    return model.prepare(replace(chat, sampling=sampling))


async def _whole(run: _Run) -> dict[str, Any]:
    with run.talk as talk:
        async for said in talk:
            run.writer.take(said.parts)
            if said.is_last:
                run.writer.finish(said.step)
                note_usage(run.http, said.step.usage, said.step.finish_reason)
    usage = run.talk.usage
    extra = {"timings": timings_object(usage), "moegraph": run.statistics.report(usage)}
    return {**run.writer.message(), **extra}


async def _stream(run: _Run) -> AsyncGenerator[bytes, None]:
    """Yield the events; the first waits for the first step, which knows what was cached."""
    has_begun = False
    with run.talk as talk:
        try:
            async for said in talk:
                usage = said.step.usage
                events = [] if has_begun else run.writer.start(usage)
                has_begun = True
                events += run.writer.take(said.parts)
                if said.is_last:
                    events += run.writer.finish(said.step)
                    note_usage(run.http, usage, said.step.finish_reason)
                for one in events:
                    yield _frame(one)
                if not said.step.tokens and not said.is_last:
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
    """Return how many tokens the prompt of a message would have."""
    body = await read_schema(request, CountBody)
    state = state_of(request)
    chat = _chat(body, state)
    async with state.model() as loaded:
        prepared = await state.work(partial(loaded.chat.prepare, chat))
    return reply({"input_tokens": len(prepared.request.prompt)})


TABLE = RouteTable(
    [
        Route("/v1/messages", create, methods=["POST"]),
        Route("/v1/messages/count_tokens", count, methods=["POST"]),
    ],
    error_body=anthropic_body,
    prefixes=("/v1/messages",),
)
