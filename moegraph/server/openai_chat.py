"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..engine.chat import ChatRequest, Prepared
from ..loop.requests import Step, TokenLogprobs
from ..text.chat import CallBegin, CallEnd, ContentPart, Part, ReasoningPart, Reply
from .answers import Update
from .backend import ChatInterface
from .exchange import (
    Exchange,
    PromptProgress,
    begin,
    chat_logprobs,
    choice_sampling,
    finish_reason,
    sharing,
    usage_object,
    with_biases,
)
from .logs import note_usage, request_id
from .replies import DONE, PLACE, Template, data, reply
from .routes import RouteTable, either, operations, read_schema
from .schemas.chat import ChatBody
from .state import state_of

_FIELDS = {ContentPart: "content", ReasoningPart: "reasoning_content"}


@dataclass
class _Choice:
    """One choice as it grows."""

    reply: Reply = field(default_factory=Reply)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: Step | None = None

    def take(self, update: Update) -> None:
        """Add what a step brought."""
        self.reply.add(update.parts)
        self.logprobs += update.step.logprobs
        if update.is_last:
            self.last = update.step


@dataclass(frozen=True)
class _Run(Exchange):
    """One completion in the making."""

    body: ChatBody
    created: int

    async def whole(self) -> dict[str, Any]:
        """Return the completion."""
        answers = [_Choice() for _ in range(self.body.n_choices)]
        async for update in self.answers:
            answers[update.index].take(update)
        choices = [self._choice(i, answer) for i, answer in enumerate(answers)]
        note_usage(self.http, self.usage, choices[0]["finish_reason"])
        return {**self._head("chat.completion"), "choices": choices, **self._sums()}

    def _head(self, kind: str) -> dict[str, Any]:
        """Return the fields that begin every object."""
        return {
            "id": f"chatcmpl-{request_id(self.http)}",
            "object": kind,
            "created": self.created,
            "model": self.accepted.loaded.facts.name,
            "system_fingerprint": self.accepted.loaded.facts.fingerprint,
        }

    def _sums(self) -> dict[str, Any]:
        return {"usage": usage_object(self.usage, self.answers.n_reasoning), **self.costs()}

    def _choice(self, index: int, answer: _Choice) -> dict[str, Any]:
        last, has_calls = answer.last, bool(answer.reply.calls)
        return {
            "index": index,
            "message": {**answer.reply.message(), "refusal": None},
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": None if last is None else finish_reason(last, has_calls),
        }

    def _logprobs(self, found: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """Return the logprobs object if it was asked for."""
        return chat_logprobs(found, self.accepted.loaded.chat.piece) if self.body.logprobs else None

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the chunks."""
        calls, finish = [0] * self.body.n_choices, None
        write = self._progress if self.body.return_progress else None
        progress = PromptProgress(write, self.body.n_choices)
        templates: dict[tuple[int, str], Template] = {}
        for index in range(self.body.n_choices):
            yield data(self._chunk(index, {"role": "assistant", "content": None, "refusal": None}))
        async for update in self.answers:
            if frames := progress.frames(update):
                yield b"".join(frames)
            if update.is_reading:
                continue
            if frame := self._text_frame(update, templates):
                yield frame
                continue
            calls[update.index] += sum(isinstance(part, CallBegin) for part in update.parts)
            if frames := self._chunks(update, calls[update.index] > 0):
                yield b"".join(frames)
            finish = finish_reason(update.step, calls[update.index] > 0) or finish
        note_usage(self.http, self.usage, finish)
        if self.body.wants_usage:
            yield data({**self._head("chat.completion.chunk"), "choices": [], **self._sums()})
        yield DONE

    def _text_frame(
        self, update: Update, templates: dict[tuple[int, str], Template]
    ) -> bytes | None:
        """Return the event of a step that brings text alone, as most do; None: it brings more."""
        if len(update.parts) != 1 or update.is_last or update.step.logprobs:
            return None
        part = update.parts[0]
        if self.body.timings_per_token or not isinstance(part, ContentPart | ReasoningPart):
            return None
        key = update.index, _FIELDS[type(part)]
        if key not in templates:
            templates[key] = Template(self._chunk(update.index, {key[1]: PLACE}))
        return templates[key].fill(part.text)

    def _progress(self, index: int, found: dict[str, Any]) -> bytes:
        timed = self.reading(index, found, self.body.timings_per_token)
        return data({**self._chunk(index, {}), **timed})

    def _chunks(self, update: Update, has_calls: bool) -> list[bytes]:
        """Return the events of a step; the first has the probabilities, the last ends a choice."""
        deltas = [delta for part in update.parts if (delta := _delta(part))]
        chunks = [self._chunk(update.index, delta) for delta in deltas]
        found = self._logprobs(update.step.logprobs) if update.step.logprobs else None
        if found is not None:
            chunks = chunks or [self._chunk(update.index, {})]
            chunks[0]["choices"][0]["logprobs"] = found
        if chunks and self.body.timings_per_token:
            chunks[-1] |= {"timings": self.timings()}
        if update.is_last:
            chunks.append(self._chunk(update.index, {}))
            chunks[-1]["choices"][0]["finish_reason"] = finish_reason(update.step, has_calls)
            if not self.body.wants_usage:
                chunks[-1] |= {"timings": self.timings()}
        return [data(chunk) for chunk in chunks]

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        usage = {"usage": None} if self.body.wants_usage else {}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **usage}


async def complete(request: HttpRequest) -> Response:
    """Answer a conversation, at once or as it is written."""
    body = await read_schema(request, ChatBody)
    state, name = state_of(request), request_id(request)
    run = await begin(
        request,
        lambda model: _prepared(model, body.chat(state, name), body),
        lambda accepted: _Run(accepted, body, int(time.time())),
    )
    return await run.respond(body.stream)


def _prepared(model: ChatInterface, chat: ChatRequest, body: ChatBody) -> list[Prepared]:
    """Return one request for each choice."""
    sampling = with_biases(chat.sampling, body.logit_bias, model)
    seeds = [choice_sampling(sampling, i) for i in range(body.n_choices)]
    return sharing([model.prepare(replace(chat, sampling=one)) for one in seeds])


def _delta(part: Part) -> dict[str, Any]:
    if isinstance(part, ContentPart | ReasoningPart):
        return {_FIELDS[type(part)]: part.text}
    if isinstance(part, CallEnd):
        return {}
    if isinstance(part, CallBegin):
        function = {"name": part.name, "arguments": ""}
        call = {"index": part.index, "id": part.id, "type": "function", "function": function}
    else:
        call = {"index": part.index, "function": {"arguments": part.text}}
    return {"tool_calls": [call]}


async def count(request: HttpRequest) -> Response:
    """Return how many tokens the prompt of a conversation would have."""
    body = await read_schema(request, ChatBody)
    state = state_of(request)
    n_tokens = await state.count(body.chat(state))
    return reply({"object": "chat.completion.input_tokens", "input_tokens": n_tokens})


TABLE = RouteTable(
    [
        *operations(either("/v1/chat/completions"), complete, ChatBody, streams=True),
        *operations(either("/v1/chat/completions/input_tokens"), count, ChatBody),
    ]
)
