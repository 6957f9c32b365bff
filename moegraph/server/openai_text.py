"""/v1/completions: texts that go on, without a chat template."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from ..engine.chat import Prepared
from ..engine.requests import Step, TokenLogprobs, Usage
from .app import RouteTable
from .body import read_schema
from .choices import (
    choice_sampling,
    finish_reason,
    sharing,
    text_logprobs,
    timings_object,
    usage_object,
    with_biases,
)
from .contract import ChatModel
from .errors import openai_body, told
from .reply import reply
from .requestlog import note_usage, request_id
from .schemas.text import TextBody
from .sse import DONE, EventStream, comment, data
from .state import ServerState, state_of
from .statistics import Statistics
from .talk import Said, Talk, total, unless_left


@dataclass
class _Answer:
    """One choice as it grows."""

    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: Step | None = None


@dataclass(frozen=True)
class _Run:
    """What all chunks of one completion have in common. echoes: the prompts as texts, or empty."""

    http: HttpRequest
    body: TextBody
    model: str
    created: int
    talk: Talk
    statistics: Statistics
    piece: Callable[[int], bytes]
    echoes: Sequence[str]

    @property
    def n_choices(self) -> int:
        """Return how many answers there are over all prompts."""
        return len(self.body.prompt) * self.body.n_choices

    def head(self) -> dict[str, Any]:
        """Return the fields that begin every object."""
        return {
            "id": f"cmpl-{request_id(self.http)}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }

    @property
    def usage(self) -> Usage:
        """Return the sum over all prompts."""
        n, usages = self.body.n_choices, self.talk.usages
        sums = [total(usages[i : i + n]) for i in range(0, len(usages), n)]
        return replace(
            total(sums),
            n_prompt=sum(u.n_prompt for u in sums),
            n_read=sum(u.n_read for u in sums),
            n_cached=sum(u.n_cached for u in sums),
        )

    def sums(self) -> dict[str, Any]:
        """Return the fields that tell what the answers cost."""
        usage = self.usage
        return {
            "usage": usage_object(usage),
            "timings": timings_object(usage),
            "moegraph": self.statistics.report(usage),
        }

    def echo(self, index: int) -> str:
        """Return what comes before an answer's own text."""
        return self.echoes[index // self.body.n_choices] if self.echoes else ""


async def complete(request: HttpRequest) -> Response:
    """Continue texts, at once or as they are written."""
    body = await read_schema(request, TextBody)
    body.require_supported()
    run = await unless_left(request, _open(request, body, state_of(request)))
    if body.stream:
        return EventStream(_stream(run), close=run.talk.close)
    with run.talk:
        return reply(await unless_left(request, _whole(run)))


async def _open(request: HttpRequest, body: TextBody, state: ServerState) -> _Run:
    statistics = Statistics(state.backend)
    talk = await state.open_talk(lambda model: _prepared(model, body, state, request))
    loaded = state.in_use()
    echoes = []
    if body.echo:
        echoes = [p if isinstance(p, str) else loaded.chat.detokenize(p) for p in body.prompt]
    return _Run(
        request, body, loaded.facts.name, int(time.time()), talk, statistics, loaded.chat.piece,
        echoes,
    )  # fmt: skip


def _prepared(
    model: ChatModel, body: TextBody, state: ServerState, request: HttpRequest
) -> list[Prepared]:
    texts = body.texts(state, request_id(request))
    sampling = with_biases(texts[0].sampling, body.logit_bias, model)
    found: list[Prepared] = []
    for text in texts:
        seeds = [choice_sampling(sampling, i) for i in range(body.n_choices)]
        found += sharing([model.prepare_text(replace(text, sampling=one)) for one in seeds])
    return found


async def _whole(run: _Run) -> dict[str, Any]:
    answers = [_Answer([run.echo(i)]) for i in range(run.n_choices)]
    async for said in run.talk:
        answer = answers[said.index]
        answer.pieces.append(said.step.text)
        answer.logprobs += said.step.logprobs
        if said.is_last:
            answer.last = said.step
    choices = [_choice(run, i, answer) for i, answer in enumerate(answers)]
    note_usage(run.http, run.usage, choices[0]["finish_reason"])
    return {**run.head(), "choices": choices, **run.sums()}


def _choice(run: _Run, index: int, answer: _Answer) -> dict[str, Any]:
    found = None
    if run.body.logprobs is not None:
        found = text_logprobs(answer.logprobs, run.piece, 0)
    return {
        "index": index,
        "text": "".join(answer.pieces),
        "logprobs": found,
        "finish_reason": None if answer.last is None else finish_reason(answer.last),
    }


async def _stream(run: _Run) -> AsyncGenerator[bytes, None]:
    n_shown, finish = [0] * run.n_choices, None
    with run.talk as talk:
        try:
            for index in range(run.n_choices if run.echoes else 0):
                yield data(_chunk(run, index, run.echo(index)))
            async for said in talk:
                if not said.step.tokens and not said.is_last:
                    usage = said.step.usage
                    yield comment(f"read {usage.n_read} of {usage.n_prompt} tokens of the prompt")
                    continue
                finish = finish_reason(said.step) or finish
                if said.step.text or said.step.logprobs or said.is_last:
                    yield data(_step_chunk(run, said, n_shown))
        except Exception as failure:  # noqa: BLE001 - whatever fails, the client is told
            note_usage(run.http, run.usage, "error")
            yield data(openai_body(told(failure, run.http.url.path)))
            return
        except (GeneratorExit, asyncio.CancelledError):
            note_usage(run.http, run.usage, "left")
            raise
    note_usage(run.http, run.usage, finish)
    if run.body.stream_options is not None and run.body.stream_options.include_usage:
        yield data({**run.head(), "choices": [], **run.sums()})
    yield DONE


def _step_chunk(run: _Run, said: Said, n_shown: list[int]) -> dict[str, Any]:
    chunk = _chunk(run, said.index, said.step.text)
    choice = chunk["choices"][0]
    if run.body.logprobs is not None:
        found = text_logprobs(said.step.logprobs, run.piece, n_shown[said.index])
        n_shown[said.index] += sum(map(len, found["tokens"]))
        choice["logprobs"] = found
    choice["finish_reason"] = finish_reason(said.step)
    if said.is_last or run.body.timings_per_token:
        chunk["timings"] = timings_object(run.usage)
    return chunk


def _chunk(run: _Run, index: int, text: str) -> dict[str, Any]:
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
    return {**run.head(), "choices": [choice]}


TABLE = RouteTable([Route("/v1/completions", complete, methods=["POST"])])
