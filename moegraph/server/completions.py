"""/v1/completions, where texts go on without a chat template; texts and their tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Annotated, Any, ClassVar

from pydantic import AliasChoices, BeforeValidator, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ..engine.chat import TextRequest
from ..loop.requests import Step, TokenLogprobs, Usage
from ..text.chat.parts import ContentPart, Reply
from ..text.infill import Gap
from ..text.tokenizer import Tokenizer
from .answers import Update, total
from .errors import ApiError
from .exchange import Completion, finish_reason, finite, respond
from .openai_chat import ChatBody
from .replies import EVENTS, encode, reply
from .schemas import LIMITS, MAX_TOKENS, Body, CompletionBody, Defaults, refuse, wrong
from .state import Operation, RouteTable, read_object, read_schema, state_of

# Ids are 32 bits in the model's vocabulary; the service checks them against it.
_MAX_ID = 1 << 31


def _prompts(value: object) -> object:
    """Return a list of prompts, each a text or a list of token ids and texts."""
    each = value if isinstance(value, list) and not _is_prompt(value) else [value]
    own = ["prompt_string"]  # llama-server's object for a text without pictures
    found = [one[own[0]] if isinstance(one, dict) and [*one] == own else one for one in each]
    if not all(map(_is_prompt, found)):
        raise wrong("expected a text, a list of token ids, or a list of these")
    return found


def _is_prompt(value: object) -> bool:
    if not isinstance(value, list):
        return isinstance(value, str)
    kinds = set(map(type, value))  # a loop over many ids would hold other threads up
    ids = value if kinds == {int} else [one for one in value if type(one) is int]
    return bool(ids) and kinds <= {int, str} and min(ids) >= 0 and max(ids) < _MAX_ID


_Id = Annotated[int, Field(ge=0, lt=_MAX_ID)]
_Pieces = Annotated[list[_Id | str], Field(min_length=1)]
_Many = Annotated[list[str | _Pieces], Field(min_length=1, max_length=LIMITS.prompts)]


class TextFields(CompletionBody):
    """Fields of OpenAI's and llama-server's completions of texts."""

    logprobs: int | None = Field(
        default=None, ge=0, le=LIMITS.top_logprobs,
        validation_alias=AliasChoices("logprobs", "n_probs"),
    )  # fmt: skip
    post_sampling_probs: bool | None = None
    return_tokens: bool | None = None
    response_fields: list[str] | None = Field(default=None, max_length=LIMITS.stops)
    samplers: list[str] | str | None = None
    n_indent: int | None = Field(default=None, ge=0, le=MAX_TOKENS)
    t_max_predict_ms: int | None = Field(default=None, ge=-1, le=MAX_TOKENS)

    @abstractmethod
    def prompts(self) -> list[TextRequest]:
        """Return what the answers follow."""

    def texts(self, defaults: Defaults) -> list[TextRequest]:
        """Return a request for each prompt."""
        if self.post_sampling_probs:
            refuse("post_sampling_probs", "only those before sampling are known")
        limit_ms = self.t_max_predict_ms or 0
        drawn = dict(
            max_tokens=self.limit(defaults.max_tokens), format=self.format(),
            n_logprobs=self.logprobs, n_indent=self.n_indent or 0,
            limit_s=limit_ms / 1e3 if limit_ms > 0 else None, **self.drawn(defaults),
        )  # fmt: skip
        return [replace(one, **drawn) for one in self.prompts()]

    def drawn(self, defaults: Defaults) -> dict[str, Any]:
        """Return what `DrawSettings` takes of these fields."""
        found = super().drawn(defaults)
        if self.temperature is None and "infill" in (self.samplers or ()):
            # that sampler leaves the likeliest token, and seldom others of a fifth and more
            change = {"min_p": 0.2} if self.n_choices > 1 else {"temperature": 0.0}
            found["sampling"] = replace(found["sampling"], **change)
        return found


class TextBody(TextFields):
    """A text and how it goes on."""

    prompt: Annotated[
        list[str | list[int | str]],
        Field(min_length=1, max_length=LIMITS.prompts),
        BeforeValidator(_prompts, json_schema_input_type=str | _Pieces | _Many),
    ]
    best_of: int | None = Field(default=None, ge=1, le=LIMITS.choices)
    suffix: str | None = None

    def require_supported(self) -> None:
        """Refuse what cannot be done rather than ignore it."""
        problems = {
            "suffix": bool(self.suffix) and not all(isinstance(one, str) for one in self.prompt)
            and "it goes with a prompt that is a text",
            "best_of": (self.best_of or 1) > self.n_choices and "ask for n answers instead",
            "echo": bool(self.echo) and self.logprobs is not None
            and "the prompt's probabilities are not known",
            "n": len(self.prompt) * self.n_choices > LIMITS.choices
            and f"at most {LIMITS.choices} answers at a time, over all prompts",
        }  # fmt: skip
        for param, problem in problems.items():
            if problem:
                raise ApiError(400, f"{param}: {problem}", param=param, code="unsupported_value")

    def shown(self, index: int, tokenizer: Tokenizer) -> str:
        """Return the text of the prompt of an answer."""
        prompt = self.prompt[index // self.n_choices]
        pieces = [prompt] if isinstance(prompt, str) else prompt
        return "".join(p if isinstance(p, str) else tokenizer.decode([p], True) for p in pieces)

    def prompts(self) -> list[TextRequest]:
        """Return what the answers follow."""
        self.require_supported()
        if self.suffix:
            return [TextRequest(gap=Gap(str(one), self.suffix)) for one in self.prompt]
        return [TextRequest(prompt=one) for one in self.prompt]


@dataclass(kw_only=True)
class _Run(Completion):
    """One completion of texts in the making."""

    body: TextBody
    _n_shown: Counter[int] = field(default_factory=Counter, init=False)

    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    empty: ClassVar = {"text": ""}

    @property
    def usage(self) -> Usage:
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

    def _echo(self, index: int) -> str:
        return self.body.shown(index, self.loaded.chat.tokenizer) if self.body.echo else ""

    def choice(self, index: int, reply: Reply, last: Step) -> dict[str, Any]:
        return {
            "index": index,
            "text": self._echo(index) + reply.content,
            "logprobs": self._logprobs(last.logprobs, 0),
            "finish_reason": finish_reason(last),
        }

    def _logprobs(self, found: Sequence[TokenLogprobs], n_shown: int) -> dict[str, Any] | None:
        """Return the logprobs object if it was asked for; n_shown: characters before the first."""
        if self.body.logprobs is None:
            return None

        def text(token: int) -> str:
            return self.loaded.chat.tokenizer.decode([token], special=True)

        tokens = [text(one.token) for one in found]
        return {
            "tokens": tokens,
            "token_logprobs": [finite(one.logprob) for one in found],
            "top_logprobs": [
                {text(token): finite(value) for token, value in one.top} for one in found
            ],
            "text_offset": list(accumulate(map(len, tokens), initial=n_shown))[:-1],
        }

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the fields that begin a stream's choice: what it echoes."""
        return {"text": self._echo(index)} if self.body.echo else None

    def step(self, update: Update) -> tuple[list[dict[str, Any]], str | None]:
        """Return the chunk of a step, if it has something to tell."""
        index, reason = update.index, finish_reason(update.step)
        text = "".join(part.text for part in update.parts if isinstance(part, ContentPart))
        if not (text or update.step.logprobs or update.is_last):
            return [], reason
        chunk = self.chunk(index, {"text": text})
        if found := self._logprobs(update.step.logprobs, self._n_shown[index]):
            self._n_shown[index] += sum(map(len, found["tokens"]))
            chunk["choices"][0]["logprobs"] = found
        chunk["choices"][0]["finish_reason"] = reason
        if update.is_last or self.body.timings_per_token:
            chunk["timings"] = self.timings()
        return [chunk], reason


async def complete(request: HttpRequest) -> Response:
    """Continue texts, at once or as they are written."""
    body = await read_schema(request, TextBody)
    return await respond(request, _Run, body, body.texts, body.n_choices)


class TokenizeBody(Body):
    """A text under llama-server's name or vLLM's; without one, the body is that of a chat."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Body):
    """Ids that become a text."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]]


# Tokens that are written as JSON at once; no other thread runs Python meanwhile.
_SLICE = 10_000


async def tokenize(request: HttpRequest) -> Response:
    """Return the ids of a text, or those of the prompt that a chat would have."""
    value = await read_object(request)
    body = TokenizeBody.model_validate(value)
    state = state_of(request)
    is_chat = value.get("messages") is not None
    asked = state.find(body.model)
    async with state.using(asked) as loaded:
        model, tokenizer = loaded.chat, loaded.chat.tokenizer

        def answer() -> bytes:
            if is_chat:
                ids = model.prompt(ChatBody.model_validate(value).chat(asked.defaults)).encoded.ids
            else:
                ids = _ids(tokenizer, body)
            found = _encoded_tokens(ids, tokenizer if body.with_pieces else None)
            count, n_ctx = len(ids), loaded.facts.n_ctx
            return b'{"tokens":[%b],"count":%d,"max_model_len":%d}' % (found, count, n_ctx)

        return Response(await state.work(answer), media_type="application/json")


def _encoded_tokens(ids: list[int], tokenizer: Tokenizer | None) -> bytes:
    """Return ids as JSON without its brackets, with their pieces if a tokenizer is given."""
    parts = list[bytes]()
    for at in range(0, len(ids), _SLICE):
        tokens: list[Any] = ids[at : at + _SLICE]
        if tokenizer:
            tokens = [{"id": one, "piece": _piece(tokenizer.piece(one, True))} for one in tokens]
        parts.append(encode(tokens)[1:-1])
    return b",".join(parts)


def _ids(tokenizer: Tokenizer, body: TokenizeBody) -> list[int]:
    text = body.content if body.content is not None else body.prompt or ""
    parse = body.parse_special is not False
    return tokenizer.encode(text, bool(body.add_special), parse)


def _piece(data: bytes) -> str | list[int]:
    """Return the text of a token, or its bytes if it is only a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(request: HttpRequest) -> Response:
    """Return the text of ids."""
    body = await read_schema(request, DetokenizeBody)
    state = state_of(request)
    async with state.using(state.find(body.model)) as loaded:
        text = await state.work(lambda: loaded.chat.tokenizer.decode(body.tokens, True))
    return reply({"content": text, "prompt": text})


async def apply_template(request: HttpRequest) -> Response:
    """Return the prompt that a chat would have."""
    body = await read_schema(request, ChatBody)
    state = state_of(request)
    model = state.find(body.model)
    async with state.using(model) as loaded:
        prompt = await state.work(lambda: loaded.chat.prompt(body.chat(model.defaults)))
    return reply({"prompt": prompt.text})


TABLE = RouteTable(
    [
        Operation("/v1/completions", complete, TextBody, streams=EVENTS),
        Operation("/tokenize", tokenize, TokenizeBody, ChatBody),
        Operation("/detokenize", detokenize, DetokenizeBody),
        Operation("/apply-template", apply_template, ChatBody),
    ]
)
