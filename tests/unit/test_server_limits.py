"""Tests of values at the edge: what a request may hold, and what an answer says of its end."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.server_case import CHAT, Case

from moegraph.loop.requests import Step, Usage
from moegraph.sampling import RANDOM_SEED
from moegraph.server.exchange import finish_reason, finite, usage_object
from moegraph.server.schemas import LIMITS, folded_seed

PATH = "/v1/chat/completions"


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth - 1):
        found = {"items": found}
    return found


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("chat_template_kwargs", {"a b": 1}, "may not set"),
        ("chat_template_kwargs", {"messages": []}, "may not set"),
        ("json_schema", nested(LIMITS.depth + 2), "nested more"),
        ("logit_bias", {"1": 1e7}, "a bias is"),
        ("logit_bias", {str(token): 1 for token in range(4097)}, "at most 4096"),
    ],
)
def test_what_is_beyond_a_limit_is_refused_in_words(field: str, value: Any, words: str) -> None:
    case = Case()
    response = case.post(PATH, {**CHAT, field: value})
    assert response.status_code == 400 and words in response.json()["error"]["message"]
    assert not case.service.requests


def test_more_answers_than_the_server_ever_takes_are_no_matter_of_waiting() -> None:
    response = Case(capacity=2).post(PATH, {**CHAT, "n": 3})
    assert response.status_code == 400 and response.json()["error"]["param"] == "n"


def test_no_probabilities_are_computed_that_nobody_asked_for() -> None:
    case = Case()
    case.chat()
    case.chat(logprobs=True)
    assert [request.n_logprobs for request in case.service.requests] == [None, 0]


def test_proxies_do_not_hold_a_stream_back() -> None:
    headers = Case().post(PATH, {**CHAT, "stream": True}).headers
    assert headers["x-accel-buffering"] == "no" and headers["cache-control"] == "no-cache"


def test_seeds_of_64_bits_are_cut_and_minus_one_is_random() -> None:
    assert [folded_seed(n) for n in (7, RANDOM_SEED + 7, -1, RANDOM_SEED)] == [7, 7, -1, -1]


def test_numbers_and_words_of_an_answers_end() -> None:
    assert finite(float("-inf")) == -9999.0 and finite(-0.5) == -0.5
    assert finish_reason(Step(Usage(1), finish_reason="deadline")) == "length"
    details = usage_object(Usage(1, n_drafted=5, n_accepted=3))["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2}
