"""A server with layers on a worker, and what its clients see when the worker is lost."""

from __future__ import annotations

import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.patience import PATIENCE_S, until
from helpers.server_process import serving
from helpers.workers import working

N_CLIENTS = 3


def ask(url: str, n: int, prompt: str = "def f(") -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": n, "ignore_eos": True, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)


def slots(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/slots", timeout=PATIENCE_S).json()
    return found


@pytest.mark.parametrize(
    ("prompt", "number"),
    [("def f(", signal.SIGKILL), ("import os\n" * 150, signal.SIGSTOP)],
    ids=["decode", "prompt"],
)
def test_every_client_is_told_and_the_server_can_be_started_again(
    prompt: str, number: int, tmp_path: Path
) -> None:
    """Exit status 4, so that a unit of systemd starts it again; the worker serves it then."""
    with working() as worker:
        args = (
            "-c",
            4096,
            "--device",
            f"cpu,{worker.url}?timeout={6 if number == signal.SIGSTOP else 60}",
        )
        with serving(*args) as server:
            text = ask(server.url, 8).json()["choices"][0]["text"]
            found: list[httpx.Response] = []
            asking = [
                threading.Thread(target=lambda: found.append(ask(server.url, 3000, prompt)))
                for _ in range(N_CLIENTS)
            ]
            for one in asking:
                one.start()
            until(lambda: any(slot["is_processing"] for slot in slots(server.url)), 0.01)
            time.sleep(0.3)
            worker.signal(number)
            for one in asking:
                one.join(PATIENCE_S)
            assert server.end() == 4
            assert len(found) == N_CLIENTS
            for response in found:
                assert response.status_code == 500
                assert f"worker {worker.url[6:]}" in response.text
            server.await_line(re.compile(f"^error: .*worker {worker.url[6:]}.*$", re.M))
            assert "Traceback" not in server.log
        if number == signal.SIGSTOP:
            worker.signal(signal.SIGCONT)
        with serving(*args) as server:
            assert ask(server.url, 8).json()["choices"][0]["text"] == text
