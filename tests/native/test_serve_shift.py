"""--context-shift, served and on the command line: a text goes on when the context is full."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from click.testing import CliRunner
from helpers.patience import until
from helpers.server_process import serving

from moegraph.cli import main

N_CTX, PROMPT = 128, "def fibonacci(n):\n    if n < 2:\n        return n\n"


def ask(url: str, path: str, **fields: Any) -> list[dict[str, Any]]:
    """Return the objects of an answer, of a stream several."""
    body = json.dumps({"temperature": 0, "ignore_eos": True, **fields}).encode()
    asked = urllib.request.Request(url + path, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=120) as answer:
        lines = answer.read().decode().splitlines()
    found = [line.removeprefix("data: ") for line in lines if line and "[DONE]" not in line]
    return [json.loads(line) for line in found]


def test_a_request_says_what_is_kept_and_its_answer_that_it_was_truncated() -> None:
    with serving("-c", N_CTX, "--context-shift", "--keep", -1) as server:
        asked = {"prompt": PROMPT, "n_predict": 300}
        (whole,) = ask(server.url, "/completion", **asked)
        *events, last = ask(server.url, "/completion", **asked, stream=True, n_keep=-1)
        assert "".join(one["content"] for one in events) == whole["content"]
        assert len([token for one in events for token in one["tokens"]]) == 300
        for found in (whole, last):
            assert (found["truncated"], found["stop_type"]) == (True, "limit")
            assert 0 < found["tokens_cached"] <= N_CTX
            assert (found["tokens_predicted"], found["timings"]["predicted_n"]) == (300, 300)
            assert found["tokens_evaluated"] < 40
        (other,) = ask(server.url, "/completion", **asked, n_keep=0)
        assert other["content"] != whole["content"]
        (short,) = ask(server.url, "/completion", **{**asked, "n_predict": 20})
        assert short["truncated"] is False
        options = {"num_predict": 300, "num_keep": 4, "temperature": 0, "ignore_eos": True}
        raw = {"prompt": PROMPT, "raw": True, "stream": False, "model": "m", "options": options}
        (found,) = ask(server.url, "/api/generate", **raw)
        (same,) = ask(server.url, "/completion", **asked, n_keep=4)
        assert found["response"] == same["content"]


def test_others_are_answered_beside_a_text_that_never_ends() -> None:
    with serving("-c", N_CTX, "--context-shift") as server:
        body = {"prompt": PROMPT, "n_predict": -1, "ignore_eos": True, "stream": True}
        head = {"Content-Type": "application/json"}
        asked = urllib.request.Request(server.url + "/completion", json.dumps(body).encode(), head)
        with urllib.request.urlopen(asked, timeout=120) as endless, ThreadPoolExecutor(1) as thread:
            endless.readline()
            short = thread.submit(ask, server.url, "/completion", prompt=PROMPT, n_predict=20)
            until(lambda: endless.readline() and short.done(), 0)
        assert short.result()[0]["tokens_predicted"] == 20


@pytest.mark.parametrize("command", ["run", "chat"])
def test_run_and_chat_go_on_if_they_are_told_to(command: str) -> None:
    given = [command, "tiny", "-p", PROMPT, "-c", str(N_CTX), "--device", "cpu", "-t", "1"]
    given += ["--temp", "0", "-n", "200", "--ignore-eos", "--json"]
    ends = json.loads(CliRunner().invoke(main, given).stdout)
    assert ends["n_generated"] < N_CTX and ends["finish_reason"] == "length"
    found = CliRunner().invoke(main, [*given, "--context-shift", "--keep", "4"])
    assert json.loads(found.stdout)["n_generated"] == 200
    refused = CliRunner().invoke(main, [*given, "--keep", "4"])
    assert refused.exit_code == 2 and "--context-shift" in refused.stderr
