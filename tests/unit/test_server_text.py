"""Tests of /v1/completions, of tokens and templates, and of what the server says of itself."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_service import N_CTX
from helpers.server_case import CHAT, Case
from prometheus_client.parser import text_string_to_metric_families

from moegraph.loop.requests import Request, SlotStatus
from moegraph.sampling import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"


def test_a_text_goes_on() -> None:
    case = Case(["b", "c"])
    answer = case.answer(PATH, {"prompt": "a", "echo": True})
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop"}
    ]
    assert answer["usage"]["total_tokens"] == 3
    assert case.model.texts[0].prompt == "a"


def test_several_prompts_have_several_choices() -> None:
    case = Case(["x"], ["y"], ["z"], ["w"])
    answer = case.answer(PATH, {"prompt": ["ab", [65, 66, 67]], "n": 2, "seed": 1})
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 5
    assert [list(r.prompt) for r in case.service.requests] == [[97, 98]] * 2 + [[65, 66, 67]] * 2
    assert [r.sampling.seed for r in case.service.requests] == [1, 2, 1, 2]


def test_a_text_is_streamed() -> None:
    body = {"prompt": "a", "stream_options": {"include_usage": True}, "echo": True}
    *chunks, done = Case(["b", "c"]).events(PATH, body)
    assert done == "[DONE]" and chunks[-1]["usage"]["completion_tokens"] == 2
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == "abc"
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


def test_probabilities_have_the_old_form() -> None:
    found = Case(["ab"]).answer(PATH, {"prompt": "x", "logprobs": 2})["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "b"] and found["token_logprobs"] == [-0.5, -0.5]
    assert found["text_offset"] == [0, 1] and list(found["top_logprobs"][0]) == ["a", "b"]
    *chunks, _ = Case(["a", "b"], step_s=0.02).events(PATH, {"prompt": "x", "logprobs": 0})
    found = [c["choices"][0]["logprobs"] for c in chunks]
    assert [t for one in found for t in one["tokens"]] == ["a", "b"]
    assert [at for one in found for at in one["text_offset"]] == [0, 1]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1], 2]}, "prompt"),
        ({"prompt": [["x"]]}, "prompt"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": []}}, "prompt"),
        ({"prompt": "x", "post_sampling_probs": True}, "post_sampling_probs"),
        ({"prompt": ["x", 1 << 40]}, "prompt"),
        ({"prompt": ["x"] * 100}, "prompt"),
        ({"prompt": [[1], "x"], "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": ["x"] * 8, "n": 8}, "n"),
        ({"prompt": "x", "dry_multiplier": 0.8, "mirostat": 0}, "dry_multiplier"),
        ({"prompt": "x", "mirostat": 2, "top_n_sigma": -1, "xtc_probability": 0}, "mirostat"),
        ({"prompt": "x", "adaptive_target": 0}, "adaptive_target"),
    ],
)
def test_a_wrong_field_is_named(given: dict[str, Any], param: str) -> None:
    response = Case().post(PATH, given)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_a_text_longer_than_the_context_is_refused() -> None:
    response = Case().post(PATH, {"prompt": "x" * 5000})
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "context_length_exceeded"
    assert error["type"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] == 5000 and error["n_ctx"] == N_CTX


def test_tokens_of_a_text() -> None:
    case = Case()
    assert case.answer("/tokenize", {"content": "ab"})["tokens"] == [97, 98]
    assert case.answer("/tokenize", {"prompt": "ab"})["count"] == 2
    pieces = case.answer("/tokenize", {"content": "é", "with_pieces": True})["tokens"]
    assert pieces == [{"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert case.answer("/tokenize", CHAT)["tokens"] == list(b"user: hi")
    assert case.answer("/detokenize", {"tokens": [97, 98]})["content"] == "ab"
    assert case.answer("/apply-template", CHAT) == {"prompt": "user: hi"}
    assert case.post("/detokenize", {"tokens": [-1]}).status_code == 400


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"reasoning_effort": "low", "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template_kwargs": {"x": 1}, "tool_choice": "none", "add_generation_prompt": False},
    ],
)
def test_a_prompt_is_that_of_a_chat_with_the_same_body(given: dict[str, Any]) -> None:
    case = Case(defaults={"variables": {"enable_thinking": False}})
    body = {**CHAT, **given}
    case.chat(**given)
    text = case.answer("/apply-template", body)["prompt"]
    assert list(text.encode()) == case.answer("/tokenize", body)["tokens"]
    assert case.service.requests[0].prompt == list(text.encode())
    chat, *others = [replace(one, name="") for one in case.model.asked]
    assert others == [chat, chat] and "enable_thinking" in chat.variables


def test_the_server_describes_its_model() -> None:
    client = Case().client
    (found,) = client.get("/v1/models").json()["data"]
    assert found["id"] == "fake" and found["meta"]["n_vocab"] == 256
    assert client.get("/v1/models/fake").json() == found
    response = client.get("/v1/models/other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_properties_and_slots_show_no_text() -> None:
    case = Case()
    case.chat(messages=[{"role": "user", "content": "secret"}])
    props, slots = case.client.get("/props"), case.client.get("/slots")
    assert "secret" not in props.text + slots.text
    assert props.json()["total_slots"] == 1 and props.json()["is_sleeping"] is False
    assert props.json()["default_generation_settings"]["params"]["temperature"] == 0.8
    assert slots.json()[0]["is_processing"] is False


def test_a_slot_has_the_form_of_llama_server() -> None:
    asked = Request(
        [1, 2, 3], SamplingParams(seed=7, logit_bias={5: 1.0}), max_tokens=9, name="req_1"
    )
    answering = SlotStatus(
        1, "answering", n_prompt=3, n_read=3, n_cached=2, n_generated=4, number=6,
        request=asked, has_new_line=True,
    )  # fmt: skip
    idle, busy = Case(slots=(SlotStatus(0), answering)).client.get("/slots").json()
    assert idle == {
        "id": 0, "n_ctx": N_CTX, "speculative": False, "is_processing": False, "state": "idle",
    }  # fmt: skip
    assert busy["id_task"] == 6 and busy["is_processing"] is True
    assert busy["n_prompt_tokens_processed"] == 1 and busy["n_prompt_tokens_cache"] == 2
    assert busy["params"]["seed"] == 7 and busy["params"]["n_predict"] == 9
    assert "logit_bias" not in busy["params"]
    assert busy["next_token"] == [
        {"has_next_token": True, "has_new_line": True, "n_remain": 5, "n_decoded": 4}
    ]


def _figures(case: Case, path: str = "/metrics") -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(case.client.get(path).text)
        for sample in family.samples
        if "bucket" not in sample.name
    }


def test_rates_are_of_the_time_since_they_were_read_last() -> None:
    case = Case(["abcde"], n_read_steps=1)
    rates = ("llamacpp:prompt_tokens_seconds", "llamacpp:predicted_tokens_seconds")
    case.chat()
    for path in ("/metrics?peek", "/metrics"):
        found = _figures(case, path)
        # the fake takes 10 ms for a prompt and 1 ms a token, of which the first comes for nothing
        assert [found[name] for name in rates] == pytest.approx([len("user: hi") / 0.01, 4 / 0.005])
    assert [_figures(case)[name] for name in rates] == [0.0, 0.0]
    assert _figures(case)["llamacpp:tokens_predicted_total"] == 5


def test_metrics_have_the_names_of_other_servers() -> None:
    case = Case(["ab"], n_read_steps=1, n_cached=3)
    case.chat(n=2)
    case.service.refusal = None
    raw = dict(case.client.get("/metrics").headers.raw)
    assert int(raw[b"Process-Start-Time-Unix"]) == case.state.started
    found = _figures(case)
    assert found["llamacpp:spec_decode_num_drafts_total"] == 0
    assert found["llamacpp:prompt_tokens_cached_total"] == 6
    assert found["llamacpp:tokens_predicted_total"] == 4
    assert found["llamacpp:prompt_tokens_total"] == 2 * (len("user: hi") - 3)
    assert found["vllm:prompt_tokens_total"] == 2 * len("user: hi")
    assert found["vllm:prefix_cache_hits_total"] == 6
    assert found["vllm:request_success_total"] == 2
    assert found["vllm:time_to_first_token_seconds_count"] == 2
    assert found["moegraph_ready"] == 1 and found["moegraph_slots"] == 1
    assert found["llamacpp:n_decode_total"] == 0 and found["vllm:num_preemptions_total"] == 0
    assert found["llamacpp:requests_processing"] == found["llamacpp:requests_deferred"] == 0


def test_the_page_of_the_server_names_every_figure() -> None:
    page = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    found = re.findall(r"^# TYPE (\S+)", Case().client.get("/metrics").text, re.M)
    names = [re.split("[:_]", name, maxsplit=1)[1] for name in found]
    names = [name for name in names if not name.endswith("_created")]
    assert len(names) > 30 and [name for name in names if name not in page] == []


@pytest.mark.parametrize("path", ["/v1/embeddings", "/rerank", "/api/embed", "/api/pull"])
def test_paths_of_other_servers_say_what_to_use(path: str) -> None:
    response = Case().post(path, {})
    error = response.json()["error"]
    line = error if path.startswith("/api/") else error["message"]
    assert response.status_code == 404 and line.startswith(
        f"{path.partition('?')[0]} is not served: "
    )


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/v1/messages", "; there is /v1/messages"),
        ("/messages", "; there is /v1/messages"),
        ("/v1/chat/completions/", "; there is /v1/chat/completions"),
        ("/v1/nothing", ""),
    ],
)
def test_an_address_with_v1_too_often_or_not_at_all_is_recognised(path: str, hint: str) -> None:
    error = Case().post(path, {}).json()["error"]
    assert error["code"] == "unknown_path"
    assert error["message"] == f"there is no POST '{path}'{hint}"


def test_health_is_good_when_the_model_is_there() -> None:
    assert Case().client.head("/").status_code == 200
    assert Case().client.get("/health").json() == {"status": "ok"}
    assert json.loads(Case().client.get("/v1/health").text) == {"status": "ok"}
