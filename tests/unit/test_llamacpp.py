"""Tests of /completion, in llama-server's form."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.fake_service import N_CTX
from helpers.server_case import Case

from moegraph.errors import NativeError

PATH = "/completion"


def test_an_answer_has_llama_servers_fields() -> None:
    case = Case(["Hi\n", "you"], n_cached=2)
    found = case.answer(PATH, {"prompt": "abc", "n_predict": 9, "temperature": 0.5, "stop": ["x"]})
    settings = found.pop("generation_settings")
    assert settings["n_predict"] == 9 and settings["temperature"] == 0.5
    assert settings["stop"] == ["x"] and settings["ignore_eos"] is False
    assert settings["logit_bias"] == []
    timings = found.pop("timings")
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (2, 1, 6)
    assert found == {
        "index": 0, "id_slot": -1, "content": "Hi\nyou", "tokens": [], "stop": True,
        "model": "fake", "tokens_predicted": 6, "tokens_evaluated": 3, "tokens_cached": 8,
        "has_new_line": True, "truncated": False, "stop_type": "eos", "stopping_word": "",
        "prompt": "abc",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[97, 98]]),
        ([1, 2], [[1, 2]]),
        ([1, "ab", 2], [[1, 97, 98, 2]]),
        (["a", "b"], [[97], [98]]),
        ([[1, "a"], {"prompt_string": "b"}], [[1, 97], [98]]),
    ],
)
def test_prompts_are_texts_and_ids(prompt: Any, ids: list[list[int]]) -> None:
    case = Case(["x"])
    found = case.answer("/completions", {"prompt": prompt, "n_predict": 3})
    assert [list(request.prompt) for request in case.service.requests] == ids
    answers = found if len(ids) > 1 else [found]
    assert [(one["index"], one["content"]) for one in answers] == [*enumerate("x" * len(ids))]


@pytest.mark.parametrize(
    ("given", "kind", "word"),
    [
        ({"stop": "lo"}, "word", "lo"),
        ({"n_predict": 2}, "limit", ""),
        ({}, "eos", ""),
    ],
)
def test_it_is_told_why_an_answer_ended(given: dict[str, Any], kind: str, word: str) -> None:
    found = Case(["Hello"]).answer(PATH, {"prompt": "a", **given})
    assert (found["stop_type"], found["stopping_word"]) == (kind, word)
    full = Case(["Hello"]).answer(PATH, {"prompt": "a" * (N_CTX - 1), "n_predict": 2})
    assert full["truncated"] is True and found["truncated"] is False


def test_an_answer_is_streamed() -> None:
    case = Case(["a\n", "b"], step_s=0.01)
    given = {"prompt": "p", "return_progress": True, "timings_per_token": True, "n_probs": 2}
    *chunks, last = case.events(PATH, given)
    read = [one["prompt_progress"] for one in chunks if "prompt_progress" in one]
    assert [one["processed"] for one in read] == [0, 1]
    told = [one for one in chunks if one["content"]]
    assert "".join(one["content"] for one in told) == "a\nb"
    assert [token for one in told for token in one["tokens"]] == [97, 10, 98]
    assert told[0]["completion_probabilities"][0]["id"] == 97 and "timings" in told[0]
    assert len(told[0]["completion_probabilities"][0]["top_logprobs"]) == 2
    assert not any(one["stop"] for one in chunks)
    assert last["stop"] and last["content"] == "" and last["tokens"] == []
    assert last["has_new_line"] and last["tokens_predicted"] == 3


def test_tokens_probabilities_and_fields_are_given_if_asked_for() -> None:
    case = Case(["ab"])
    found = case.answer(PATH, {"prompt": "p", "return_tokens": True, "n_probs": 1})
    assert found["tokens"] == [97, 98] and len(found["completion_probabilities"]) == 2
    assert "completion_probabilities" not in case.answer(PATH, {"prompt": "p", "n_probs": 0})
    fields = ["content", "timings/predicted_n", "none/such"]
    found = case.answer(PATH, {"prompt": "p", "n": 2, "response_fields": fields})
    assert found == [{"content": "ab", "timings/predicted_n": 2}] * 2


def test_a_failure_ends_the_stream_with_an_error() -> None:
    *_, last = Case(["a", NativeError("lost")]).events(PATH, {"prompt": "p"})
    assert last["error"]["message"] == "lost"
