"""A request and its answer, at once or as a stream: what the interfaces have in common."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..engine.chat import ChatModel, ChatRequest, Prepared, TextRequest
from ..errors import RequestError
from ..loop.requests import Step, TokenLogprobs, Usage
from ..sampling import RANDOM_SEED, SamplingParams
from ..text.chat.parts import Reply
from ..text.tokenizer import Tokenizer
from .answers import Answers, Update, total, unless_left
from .errors import ApiError, openai_body, public_error
from .guards import cache_owner, owner_of
from .host import LoadedModel
from .logs import WARNING, note_usage, note_warnings, request_id
from .metrics import Meter
from .replies import DONE, EVENTS, EventStream, comment, data, reply
from .schemas import Asking, CompletionBody, Defaults
from .state import state_of


def with_biases(
    params: SamplingParams, biases: Sequence[tuple[int | str, float]] | None, model: ChatModel
) -> SamplingParams:
    """Return the parameters with the biases of tokens, some of which are given as texts."""
    if not biases:
        return params
    found = dict(params.logit_bias)
    for token, bias in biases:
        if isinstance(token, str) and len(token) > 256:
            raise RequestError("logit_bias names a text of more than 256 characters")
        ids = [token] if isinstance(token, int) else model.tokenizer.encode(token, False)
        for one in ids:
            found[one] = found.get(one, 0.0) + bias
    return replace(params, logit_bias=found)


def prepared(
    model: ChatModel,
    asked: ChatRequest | TextRequest,
    biases: Sequence[tuple[int | str, float]] | None,
    n: int = 1,
) -> list[Prepared]:
    """Return what the engine needs for n answers, each drawn with a seed of its own.

    What the first one computes of the prompt is kept up to its last token, and the others go on
    from there.
    """
    sampling = with_biases(asked.sampling, biases, model)
    found = []
    for index in range(n):
        if index and sampling.seed not in (None, -1, RANDOM_SEED):
            seed = ((sampling.seed or 0) + 1) % RANDOM_SEED
            sampling = replace(sampling, seed=seed)
        if isinstance(asked, TextRequest):
            one = model.prepare_text(replace(asked, sampling=sampling))
        else:
            one = model.prepare(replace(asked, sampling=sampling))
        if n > 1:
            marks = (*one.request.marks, max(len(one.request.prompt) - 1, 0))
            one = replace(one, request=replace(one.request, marks=marks))
        found.append(one)
    return found


def usage_object(usage: Usage, n_reasoning: int | None = None) -> dict[str, Any]:
    """Return OpenAI's usage object.

    n_reasoning: tokens of reasoning among those generated; None: there is none in such answers.
    """
    found: dict[str, Any] = {
        "prompt_tokens": usage.n_prompt,
        "completion_tokens": usage.n_generated,
        "total_tokens": usage.n_prompt + usage.n_generated,
        "prompt_tokens_details": {"cached_tokens": usage.n_cached},
    }
    details = {} if n_reasoning is None else {"reasoning_tokens": n_reasoning}
    if usage.n_drafted:
        n_wrong = usage.n_drafted - usage.n_accepted
        details["accepted_prediction_tokens"] = usage.n_accepted
        details["rejected_prediction_tokens"] = n_wrong
    if details:
        found["completion_tokens_details"] = details
    return found


def timings_object(usage: Usage, n_choices: int = 1) -> dict[str, Any]:
    """Return llama-server's timings object: durations in milliseconds.

    The first token of each of n_choices costs no pass of its own: rates leave it out.
    """
    n_prompt = max(usage.n_read - usage.n_cached, 0)
    n_steps = max(usage.n_generated - n_choices, 0)
    found: dict[str, Any] = {"cache_n": usage.n_cached}
    for name, n, n_paid, seconds in (
        ("prompt", n_prompt, n_prompt, usage.prefill_s),
        ("predicted", usage.n_generated, n_steps, usage.decode_s),
    ):
        found[f"{name}_n"] = n
        found[f"{name}_ms"] = seconds * 1e3
        found[f"{name}_per_token_ms"] = seconds * 1e3 / n_paid if n_paid else 0.0
        found[f"{name}_per_second"] = n_paid / seconds if seconds > 0 else 0.0
    if usage.n_drafted:
        found["draft_n"], found["draft_n_accepted"] = usage.n_drafted, usage.n_accepted
    return found


def chat_logprobs(found: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the logprobs object of a chat completion."""

    def told(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.piece(token, special=True)
        text = data.decode(errors="replace")
        return {"id": token, "token": text, "bytes": list(data), "logprob": finite(logprob)}

    content = [
        {**told(one.token, one.logprob), "top_logprobs": [told(*likely) for likely in one.top]}
        for one in found
    ]
    return {"content": content, "refusal": None}


def finite(value: float) -> float:
    """Return a logarithm that JSON can hold: OpenAI's -9999 for what cannot be drawn."""
    return max(value, -9999.0)


def finish_reason(step: Step | None, has_calls: bool = False) -> str | None:
    """Return OpenAI's word for the end of an answer; None while it goes on."""
    if step is None or step.finish_reason is None:
        return None
    if has_calls and step.finish_reason == "stop":
        return "tool_calls"
    return "length" if step.finish_reason == "deadline" else step.finish_reason


def _experts(loaded: LoadedModel | None) -> Any:
    """Return the engine's statistics of experts, which count the work for all requests."""
    return None if loaded is None else loaded.service.status().experts


@dataclass(kw_only=True)
class Exchange(ABC):
    """A request that is being answered; each interface writes the answer in its own words.

    answers: of the model `loaded`. experts: statistics of the engine before the request.
    stream_kind: as in `EventStream`.
    """

    stream_kind: ClassVar[str] = EVENTS

    http: HttpRequest
    answers: Answers
    loaded: LoadedModel
    experts: Any
    body: Asking

    @property
    def usage(self) -> Usage:
        """Return what all choices have cost so far."""
        return total(self.answers.usages)

    @abstractmethod
    async def whole(self) -> dict[str, Any] | list[Any]:
        """Return the answer when it is complete."""

    @abstractmethod
    def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the answer."""

    def failed(self, error: ApiError) -> Iterable[bytes]:
        """Return the events that end an answer which fails; in OpenAI's form by default."""
        return [data(openai_body(error))]

    def costs(self) -> dict[str, Any]:
        """Return the fields, beyond those of the interface, that tell what the answer has cost."""
        return {"timings": self.timings(), **self.report()}

    def report(self) -> dict[str, Any]:
        """Return the field that tells what the engine has done; durations in milliseconds."""
        usage, now, before = self.usage, _experts(self.loaded), self.experts
        found = {
            "queued_ms": round(usage.queued_s * 1e3, 3),
            "cached_tokens": usage.n_cached,
            "drafted_tokens": usage.n_drafted,
            "accepted_tokens": usage.n_accepted,
            "experts": None if None in (now, before) else now.since(before).report(),
        }
        return {"moegraph": found}

    def timings(self) -> dict[str, Any]:
        """Return llama-server's timings of the answer so far."""
        return timings_object(self.usage, len(self.answers.usages))

    async def guarded(self) -> AsyncGenerator[bytes, None]:
        """Yield the events; whatever fails, the client is told."""
        with closing(self.answers) as answers:
            try:
                async with aclosing(self.frames()) as frames:
                    async for frame in frames:
                        yield frame
            except Exception as failure:  # noqa: BLE001 - see above
                note_usage(self.http, self.usage, "error")
                for frame in self.failed(public_error(failure, self.http.url.path)):
                    yield frame
            except (GeneratorExit, asyncio.CancelledError):
                if not answers.is_over:
                    note_usage(self.http, self.usage, "left")
                raise


Asked = Callable[[Defaults], Sequence[ChatRequest | TextRequest]]


async def respond(
    request: HttpRequest, kind: type[Exchange], body: Asking, asked: Asked, n: int = 1,
    headers: Mapping[str, str] | None = None, **given: Any,
) -> Response:  # fmt: skip
    """Answer a body, at once or as a stream; a header has what the client should be warned of.

    Other arguments as in `_begin`.
    """
    run = await unless_left(request, _begin(request, kind, body, asked, n, given))
    if run.answers.warnings:
        headers = {**(headers or {}), WARNING: note_warnings(request, run.answers.warnings)}
    if body.stream:
        frames, close = run.guarded(), run.answers.close
        return EventStream(frames, close=close, kind=run.stream_kind, headers=headers)
    with closing(run.answers):
        return reply(await unless_left(request, run.whole()), headers=headers)


async def _begin(
    request: HttpRequest, kind: type[Exchange], body: Asking, asked: Asked, n: int,
    given: Mapping[str, Any],
) -> Exchange:  # fmt: skip
    """Submit n answers to each request of a body.

    asked: makes the requests, on a thread of ours. kind, given: the class of exchange, and fields
    of its own.
    """
    state, owner = state_of(request), owner_of(request)
    model = state.find(body.model)

    def owned(chat: ChatModel) -> list[Prepared]:
        kept_as = cache_owner(owner) if state.cache_by_key else ""
        own: dict[str, Any] = {"name": request_id(request), "client": owner, "owner": kept_as}
        texts = asked(model.defaults)
        found = [one for text in texts for one in prepared(chat, text, body.logit_bias, n)]
        return [replace(one, request=replace(one.request, **own)) for one in found]

    use = state.backend.line.enter(model)
    meter = Meter(state.metrics, on_close=partial(state.backend.line.leave, use))
    try:
        loaded = await state.backend.loaded(use)
        before = _experts(loaded)
        ready = await state.work(partial(owned, loaded.chat))
        answers = Answers(loaded.service, ready, meter)
    except BaseException:
        meter.closed()
        raise
    try:
        return kind(
            http=request, answers=answers, loaded=loaded, experts=before, body=body, **given
        )
    except BaseException:
        answers.close()
        raise


class PromptProgress:
    """Says how far prompts are read: in llama-server's form if asked for, or as comments.

    In that form, the first report is of what was cached, and the last of the whole prompt.

    write: makes the event of a report about a choice; None: comments. n_choices: of each prompt;
    the first one reports.
    """

    def __init__(
        self, write: Callable[[int, dict[str, Any]], bytes] | None = None, n_choices: int = 1
    ) -> None:
        self._write, self._n_choices = write, n_choices
        self._n_told: dict[int, int] = {}

    def frames(self, update: Update) -> list[bytes]:
        """Return the events of a step."""
        usage, n_told = update.step.usage, self._n_told.get(update.index, -1)
        if self._write is None:
            if not update.is_reading:
                return []
            return [comment(f"read {usage.n_read} of {usage.n_prompt} tokens of the prompt")]
        if n_told == usage.n_prompt or update.index % self._n_choices:
            return []
        n_read = max(usage.n_cached, usage.n_read if update.is_reading else usage.n_prompt)
        due = [n for n in dict.fromkeys((usage.n_cached, n_read)) if n > n_told]
        self._n_told[update.index] = max(n_told, n_read)
        time_ms = round(usage.prefill_s * 1e3)
        common = {"total": usage.n_prompt, "cache": usage.n_cached, "time_ms": time_ms}
        return [self._write(update.index, {**common, "processed": n}) for n in due]


@dataclass(kw_only=True)
class Completion(Exchange):
    """One of OpenAI's completions in the making, of a chat or of a text.

    created: seconds since the epoch. empty: fields of a stream's choice that shows no text. done:
    the last event of a stream.
    """

    body: CompletionBody
    created: int = field(default_factory=lambda: int(time.time()))

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    empty: ClassVar[Mapping[str, Any]]
    may_reason: ClassVar[bool] = False
    done: ClassVar[bytes] = DONE

    @abstractmethod
    def choice(self, index: int, reply: Reply, last: Step) -> dict[str, Any]:
        """Return a whole choice; last: its last step, with tokens and probabilities of all."""

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the fields that begin a stream's choice, if it has such a beginning."""
        return None

    @abstractmethod
    def step(self, update: Update) -> tuple[list[dict[str, Any]], str | None]:
        """Return the chunks of a step, and why the choice ends with it."""

    async def whole(self) -> dict[str, Any]:
        """Return the completion."""
        found: dict[int, tuple[Reply, list[TokenLogprobs], list[int]]] = {}
        ended: dict[int, Step] = {}
        async for update in self.answers:
            reply, logprobs, tokens = found.setdefault(update.index, (Reply(), [], []))
            reply.add(update.parts)
            logprobs += update.step.logprobs
            tokens += update.step.tokens
            ended[update.index] = update.step
        choices = [
            self.choice(i, reply, replace(ended[i], tokens=(*tokens,), logprobs=(*logprobs,)))
            for i, (reply, logprobs, tokens) in sorted(found.items())
        ]
        finish = choices[0].get("finish_reason") or finish_reason(ended[0])
        note_usage(self.http, self.usage, finish)
        return {**self._head(self.kind), "choices": choices, **self._sums()}

    def _head(self, kind: str) -> dict[str, Any]:
        facts = self.loaded.facts
        return {
            "id": f"{self.id_prefix}-{request_id(self.http)}",
            "object": kind,
            "created": self.created,
            "model": facts.name,
            "system_fingerprint": facts.fingerprint,
        }

    def _sums(self) -> dict[str, Any]:
        n_reasoning = self.answers.n_reasoning if self.may_reason else None
        return {"usage": usage_object(self.usage, n_reasoning), **self.costs()}

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the chunks."""
        finish = None
        for index in range(len(self.answers.usages)):
            if begun := self.first(index):
                yield data(self.chunk(index, begun))
        write = self._progress if self.body.return_progress else None
        progress = PromptProgress(write, self.body.n_choices)
        async for update in self.answers:
            if frames := progress.frames(update):
                yield b"".join(frames)
            if update.is_reading:
                continue
            chunks, ended = self.step(update)
            if chunks:
                yield b"".join(map(data, chunks))
            finish = ended or finish
        note_usage(self.http, self.usage, finish)
        if self.body.wants_usage:
            yield data({**self._head(self.chunk_kind), "choices": [], **self._sums()})
        if self.done:
            yield self.done

    def _progress(self, index: int, found: dict[str, Any]) -> bytes:
        chunk = {**self.chunk(index, self.empty), "prompt_progress": found}
        if self.body.timings_per_token:
            is_read = found["processed"] > found["cache"]
            seconds = self.answers.usages[index].prefill_s if is_read else 0.0
            usage = Usage(found["total"], found["processed"], found["cache"], prefill_s=seconds)
            chunk["timings"] = timings_object(usage)
        return data(chunk)

    def chunk(self, index: int, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return an object of a stream with these fields of a choice."""
        choice = {"index": index, **fields, "logprobs": None, "finish_reason": None}
        usage = {"usage": None} if self.body.wants_usage else {}
        return {**self._head(self.chunk_kind), "choices": [choice], **usage}
