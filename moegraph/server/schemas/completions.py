"""The bodies of /v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import BeforeValidator, Field

from ...engine.chat import TextRequest
from ..errors import ApiError
from .fields import MAX_TOKENS, Body, Defaults, Formatted, Sampled, Streamed, wrong
from .limits import LIMITS

# Ids are 32 bits in the model's vocabulary; the service checks them against it.
_MAX_ID = 1 << 31


def _prompts(value: object) -> object:
    """Return a list of prompts, each a text or a list of token ids."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if not isinstance(value, list) or not all(isinstance(v, str) or _is_ids(v) for v in value):
        raise wrong("expected a text, a list of token ids, or a list of these")
    return value


def _is_ids(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and set(map(type, value)) == {int}  # a loop over many ids would hold other threads up
        and min(value) >= 0
        and max(value) < _MAX_ID
    )


_Ids = Annotated[list[Annotated[int, Field(ge=0, lt=_MAX_ID)]], Field(min_length=1)]
_Many = Annotated[list[str | _Ids], Field(min_length=1, max_length=LIMITS.prompts)]


class TextBody(Sampled, Formatted, Streamed):
    """A text and how it goes on."""

    prompt: Annotated[
        list[str | list[int]],
        Field(min_length=1, max_length=LIMITS.prompts),
        BeforeValidator(_prompts, json_schema_input_type=str | _Ids | _Many),
    ]
    model: str | None = None
    n: int | None = Field(default=None, ge=1, le=LIMITS.choices)
    best_of: int | None = Field(default=None, ge=1, le=LIMITS.choices)
    max_tokens: int | None = Field(default=None, ge=-1, le=MAX_TOKENS)
    n_predict: int | None = Field(default=None, ge=-1, le=MAX_TOKENS)
    logprobs: int | None = Field(default=None, ge=0, le=LIMITS.top_logprobs)
    echo: bool | None = None
    suffix: str | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None

    def require_supported(self) -> None:
        """Refuse what cannot be done rather than ignore it."""
        problems = {
            "suffix": bool(self.suffix) and "text cannot be inserted before a suffix",
            "best_of": (self.best_of or 1) > self.n_choices and "ask for n answers instead",
            "echo": bool(self.echo) and self.logprobs is not None
            and "the prompt's probabilities are not known",
            "n": len(self.prompt) * self.n_choices > LIMITS.choices
            and f"at most {LIMITS.choices} answers at a time, over all prompts",
        }  # fmt: skip
        for param, problem in problems.items():
            if problem:
                raise ApiError(400, f"{param}: {problem}", param=param, code="unsupported_value")

    @property
    def n_choices(self) -> int:
        """Return how many answers are wanted for each prompt."""
        return self.n or 1

    def limit(self, default: int | None) -> int | None:
        """Return the most tokens of an answer; None: until the context is full."""
        asked = self.n_predict if self.max_tokens is None else self.max_tokens
        return default if asked is None else None if asked < 0 else asked

    def texts(self, defaults: Defaults, name: str) -> list[TextRequest]:
        """Return a request for each prompt. name: for logs."""
        first = TextRequest(
            prompt="",
            sampling=self.sampling(defaults.sampling),
            max_tokens=self.limit(defaults.max_tokens),
            stop=self.stops,
            ignore_eos=self.ignores_eos(defaults),
            reuse=self.cache_prompt is not False,
            format=self.format(),
            n_logprobs=self.logprobs,
            deadline_s=defaults.deadline_s,
            name=name,
        )
        return [replace(first, prompt=prompt) for prompt in self.prompt]


class TokenizeBody(Body):
    """A text under llama-server's name or vLLM's; without one, the body is that of a chat."""

    content: str | None = None
    prompt: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Body):
    """Ids that become a text."""

    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]]
