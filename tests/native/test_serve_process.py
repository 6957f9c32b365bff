"""`moegraph serve` as a process: start, signals, keys, ports, sleep."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.patience import PATIENCE_S, until
from helpers.server_process import serving

get = partial(httpx.get, timeout=PATIENCE_S)


def ask(url: str, **given: Any) -> httpx.Response:
    body = {"prompt": "def f(", "max_tokens": 4, **given}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)


def begin(url: str, found: list[httpx.Response], max_tokens: int) -> threading.Thread:
    """Ask on a thread, and wait until the engine is at it."""

    def go() -> None:
        found.append(ask(url, max_tokens=max_tokens, ignore_eos=True))

    asking = threading.Thread(target=go)
    asking.start()
    until(lambda: found or any(slot["is_processing"] for slot in get(f"{url}/slots").json()), 0.01)
    assert not found, "it was over before it was seen"
    return asking


def free_port() -> int:
    """Return a port that nobody has, and that nobody is given who asks for any."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def test_health_is_bad_until_the_model_is_loaded() -> None:
    port = free_port()
    with serving("--port", port) as server:
        found = set()
        while 200 not in found:
            try:
                found.add(get(f"http://127.0.0.1:{port}/health").status_code)
            except httpx.ConnectError:
                assert server.process.poll() is None, server.log
        assert found <= {200, 503}
        assert server.url == f"http://127.0.0.1:{port}"
        assert server.log.count("\n") == 1


def test_sigterm_lets_requests_end() -> None:
    with serving("--drain", 60) as server:
        url, found = server.url, list[httpx.Response]()
        asking = begin(url, found, 1500)
        server.signal(signal.SIGTERM)
        server.await_line(re.compile("waiting up to 60 s for 1 request"))
        assert ask(url).status_code == 503
        assert get(f"{url}/health").json()["error"]["code"] == "closing"
        asking.join()
        assert found[0].json()["usage"]["completion_tokens"] == 1500
        assert server.end() == 0


def test_a_second_signal_ends_at_once() -> None:
    with serving("--drain", 600) as server:
        url = server.url
        with httpx.stream(
            "POST", f"{url}/v1/completions", timeout=PATIENCE_S,
            json={"prompt": "x", "ignore_eos": True, "stream": True},
        ) as stream:  # fmt: skip
            lines = stream.iter_lines()
            next(lines)
            server.signal(signal.SIGINT)
            server.await_line(re.compile("waiting"))
            server.signal(signal.SIGINT)
            assert server.end() == 130
        assert "Traceback" not in server.log


def test_ctrl_c_of_an_idle_server_ends_it() -> None:
    with serving() as server:
        assert server.url
        server.signal(signal.SIGINT)
        assert server.end() == 130 and server.log.endswith("interrupted\n")


def test_what_drains_too_long_is_cut_off() -> None:
    with serving("--drain", 0.2) as server:
        url, found = server.url, list[httpx.Response]()
        asking = begin(url, found, -1)
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        asking.join()
        assert found[0].status_code == 503


def test_sighup_reads_the_keys_again(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    with serving("--api-key-file", keys, "--log-format", "json") as server:
        url = server.url

        def status(key: str) -> int:
            return get(f"{url}/props", headers={"X-Api-Key": key}).status_code

        assert (status("old"), status("new")) == (200, 401)
        keys.write_text("new\n")
        server.signal(signal.SIGHUP)
        server.await_line(re.compile("keys read again"))
        assert (status("old"), status("new")) == (401, 200)
        keys.unlink()
        server.signal(signal.SIGHUP)
        server.await_line(re.compile("the keys stay as they are"))
        assert status("new") == 200
        lines = [json.loads(line) for line in server.log.splitlines()[1:]]
        assert {line["status"] for line in lines if "status" in line} == {401}
        assert server.process.poll() is None


def test_a_model_that_sleeps_is_loaded_for_the_next_request() -> None:
    with serving("--sleep-idle", 0.5, "--temp", 0) as server:
        url = server.url
        first = ask(url).json()["choices"]
        server.await_line(re.compile("model unloaded"))
        assert get(f"{url}/health").status_code == 200
        assert get(f"{url}/props").json()["is_sleeping"] is True
        assert get(f"{url}/slots").json() == []
        assert ask(url).json()["choices"] == first
        server.await_line("model loaded again")


def test_a_model_that_sleeps_again_and_again_leaves_nothing_behind() -> None:
    with serving("--sleep-idle", 0.2, "--log-format", "off") as server:
        url, first = server.url, 0

        def taken() -> int:
            status = Path(f"/proc/{server.process.pid}/status").read_text()
            return int(status.partition("VmRSS:")[2].split()[0]) // 1024

        for turn in range(5):
            ask(url)
            until(lambda: get(f"{url}/props").json()["is_sleeping"], 0.05)
            if not turn:
                time.sleep(0.5)  # then its memory is given back
                first = taken()
            until(lambda: taken() - first < 16, 0.05)  # MiB; the model and its vocabulary have 20


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--host", "0.0.0.0"], "--insecure-no-key"),
        (["--api-key-file", "/nonexistent"], "cannot read keys"),
        (["--temp", "1000"], "temperature"),
    ],
)
def test_a_wrong_setting_is_one_line(args: list[str], words: str) -> None:
    with serving(*args) as server:
        assert server.end() == 2
        assert server.log.count("\n") == 1 and words in server.log, server.log


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with serving("--port", taken.getsockname()[1]) as server:
            assert server.end() == 2
            assert server.log.count("\n") == 1 and "in use" in server.log
