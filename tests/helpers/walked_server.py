"""A program that serves the shipped model and prints the files that a chat request passes."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading

import httpx

from helpers.patience import until
from helpers.walk import Walks
from moegraph.cli import main

BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 24, "temperature": 0}


def ask(walks: Walks, port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, 0.1)
    until(lambda: httpx.get(f"{url}/health").status_code == 200, 0.1)
    for _ in range(4):  # the first ones build what is kept
        walks.all[-1].calls.clear()
        httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=60).raise_for_status()
    print(json.dumps(walks.all[-1].files), flush=True)
    os._exit(0)


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = Walks(ask)
    threading.Thread(target=ask, args=(found, port)).start()
    threading.setprofile(found)
    sys.setprofile(found)
    main(["serve", "tiny", "--device", "cpu", "-t", "1", "--port", str(port)])
