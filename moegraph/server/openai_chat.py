"""/v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from ..engine.chat import Prepared
from ..engine.requests import Step, TokenLogprobs, Usage
from ..text.chat import CallBegin, CallEnd, ContentPart, Part, ReasoningPart, Reply
from .app import RouteTable
from .body import read_schema
from .choices import (
    chat_logprobs,
    choice_sampling,
    finish_reason,
    sharing,
    timings_object,
    usage_object,
    with_biases,
)
from .contract import ChatModel
from .errors import openai_body, told
from .reply import reply
from .requestlog import note_usage, request_id
from .schemas.chat import ChatBody
from .sse import DONE, EventStream, comment, data
from .state import ServerState, state_of
from .statistics import Statistics
from .talk import Said, Talk, unless_left


@dataclass
class _Answer:
    """One choice as it grows."""

    reply: Reply = field(default_factory=Reply)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: Step | None = None

    def take(self, said: Said) -> None:
        """Add what a step brought."""
        self.reply.add(said.parts)
        self.logprobs += said.step.logprobs
        if said.is_last:
            self.last = said.step


@dataclass(frozen=True)
class _Run:
    """What all chunks of one completion have in common."""

    http: HttpRequest
    body: ChatBody
    model: str
    created: int
    talk: Talk
    statistics: Statistics
    piece: Callable[[int], bytes]

    def head(self, kind: str) -> dict[str, Any]:
        """Return the fields that begin every object."""
        return {
            "id": f"chatcmpl-{request_id(self.http)}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def logprobs(self, found: Any) -> dict[str, Any] | None:
        """Return the logprobs object if it was asked for."""
        return chat_logprobs(found, self.piece) if self.body.logprobs else None


async def complete(request: HttpRequest) -> Response:
    """Answer a conversation, at once or as it is written."""
    body = await read_schema(request, ChatBody)
    state = state_of(request)
    run = await unless_left(request, _open(request, body, state))
    if body.stream:
        return EventStream(_stream(run), close=run.talk.close)
    with run.talk:
        return reply(await unless_left(request, _whole(run)))


async def _open(request: HttpRequest, body: ChatBody, state: ServerState) -> _Run:
    statistics = Statistics(state.backend)
    talk = await state.open_talk(lambda model: _prepared(model, body, state, request))
    loaded = state.in_use()
    return _Run(
        request, body, loaded.facts.name, int(time.time()), talk, statistics, loaded.chat.piece
    )


def _prepared(
    model: ChatModel, body: ChatBody, state: ServerState, request: HttpRequest
) -> list[Prepared]:
    """Return one request for each choice; takes long, so it runs on a thread of the server."""
    chat = body.chat(state, request_id(request))
    sampling = with_biases(chat.sampling, body.logit_bias, model)
    found = [
        model.prepare(replace(chat, sampling=choice_sampling(sampling, i)))
        for i in range(body.n_choices)
    ]
    return sharing(found)


async def _whole(run: _Run) -> dict[str, Any]:
    answers = [_Answer() for _ in range(run.body.n_choices)]
    async for said in run.talk:
        answers[said.index].take(said)
    choices = [_choice(run, i, answer) for i, answer in enumerate(answers)]
    usage = run.talk.usage
    note_usage(run.http, usage, choices[0]["finish_reason"])
    return {
        **run.head("chat.completion"),
        "choices": choices,
        "usage": usage_object(usage, run.talk.n_reasoning),
        "timings": timings_object(usage),
        "moegraph": run.statistics.report(usage),
    }


def _choice(run: _Run, index: int, answer: _Answer) -> dict[str, Any]:
    reason = None if answer.last is None else finish_reason(answer.last, bool(answer.reply.calls))
    return {
        "index": index,
        "message": answer.reply.message(),
        "logprobs": run.logprobs(answer.logprobs),
        "finish_reason": reason,
    }


async def _stream(run: _Run) -> AsyncGenerator[bytes, None]:
    calls = [0] * run.body.n_choices
    finish = None
    with run.talk as talk:
        try:
            for index in range(run.body.n_choices):
                yield data(_chunk(run, index, {"role": "assistant", "content": None}))
            async for said in talk:
                if not said.step.tokens and not said.is_last:
                    yield _progress(run, said.step.usage)
                    continue
                calls[said.index] += sum(isinstance(part, CallBegin) for part in said.parts)
                for frame in _chunks(run, said, calls[said.index] > 0):
                    yield frame
                finish = finish_reason(said.step, calls[said.index] > 0) or finish
        except Exception as failure:  # noqa: BLE001 - whatever fails, the client is told
            note_usage(run.http, talk.usage, "error")
            yield data(openai_body(told(failure, run.http.url.path)))
            return
        except (GeneratorExit, asyncio.CancelledError):
            note_usage(run.http, talk.usage, "left")
            raise
    note_usage(run.http, talk.usage, finish)
    if _wants_usage(run.body):
        yield data({**run.head("chat.completion.chunk"), "choices": [], **_sums(run)})
    yield DONE


def _wants_usage(body: ChatBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _sums(run: _Run) -> dict[str, Any]:
    usage = run.talk.usage
    return {
        "usage": usage_object(usage, run.talk.n_reasoning),
        "timings": timings_object(usage),
        "moegraph": run.statistics.report(usage),
    }


def _progress(run: _Run, usage: Usage) -> bytes:
    """Tell how far the prompt is read: in llama-server's form if asked for, or as a comment."""
    if not run.body.return_progress:
        return comment(f"read {usage.n_read} of {usage.n_prompt} tokens of the prompt")
    progress = {
        "total": usage.n_prompt,
        "cache": usage.n_cached,
        "processed": usage.n_read,
        "time_ms": round(usage.prefill_s * 1e3),
    }
    return data({**_chunk(run, 0, {}), "prompt_progress": progress})


def _chunks(run: _Run, said: Said, has_calls: bool) -> list[bytes]:
    """Return the events of one step; the first has the probabilities, the last ends the choice."""
    deltas = [delta for part in said.parts if (delta := _delta(part))]
    chunks = [_chunk(run, said.index, delta) for delta in deltas]
    found = run.logprobs(said.step.logprobs) if said.step.logprobs else None
    if found is not None:
        chunks = chunks or [_chunk(run, said.index, {})]
        chunks[0]["choices"][0]["logprobs"] = found
    if said.is_last:
        chunks.append(_chunk(run, said.index, {}))
        chunks[-1]["choices"][0]["finish_reason"] = finish_reason(said.step, has_calls)
        if not _wants_usage(run.body):
            chunks[-1] |= {"timings": timings_object(run.talk.usage)}
    elif chunks and run.body.timings_per_token:
        chunks[-1] |= {"timings": timings_object(run.talk.usage)}
    return [data(chunk) for chunk in chunks]


def _chunk(run: _Run, index: int, delta: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
    return {**run.head("chat.completion.chunk"), "choices": [choice]}


def _delta(part: Part) -> dict[str, Any]:
    if isinstance(part, ReasoningPart):
        return {"reasoning_content": part.text}
    if isinstance(part, ContentPart):
        return {"content": part.text}
    if isinstance(part, CallEnd):
        return {}
    if isinstance(part, CallBegin):
        function = {"name": part.name, "arguments": ""}
        call = {"index": part.index, "id": part.id, "type": "function", "function": function}
    else:
        call = {"index": part.index, "function": {"arguments": part.text}}
    return {"tool_calls": [call]}


TABLE = RouteTable(
    [
        Route(path, complete, methods=["POST"])
        for path in ("/v1/chat/completions", "/chat/completions")
    ]
)
