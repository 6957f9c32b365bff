"""What interfaces share: seeds and biases of choices, usage, timings, probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from ..engine.chat import ChatRequest, Prepared
from ..errors import RequestError
from ..loop.requests import Request, Step, TokenLogprobs, Usage
from ..sampling import RANDOM_SEED, SamplingParams
from .contract import ChatModel

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
    params: SamplingParams, biases: Sequence[tuple[int | str, float]] | None, model: ChatModel
) -> SamplingParams:
    """Return the parameters with the biases of tokens, some of which are given as texts.

    Raises:
        RequestError: a text has too many tokens to be meant.
    """
    if not biases:
        return params
    found = dict(params.logit_bias)
    for token, bias in biases:
        for one in [token] if isinstance(token, int) else _tokens_of(token, model):
            found[one] = found.get(one, 0.0) + bias
    return replace(params, logit_bias=found)


def prepared(
    model: ChatModel, chat: ChatRequest, biases: Sequence[tuple[int | str, float]] | None
) -> Prepared:
    """Return what the engine needs for a conversation that has one answer.

    Raises:
        RequestError: the conversation or a bias is wrong.
    """
    return model.prepare(replace(chat, sampling=with_biases(chat.sampling, biases, model)))


def _tokens_of(text: str, model: ChatModel) -> list[int]:
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
