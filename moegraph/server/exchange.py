"""A request and its answer, at once or as a stream: what the interfaces have in common."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..engine.chat import ChatRequest, Prepared
from ..errors import RequestError
from ..loop.requests import Request, Step, TokenLogprobs, Usage
from ..sampling import RANDOM_SEED, SamplingParams
from .answers import Answers, Update, unless_left
from .backend import ChatInterface, LoadedModel, ModelSource
from .errors import ApiError, openai_body, public_error
from .guards import owner_of
from .logs import WARNING, note_usage, note_warnings
from .replies import EventStream, comment, data, reply
from .state import state_of

# What OpenAI calls the ends of an answer.
FINISH = {"stop": "stop", "length": "length", "deadline": "length"}


def choice_sampling(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of one of several choices: another seed for each."""
    if index == 0 or params.seed in (None, -1, RANDOM_SEED):
        return params
    return replace(params, seed=((params.seed or 0) + index) % RANDOM_SEED)


def sharing(prepared: Sequence[Prepared]) -> list[Prepared]:
    """Return requests for the same prompt so that it is read once.

    What the first one computes is kept up to its last token, and the others go on from there.
    """
    if len(prepared) == 1:
        return list(prepared)
    return [replace(one, request=_marked(one.request)) for one in prepared]


def _marked(request: Request) -> Request:
    return replace(request, marks=(*request.marks, max(len(request.prompt) - 1, 0)))


def with_biases(
    params: SamplingParams, biases: Sequence[tuple[int | str, float]] | None, model: ChatInterface
) -> SamplingParams:
    """Return the parameters with the biases of tokens, some of which are given as texts."""
    if not biases:
        return params
    found = dict(params.logit_bias)
    for token, bias in biases:
        for one in [token] if isinstance(token, int) else _tokens_of(token, model):
            found[one] = found.get(one, 0.0) + bias
    return replace(params, logit_bias=found)


def prepared(
    model: ChatInterface, chat: ChatRequest, biases: Sequence[tuple[int | str, float]] | None
) -> Prepared:
    """Return what the engine needs for a conversation that has one answer."""
    return model.prepare(replace(chat, sampling=with_biases(chat.sampling, biases, model)))


def _tokens_of(text: str, model: ChatInterface) -> list[int]:
    if len(text) > 256:
        raise RequestError("logit_bias names a text of more than 256 characters")
    return model.tokenize(text, add_special=False, parse_special=True)


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


def chat_logprobs(found: Sequence[TokenLogprobs], piece: Callable[[int], bytes]) -> dict[str, Any]:
    """Return the logprobs object of a chat completion. piece: the bytes of a token."""
    return {"content": [_token_object(one, piece) for one in found], "refusal": None}


def _token_object(found: TokenLogprobs, piece: Callable[[int], bytes]) -> dict[str, Any]:
    top = [_logprob(token, value, piece) for token, value in found.top]
    return {**_logprob(found.token, found.logprob, piece), "top_logprobs": top}


def _logprob(token: int, value: float, piece: Callable[[int], bytes]) -> dict[str, Any]:
    data = piece(token)
    return {
        "id": token,
        "token": data.decode(errors="replace"),
        "bytes": list(data),
        "logprob": finite(value),
    }


def text_logprobs(
    found: Sequence[TokenLogprobs], piece: Callable[[int], bytes], offset: int
) -> dict[str, Any]:
    """Return the logprobs object of a text completion. offset: characters before the first."""
    tokens = [piece(one.token).decode(errors="replace") for one in found]
    ends = list(accumulate(map(len, tokens), initial=offset))
    return {
        "tokens": tokens,
        "token_logprobs": [finite(one.logprob) for one in found],
        "top_logprobs": [
            {piece(token).decode(errors="replace"): finite(value) for token, value in one.top}
            for one in found
        ],
        "text_offset": ends[:-1],
    }


def finite(value: float) -> float:
    """Return a logarithm that JSON can hold: OpenAI's -9999 for what cannot be drawn."""
    return max(value, -9999.0)


def finish_reason(step: Step, has_calls: bool = False) -> str | None:
    """Return OpenAI's word for the end of an answer; None while it goes on."""
    if step.finish_reason is None:
        return None
    reason = FINISH.get(step.finish_reason, step.finish_reason)
    return "tool_calls" if has_calls and reason == "stop" else reason


class ExpertUse:
    """Compares the engine's statistics at the start and at the end of a request.

    They count the work for all requests of that time.
    """

    def __init__(self, backend: ModelSource) -> None:
        self._backend = backend
        self._before = self._experts()

    def _experts(self) -> Any:
        loaded = self._backend.peek()
        return None if loaded is None else loaded.service.status().experts

    def report(self, usage: Usage) -> dict[str, Any]:
        """Return what this request cost beyond OpenAI's fields; durations in milliseconds."""
        now, before = self._experts(), self._before
        experts = None if now is None or before is None else now.since(before).report()
        return {
            "queued_ms": round(usage.queued_s * 1e3, 3),
            "cached_tokens": usage.n_cached,
            "drafted_tokens": usage.n_drafted,
            "accepted_tokens": usage.n_accepted,
            "experts": experts,
        }


@dataclass(frozen=True)
class Accepted:
    """A request that the service has accepted, and the model that answers it."""

    http: HttpRequest
    answers: Answers
    statistics: ExpertUse
    loaded: LoadedModel


@dataclass(frozen=True)
class Exchange(ABC):
    """A request that is being answered; each interface writes the answer in its own words."""

    accepted: Accepted

    @property
    def http(self) -> HttpRequest:
        """The request."""
        return self.accepted.http

    @property
    def answers(self) -> Answers:
        """What comes of it."""
        return self.accepted.answers

    @property
    def usage(self) -> Usage:
        """Return what all choices have cost so far."""
        return self.answers.usage

    @abstractmethod
    async def whole(self) -> dict[str, Any]:
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
        """Return the field that tells what the engine has done."""
        return {"moegraph": self.accepted.statistics.report(self.usage)}

    def timings(self) -> dict[str, Any]:
        """Return llama-server's timings of the answer so far."""
        return timings_object(self.usage, len(self.answers.usages))

    def reading(self, index: int, found: dict[str, Any], is_timed: bool | None) -> dict[str, Any]:
        """Return the fields that tell how far a prompt is read, and if wanted how fast."""
        if not is_timed:
            return {"prompt_progress": found}
        seconds = (
            self.answers.usages[index].prefill_s if found["processed"] > found["cache"] else 0.0
        )
        usage = Usage(found["total"], found["processed"], found["cache"], prefill_s=seconds)
        return {"prompt_progress": found, "timings": timings_object(usage)}

    async def respond(
        self, is_stream: bool | None, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Return the response to the request; a header has what the client should be warned of."""
        if self.answers.warnings:
            headers = {**(headers or {}), WARNING: note_warnings(self.http, self.answers.warnings)}
        if is_stream:
            return EventStream(self._guarded(), close=self.answers.close, headers=headers)
        with self.answers:
            return reply(await unless_left(self.http, self.whole()), headers=headers)

    async def _guarded(self) -> AsyncGenerator[bytes, None]:
        """Yield the events; whatever fails, the client is told."""
        with self.answers as answers:
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


Kind = TypeVar("Kind", bound=Exchange)


async def begin(
    request: HttpRequest,
    prepare: Callable[[ChatInterface], Sequence[Prepared]],
    make: Callable[[Accepted], Kind],
) -> Kind:
    """Submit a request, unless the client leaves meanwhile. prepare: runs on a thread of ours."""

    async def accepted() -> Kind:
        state = state_of(request)
        statistics = ExpertUse(state.backend)
        answers = await state.open_answers(prepare, owner_of(request))
        try:
            return make(Accepted(request, answers, statistics, state.in_use()))
        except BaseException:
            answers.close()
            raise

    return await unless_left(request, accepted())


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
