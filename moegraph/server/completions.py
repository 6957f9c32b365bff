"""/v1/completions: texts that go on, without a chat template."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..engine.chat import Prepared, TextRequest
from ..loop.requests import Step, TokenLogprobs, Usage
from .answers import Update, total
from .backend import ChatInterface
from .exchange import (
    Accepted,
    Exchange,
    PromptProgress,
    begin,
    choice_sampling,
    finish_reason,
    sharing,
    text_logprobs,
    usage_object,
    with_biases,
)
from .logs import note_usage, request_id
from .replies import DONE, PLACE, Template, data
from .routes import RouteTable, either, operations, read_schema
from .schemas.completions import TextBody
from .state import state_of


@dataclass
class _Choice:
    """One choice as it grows."""

    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: Step | None = None


@dataclass(frozen=True)
class _Run(Exchange):
    """One completion in the making. echoes: the prompts as texts, or empty."""

    body: TextBody
    created: int
    echoes: Sequence[str]

    @property
    def _n_choices(self) -> int:
        """Return how many answers there are over all prompts."""
        return len(self.body.prompt) * self.body.n_choices

    @property
    def usage(self) -> Usage:
        """Return the sum over all prompts."""
        n, usages = self.body.n_choices, self.answers.usages
        if len(usages) == 1:
            return usages[0]
        sums = [total(usages[i : i + n]) for i in range(0, len(usages), n)]
        return replace(
            total(sums),
            n_prompt=sum(u.n_prompt for u in sums),
            n_read=sum(u.n_read for u in sums),
            n_cached=sum(u.n_cached for u in sums),
        )

    async def whole(self) -> dict[str, Any]:
        """Return the completion."""
        answers = [_Choice([self._echo(i)]) for i in range(self._n_choices)]
        async for update in self.answers:
            answer = answers[update.index]
            answer.pieces.append(update.step.text)
            answer.logprobs += update.step.logprobs
            if update.is_last:
                answer.last = update.step
        choices = [self._choice(i, answer) for i, answer in enumerate(answers)]
        note_usage(self.http, self.usage, choices[0]["finish_reason"])
        return {**self._head(), "choices": choices, **self._sums()}

    def _echo(self, index: int) -> str:
        """Return what comes before an answer's own text."""
        return self.echoes[index // self.body.n_choices] if self.echoes else ""

    def _head(self) -> dict[str, Any]:
        """Return the fields that begin every object."""
        return {
            "id": f"cmpl-{request_id(self.http)}",
            "object": "text_completion",
            "created": self.created,
            "model": self.accepted.loaded.facts.name,
            "system_fingerprint": self.accepted.loaded.facts.fingerprint,
        }

    def _sums(self) -> dict[str, Any]:
        return {"usage": usage_object(self.usage), **self.costs()}

    def _choice(self, index: int, answer: _Choice) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(answer.pieces),
            "logprobs": self._logprobs(answer.logprobs, 0),
            "finish_reason": None if answer.last is None else finish_reason(answer.last),
        }

    def _logprobs(self, found: Sequence[TokenLogprobs], n_shown: int) -> dict[str, Any] | None:
        """Return the logprobs object if it was asked for."""
        if self.body.logprobs is None:
            return None
        return text_logprobs(found, self.accepted.loaded.chat.piece, n_shown)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the chunks."""
        n_shown, finish = [0] * self._n_choices, None
        for index in range(self._n_choices if self.echoes else 0):
            yield data(self._chunk(index, self._echo(index)))
        templates = [Template(self._chunk(i, PLACE)) for i in range(self._n_choices)]
        write = self._progress if self.body.return_progress else None
        progress = PromptProgress(write, self.body.n_choices)
        async for update in self.answers:
            if frames := progress.frames(update):
                yield b"".join(frames)
            if update.is_reading:
                continue
            step = update.step
            if not (update.is_last or step.logprobs or self.body.timings_per_token):
                if step.text:
                    yield templates[update.index].fill(step.text)
                continue
            finish = finish_reason(update.step) or finish
            if update.step.text or update.step.logprobs or update.is_last:
                yield data(self._step_chunk(update, n_shown))
        note_usage(self.http, self.usage, finish)
        if self.body.wants_usage:
            yield data({**self._head(), "choices": [], **self._sums()})
        yield DONE

    def _step_chunk(self, update: Update, n_shown: list[int]) -> dict[str, Any]:
        chunk = self._chunk(update.index, update.step.text)
        choice = chunk["choices"][0]
        if found := self._logprobs(update.step.logprobs, n_shown[update.index]):
            n_shown[update.index] += sum(map(len, found["tokens"]))
            choice["logprobs"] = found
        choice["finish_reason"] = finish_reason(update.step)
        if update.is_last or self.body.timings_per_token:
            chunk["timings"] = self.timings()
        return chunk

    def _progress(self, index: int, found: dict[str, Any]) -> bytes:
        timed = self.reading(index, found, self.body.timings_per_token)
        return data({**self._chunk(index, ""), **timed})

    def _chunk(self, index: int, text: str) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        usage = {"usage": None} if self.body.wants_usage else {}
        return {**self._head(), "choices": [choice], **usage}


async def complete(request: HttpRequest) -> Response:
    """Continue texts, at once or as they are written."""
    body = await read_schema(request, TextBody)
    body.require_supported()
    state, name = state_of(request), request_id(request)

    def made(accepted: Accepted) -> _Run:
        text_of, asked = accepted.loaded.chat.detokenize, body.prompt if body.echo else ()
        echoes = [one if isinstance(one, str) else text_of(one) for one in asked]
        return _Run(accepted, body, int(time.time()), echoes)

    run = await begin(request, lambda model: _prepared(model, body.texts(state, name), body), made)
    return await run.respond(body.stream)


def _prepared(model: ChatInterface, texts: Sequence[TextRequest], body: TextBody) -> list[Prepared]:
    """Return one request for each choice of each prompt."""
    sampling = with_biases(texts[0].sampling, body.logit_bias, model)
    seeds = [choice_sampling(sampling, i) for i in range(body.n_choices)]
    found: list[Prepared] = []
    for text in texts:
        found += sharing([model.prepare_text(replace(text, sampling=one)) for one in seeds])
    return found


TABLE = RouteTable(operations(either("/v1/completions"), complete, TextBody, streams=True))
