"""Several models behind one server: the right one answers, one is in memory, none is cut off."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from helpers.patience import PATIENCE_S, until
from helpers.server_process import ServerProcess, serving
from helpers.shipped import TINY

get = partial(httpx.get, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def other(model_path: Callable[[str], Path]) -> Path:
    """Return a random model of another family."""
    return model_path("olmoe")


@pytest.fixture
def folder(tmp_path: Path, other: Path) -> Path:
    """Return a folder of two models, a broken one, and files that are none."""
    (tmp_path / "small.gguf").symlink_to(TINY)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "other.gguf").symlink_to(other)
    (tmp_path / "broken.gguf").write_bytes(TINY.read_bytes()[:5000])
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("x")
    return tmp_path


def ask(url: str, model: str, **given: Any) -> httpx.Response:
    body = {"prompt": "def f(", "max_tokens": 6, "temperature": 0, "model": model, **given}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)


def text_of(answer: httpx.Response, model: str) -> str:
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["model"] == model
    return str(found["choices"][0]["text"])


def memory(server: ServerProcess) -> int:
    """Return resident memory of a server in MiB."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) // 1024


def served(*args: object) -> Any:
    """Run a server without a model of its own."""
    return serving("--models", *args, target="--deterministic")


def states(url: str) -> dict[str, str]:
    return {one["id"]: one["status"]["value"] for one in get(f"{url}/v1/models").json()["data"]}


def test_alternating_requests_get_the_right_model_and_memory_comes_back(folder: Path) -> None:
    with served(folder, "--sleep-idle", 0.3) as server:
        url = server.url
        assert states(url) == dict.fromkeys(("broken", "other", "small"), "unloaded")
        empty = memory(server)
        first = {name: text_of(ask(url, name), name) for name in ("small", "other")}
        assert first["small"] != first["other"]
        assert states(url) == {"broken": "unloaded", "other": "loaded", "small": "unloaded"}
        for i in range(20):
            name = ("small", "other")[i % 2]
            assert text_of(ask(url, name), name) == first[name]
        until(lambda: "loaded" not in states(url).values(), 0.05)
        until(lambda: memory(server) - empty < 60, 0.05)  # libraries, and pages of the allocator
        kept = memory(server)
        # all at once: each answer is still of the model that was asked for
        answers: list[tuple[str, str]] = []

        def go(name: str) -> None:
            answers.append((name, text_of(ask(url, name), name)))

        threads = [threading.Thread(target=go, args=(("small", "other")[i % 2],)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(answers) == 8 and all(first[name] == text for name, text in answers)
        until(lambda: "loaded" not in states(url).values(), 0.05)
        until(lambda: memory(server) - kept < 16, 0.05)


def test_a_stream_is_not_cut_and_errors_are_of_one_request(folder: Path) -> None:
    with served(folder) as server:
        url = server.url
        with httpx.stream(
            "POST", f"{url}/v1/completions", timeout=PATIENCE_S,
            json={"prompt": "x", "model": "small", "stream": True, "max_tokens": 400,
                  "ignore_eos": True, "stream_options": {"include_usage": True}},
        ) as stream:  # fmt: skip
            lines = stream.iter_lines()
            next(lines)
            found: list[str] = []
            waiting = threading.Thread(target=lambda: found.append(ask(url, "other").text))
            waiting.start()
            rest = list(lines)
        assert rest[-2] == "data: [DONE]" and '"completion_tokens":400' in rest[-4]
        waiting.join(PATIENCE_S)
        assert '"model":"other"' in found[0]
        wrong = ask(url, "broken")
        assert wrong.status_code == 503 and wrong.headers["x-should-retry"] == "false"
        error = wrong.json()["error"]
        assert error["code"] == "model_not_loaded"
        assert "the model broken could not be loaded: broken: " in error["message"]
        assert str(folder) not in error["message"]
        assert states(url)["other"] == "loaded"  # it has not left for a file that is wrong
        check_unknown(url)
        assert ask(url, "other").status_code == 200


def check_unknown(url: str) -> None:
    """A model that is not there is 404, in the words of each interface."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", timeout=PATIENCE_S)
    talk: Any = [{"role": "user", "content": "hi"}]
    for call in (
        lambda: client.chat.completions.create(model="nobody", messages=talk),
        lambda: client.responses.create(model="nobody", input="hi"),
        lambda: client.models.retrieve("nobody"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert caught.value.code == "model_not_found" and caught.value.param == "model"
    claude = anthropic.Anthropic(base_url=url, api_key="-", timeout=PATIENCE_S)
    with pytest.raises(anthropic.NotFoundError) as refused:
        claude.messages.create(model="nobody", messages=talk, max_tokens=4)
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["type"] == "not_found_error"
    for path, sent in (("tokenize", {"content": "a"}), ("detokenize", {"tokens": [1]})):
        answer = httpx.post(f"{url}/{path}", json={"model": "nobody", **sent}, timeout=PATIENCE_S)
        assert answer.status_code == 404, answer.text


def test_a_file_of_presets(tmp_path: Path, other: Path) -> None:
    """Settings of a model hold for it alone; what does not fit is an error of its requests."""
    (tmp_path / "second.gguf").symlink_to(other)
    file = tmp_path / "models.toml"
    file.write_text(
        '[first]\nmodel = "tiny"\nctx-size = 512\npredict = 3\ntemp = 0\n'
        '["org/second"]\nmodel = "second.gguf"\nctx_size = 1024\nparallel = 2\n'
        '[large]\nmodel = "tiny"\nvram = "1KiB"\n'
    )
    with serving("--models", file, "-c", 256, target="--ignore-eos") as server:
        url = server.url
        body = {"prompt": "x"}  # without a name, the first answers
        found = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).json()
        assert (found["model"], found["usage"]["completion_tokens"]) == ("first", 3)
        props = get(f"{url}/props").json()
        assert props["default_generation_settings"]["n_ctx"] == 256  # what is typed counts more
        assert props["default_generation_settings"]["params"]["temperature"] == 0
        second = ask(url, "org/second", max_tokens=5)
        assert second.json()["usage"]["completion_tokens"] == 5
        assert get(f"{url}/props").json()["total_slots"] == 2
        assert get(f"{url}/v1/models/org/second").json()["status"] == {"value": "loaded"}
        wrong = ask(url, "large")
        assert wrong.status_code == 503 and "the model large could not" in wrong.text
        assert ask(url, "first").status_code == 200


def test_ctrl_c_while_a_model_is_loaded_ends_at_once(tmp_path: Path) -> None:
    slow = tmp_path / "slow.gguf"
    slow.symlink_to(TINY)
    with served(tmp_path, "--drain", 600) as server:
        url = server.url
        for _ in range(3):  # at some moment of a load
            threading.Thread(target=partial(_quietly, url), daemon=True).start()
        time.sleep(0.05)
        server.signal(signal.SIGINT)
        assert server.end() == 130
        assert server.log.endswith("interrupted\n") and "Traceback" not in server.log


def _quietly(url: str) -> None:
    with suppress(httpx.HTTPError):
        ask(url, "slow")
