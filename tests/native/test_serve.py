"""The real server with the shipped model, and OpenAI's own client."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from helpers.patience import PATIENCE_S, until
from helpers.server_process import ServerProcess, serving

PROMPT = "def fibonacci(n):\n"
ASK: Any = [{"role": "user", "content": "write a function"}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with serving("-c", 4096, "-np", 2, "--api-key", "key", "--temp", 0) as process:
        assert process.url
        yield process


@pytest.fixture
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0)


def get(server: ServerProcess, path: str) -> Any:
    return httpx.get(server.url + path, headers={"X-Api-Key": "key"}, timeout=PATIENCE_S).json()


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_greedy_text_is_that_of_the_command_line(client: openai.OpenAI) -> None:
    from moegraph import Engine, EngineConfig, SamplingParams

    with Engine.load("tiny", EngineConfig(device="cpu", n_threads=1, n_ctx=2048)) as engine:
        greedy = SamplingParams(temperature=0.0)
        ids = engine.tokenizer.encode(PROMPT)
        alone = "".join(e.text for e in engine.generate(ids, greedy, max_tokens=24))
    given: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24}
    whole = client.completions.create(**given)
    assert whole.choices[0].text == alone and whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == 24
    pieces = [c.choices[0].text for c in client.completions.create(**given, stream=True)]
    assert "".join(pieces) == alone


def test_a_chat_and_its_stream_are_equal(client: openai.OpenAI) -> None:
    given: Any = {"model": "tiny", "messages": ASK, "max_tokens": 16}
    whole = client.chat.completions.create(**given)
    stream = client.chat.completions.create(
        **given, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content and text
    assert last.usage is not None and last.usage.completion_tokens == 16
    assert chunks[-1].choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.prompt_tokens == last.usage.prompt_tokens
    assert whole.model_extra and whole.model_extra["timings"]["predicted_n"] == 16


def test_choices_probabilities_stops_and_biases(client: openai.OpenAI) -> None:
    given: Any = {"model": "tiny", "messages": ASK}
    answer = client.chat.completions.create(
        **given, n=3, temperature=1.0, seed=1, max_tokens=8, logprobs=True, top_logprobs=3
    )
    again = client.chat.completions.create(**given, temperature=1.0, seed=2, max_tokens=8)
    texts = [choice.message.content for choice in answer.choices]
    assert len(texts) == 3 and again.choices[0].message.content == texts[1]
    content = answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert content and len(content) == 8
    for one in content:
        assert one.logprob <= one.top_logprobs[0].logprob <= 0 and len(one.top_logprobs) == 3
    assert "".join(one.token for one in content) == texts[0]
    text = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24).choices[0].text
    cut = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, stop=text[5:8])
    assert cut.choices[0].text == text[: text.index(text[5:8])]
    assert cut.choices[0].finish_reason == "stop"
    biased = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=3, logit_bias={"65": 1000}
    )
    assert len(set(biased.choices[0].text)) == 1


def test_a_second_turn_finds_the_first_in_the_cache(client: openai.OpenAI) -> None:
    words = " ".join(f"word{i}" for i in range(150))
    ask: Any = [{"role": "user", "content": words}]
    given: Any = {"model": "tiny", "max_tokens": 4}
    first = client.chat.completions.create(**given, messages=ask)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    more = client.chat.completions.create(
        **given, messages=[*ask, said, {"role": "user", "content": "go on"}]
    )
    assert more.usage is not None and more.usage.prompt_tokens_details is not None
    assert (more.usage.prompt_tokens_details.cached_tokens or 0) > 100


def test_a_text_that_comes_again_or_goes_on_is_found_in_the_cache(client: openai.OpenAI) -> None:
    text = "\n".join(f"line {i} of a file" for i in range(40))

    def n_cached(prompt: str) -> tuple[int, int]:
        made = client.completions.create(model="tiny", prompt=prompt, max_tokens=2, temperature=0)
        assert made.usage is not None
        details = made.usage.prompt_tokens_details
        return made.usage.prompt_tokens, details.cached_tokens or 0 if details else 0

    n, none = n_cached(text)
    assert none == 0 and n_cached(text) == (n, n - 1)
    assert n_cached(text + "\nand more")[1] >= n - 1


def test_errors_are_those_of_openai(client: openai.OpenAI, server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a b c d e f g h " * 600)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=ASK, temperature=9999)
    assert caught.value.param == "temperature"
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        other.models.list()
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt=[10**9])


def idle(server: ServerProcess) -> bool:
    return not any(slot["is_processing"] for slot in get(server, "/slots"))


def n_left(server: ServerProcess) -> float:
    """Return how many answers were not waited for so far."""
    found = httpx.get(f"{server.url}/metrics", headers={"X-Api-Key": "key"}, timeout=PATIENCE_S)
    ended = re.search(r'request_success_total{finished_reason="abort"} (\S+)', found.text)
    return float(ended[1]) if ended else 0.0


def test_a_stream_that_is_closed_ends_in_the_engine(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    before = n_left(server)
    stream.close()
    until(lambda: idle(server) and n_left(server) == before + 1, 0.02)


def test_a_client_that_hangs_up_ends_in_the_engine(server: ServerProcess) -> None:
    where = urlsplit(server.url)
    body = json.dumps({"prompt": PROMPT, "ignore_eos": True}).encode()
    assert where.hostname and where.port
    connection = http.client.HTTPConnection(where.hostname, where.port)
    headers = {"Content-Type": "application/json", "Authorization": "Bearer key"}
    before = n_left(server)
    connection.request("POST", "/v1/completions", body, headers)
    until(lambda: not idle(server), 0.02)
    connection.close()
    until(lambda: idle(server) and n_left(server) == before + 1, 0.02)


def test_a_prompt_is_computed_anew_where_the_client_asks_for_that(client: openai.OpenAI) -> None:
    def n_cached(**more: Any) -> int:
        given: Any = {"model": "tiny", "max_tokens": 2, "temperature": 0, "extra_body": more}
        found = client.completions.create(prompt="A text that comes again. " * 20, **given)
        assert found.usage and found.usage.prompt_tokens_details
        return found.usage.prompt_tokens_details.cached_tokens or 0

    assert [n_cached(cache_prompt=False) for _ in range(2)] == [0, 0]
    n_cached()
    assert n_cached() > 0 and n_cached(cache_prompt=False) == 0
