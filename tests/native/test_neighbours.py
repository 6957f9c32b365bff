"""A stream beside hostile requests: how long its client waits for a token at most."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import pytest
from helpers.patience import PATIENCE_S, until
from helpers.server_process import serving

pytest.importorskip("uvicorn")

# A gap that is no longer than this is nothing to worry about, nor one that is hardly longer than
# those of the stream alone, which a busy machine makes.
BOUND_S, TIMES_ALONE = 0.25, 4.0
# So long may the first token of a short request take that comes meanwhile, where slots are free.
FIRST_S = 0.5
# How long a hostile request may go on, and how often it is tried: other processes make gaps too.
LASTS_S, TRIES = 0.6, 3

# Prints when each piece of a stream arrives, and a line for the end of each stream: in a process of
# its own, so that what this one does is not measured.
WATCHER = """
import json, socket, sys, time
host, port = sys.argv[1:]
body = json.dumps({"prompt": "def f(", "max_tokens": 3000, "ignore_eos": True, "stream": True})
head = ["POST /v1/completions HTTP/1.1", f"Host: {host}", "Content-Type: application/json",
        "Connection: close", f"Content-Length: {len(body)}", "", body]
while True:
    sock = socket.create_connection((host, int(port)))
    sock.sendall("\\r\\n".join(head).encode())
    while sock.recv(65536):
        print(time.monotonic(), flush=True)
    print("end", flush=True)
"""


class Watch:
    """When the pieces of a stream came that never ends."""

    def __init__(self, host: str, port: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WATCHER, host, str(port)], stdout=subprocess.PIPE, text=True
        )
        self._gaps: list[tuple[float, float]] = []  # when each began and ended
        threading.Thread(target=self._read, daemon=True).start()
        until(lambda: len(self._gaps) > 100)

    def _read(self) -> None:
        assert self._process.stdout
        last = ""
        for line in self._process.stdout:
            if "end" not in (last, line.strip()) and last:
                self._gaps.append((float(last), float(line)))
            last = line.strip()

    def gap(self, work: Callable[[], object]) -> float:
        """Return the longest gap, in seconds, of those that overlap what is done."""
        begin = time.monotonic()
        work()
        end = time.monotonic()
        until(lambda: self._gaps[-1][0] > end)
        gaps = [b - a for a, b in self._gaps.copy() if b >= begin and a <= end]
        return max(gaps, default=end - begin)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Enemy:
    """Sends what others would suffer from."""

    def __init__(self, host: str, port: int) -> None:
        self._at = (host, port)

    def connect(self) -> socket.socket:
        sock = socket.create_connection(self._at, PATIENCE_S)
        sock.settimeout(LASTS_S)
        return sock

    def head(self, path: str, n_bytes: int) -> bytes:
        return (
            f"POST {path} HTTP/1.1\r\nHost: {self._at[0]}\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {n_bytes}\r\n\r\n"
        ).encode()

    def post(self, path: str, *bodies: Any, n: int = 1, reads: bool = True) -> int:
        """Send bodies, n times each, at once; leave after a while. Return how many are answered."""
        with ExitStack() as stack:
            datas = [json.dumps(body).encode() for body in bodies] * n
            socks = [stack.enter_context(self.connect()) for _ in datas]
            end, n_answered = time.monotonic() + LASTS_S, 0

            def send(sock: socket.socket, data: bytes) -> None:
                nonlocal n_answered
                with suppress(OSError):
                    sock.sendall(self.head(path, len(data)) + data)
                    while reads and sock.recv(65536):
                        pass
                    n_answered += reads

            threads = [threading.Thread(target=send, args=pair) for pair in zip(socks, datas)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()))
            for sock in socks:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
            return n_answered


TEXT = "a rose is a rose and 17 words more; " * 90_000
PROMPT = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}


def grammar(text: str) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 400, "grammar": text}


def schema(found: dict[str, Any]) -> dict[str, Any]:
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": found}}
    return {"prompt": "x", "max_tokens": 200, "response_format": format_}


def nested(schema: dict[str, Any], depth: int, **more: Any) -> dict[str, Any]:
    for _ in range(depth):
        schema = {"type": "array", "items": schema, **more}
    return schema


def pattern(text: str) -> dict[str, Any]:
    return schema({"type": "string", "pattern": text})


def repeated(count: str, last: str, depth: int = 2) -> str:
    rules = [f"{a} ::= {b}{count}" for a, b in pairwise(["root", *"abcdefg"[: depth + 1]])]
    return "\n".join([*rules, f"{'abcdefg'[depth]} ::= {last}"])


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 20}


COMPLETE = "/v1/completions"
POSTS: dict[str, tuple[str, list[Any], int]] = {
    "8 texts of 3.2 MB to /tokenize": ("/tokenize", [{"content": TEXT}], 8),
    "8 words of 2 MB to /tokenize": ("/tokenize", [{"content": "x" * 2_000_000}], 8),
    "8 texts of 800 kB with pieces": (
        "/tokenize", [{"content": TEXT[:800_000], "with_pieces": True}], 8,
    ),
    "4 times 900,000 ids to /detokenize": ("/detokenize", [{"tokens": [5] * 900_000}], 4),
    "4 conversations of 3.2 MB to /apply-template": ("/apply-template", [chat(TEXT)], 4),
    "5,000 messages to /apply-template": (
        "/apply-template", [{"messages": chat("x" * 100)["messages"] * 5000}], 4,
    ),
    "4 conversations of 3.2 MB": ("/v1/chat/completions", [chat(TEXT)], 4),
    "4 conversations of 3.2 MB, counted": ("/v1/messages/count_tokens", [chat(TEXT)], 4),
    "a long prompt": (COMPLETE, [{"prompt": TEXT[:10_000], "max_tokens": 5}], 1),
    "8 long prompts": (COMPLETE, [{"prompt": TEXT[:10_000], "max_tokens": 5}], 8),
    "4 prompts larger than the context": (COMPLETE, [{"prompt": TEXT, "max_tokens": 5}], 4),
    "a prompt of 900,000 ids": (COMPLETE, [{"prompt": [5] * 900_000, "max_tokens": 5}], 4),
    "grammars a{1000} of b{1000} of c{1000}": (
        COMPLETE, [grammar(repeated("{1000}", '"x"', n)) for n in (1, 2)], 2,
    ),
    "ambiguous grammars": (
        COMPLETE,
        [
            grammar('root ::= root root root | root root | [a-z] | ""'),
            grammar('root ::= a a a a a a a a\na ::= b*\nb ::= c c c | ""\nc ::= [a-z]? | b'),
        ],
        2,
    ),
    "a grammar of 32 kB": (
        COMPLETE,
        [grammar("root ::= a0\n" + "\n".join(f"a{i} ::= a{i+1} | [a-z] a{i+1}" for i in range(1200))
                 + '\na1200 ::= "x"')],
        2,
    ),
    "schemas with huge counts": (
        COMPLETE,
        [schema(nested({"type": "integer"}, 3, minItems=1000)),
         schema({"type": "string", "minLength": 100_000, "maxLength": 1_000_000})],
        2,
    ),
    "schemas nested 60 deep": (COMPLETE, [schema(nested({"type": "integer"}, 60))], 4),
    "an enum of 10,000": (COMPLETE, [schema({"enum": [f"value {i}" for i in range(10_000)]})], 4),
    "2,000 alternatives": (
        COMPLETE,
        [schema({"anyOf": [{"type": "object", "properties": {f"p{i}": {"type": "integer"}},
                            "required": [f"p{i}"]} for i in range(2000)]})],
        4,
    ),
    "1,900 optional properties": (
        COMPLETE,
        [schema({"type": "object",
                 "properties": {f"p{i}": {"type": "integer"} for i in range(1900)}})],
        4,
    ),
    "hostile regexes": (
        COMPLETE,
        [pattern("^(x{1000}){1000}$"), pattern("^(.{1,1000}){1,1000}$"), pattern("^(.*a.{300})+$"),
         pattern("^(((a{0,50}){0,50}){0,50}){0,50}$")],
        1,
    ),
    "64 long stop strings": (
        COMPLETE, [{**PROMPT, "stop": [f"{i}" + "a" * 1000 for i in range(64)]}], 4,
    ),
    "a bias for each token": (
        COMPLETE, [{**PROMPT, "logit_bias": {str(i): 1 for i in range(4096)}}], 4,
    ),
    "20 likely tokens, 16 answers": (
        COMPLETE, [{**PROMPT, "logprobs": 20, "n": 16, "max_tokens": 100}], 1,
    ),
    "JSON nested 100,000 deep": (COMPLETE, [[]], 0),  # see below
    "a million numbers": (COMPLETE, [{"prompt": "x", "other": [1] * 1_000_000}], 4),
    "1,000 tools": (
        "/v1/chat/completions",
        [{**chat("x"), "tools": [{"type": "function", "function": {
            "name": f"f{i}", "parameters": {"type": "object", "properties": {
                "a": {"type": "string"}, "b": {"type": "integer"}}}}} for i in range(1000)],
          "tool_choice": "required"}],
        2,
    ),
}  # fmt: skip


def deep(enemy: Enemy) -> None:
    for _ in range(8):
        with enemy.connect() as sock, suppress(OSError):
            sock.sendall(enemy.head(COMPLETE, 200_000) + b"[" * 100_000 + b"]" * 100_000)
            sock.recv(100)


def silent(enemy: Enemy) -> None:
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(enemy.connect())
        time.sleep(LASTS_S / 2)


def slow_sender(enemy: Enemy) -> None:
    with ExitStack() as stack:
        socks = [stack.enter_context(enemy.connect()) for _ in range(20)]
        for byte in enemy.head(COMPLETE, 1000)[:50]:
            for sock in socks:
                sock.sendall(bytes([byte]))
            time.sleep(0.01)


def slow_reader(enemy: Enemy) -> None:
    body = json.dumps({**PROMPT, "stream": True, "logprobs": 5}).encode()
    with ExitStack() as stack:
        for _ in range(8):
            sock = stack.enter_context(enemy.connect())
            sock.sendall(enemy.head(COMPLETE, len(body)) + body)
        time.sleep(LASTS_S)


def cancelled(enemy: Enemy) -> None:
    body = json.dumps({**PROMPT, "stream": True}).encode()
    for _ in range(40):
        with enemy.connect() as sock:
            sock.sendall(enemy.head(COMPLETE, len(body)) + body)
            sock.recv(100)


def short(enemy: Enemy) -> None:
    for _ in range(300):
        with enemy.connect() as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            sock.recv(1000)


def calm(watch: Watch) -> float:
    """Return the longest gap alone, when what went before has ended."""
    for _ in range(10):
        found = watch.gap(lambda: time.sleep(0.1))
        if found < BOUND_S / 3:
            break
    return found


def beside(watch: Watch, enemy: Enemy, attack: Callable[[Enemy], object]) -> tuple[float, float]:
    """Return the longest gap beside an attack, and the time of a short request meanwhile."""
    firsts = list[float]()

    def ask() -> None:
        time.sleep(LASTS_S / 4)
        data, begin = json.dumps({"prompt": "x", "max_tokens": 1}).encode(), time.monotonic()
        with enemy.connect() as sock:
            sock.settimeout(PATIENCE_S)
            sock.sendall(enemy.head(COMPLETE, len(data)) + data)
            while sock.recv(1000):
                pass
        firsts.append(time.monotonic() - begin)

    newcomer = threading.Thread(target=ask)
    newcomer.start()
    gap_s = watch.gap(lambda: attack(enemy))
    newcomer.join()
    return gap_s, firsts[0]


def posted(name: str) -> Callable[[Enemy], object]:
    path, bodies, n = POSTS[name]
    return lambda enemy: enemy.post(path, *bodies, n=n)


ENEMIES: dict[str, Callable[[Enemy], object]] = {
    **{name: posted(name) for name in POSTS},
    "JSON nested 100,000 deep": deep,
    "200 silent connections": silent,
    "20 slow senders": slow_sender,
    "8 slow readers": slow_reader,
    "40 streams that are left": cancelled,
    "300 short connections": short,
}


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with serving("-c", "8192") as server:
        parts = urlsplit(server.url)
        assert parts.hostname and parts.port
        yield parts.hostname, parts.port


@pytest.mark.long
def test_no_hostile_request_makes_a_stream_wait(
    address: tuple[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    watch, enemy = Watch(*address), Enemy(*address)
    rows, bad = list[str](), list[str]()
    try:
        for name, attack in ENEMIES.items():
            for _ in range(TRIES):
                alone_s = calm(watch)
                beside_s, first_s = beside(watch, enemy, attack)
                is_free = POSTS.get(name, (COMPLETE,))[0] != COMPLETE
                if beside_s <= max(BOUND_S, TIMES_ALONE * alone_s) and (
                    not is_free or first_s <= max(FIRST_S, TIMES_ALONE * alone_s)
                ):
                    break
            else:
                bad.append(name)
            figures = " | ".join(f"{s * 1e3:.0f}" for s in (alone_s, beside_s, first_s))
            rows.append(f"| {name} | {figures} |")
    finally:
        watch.close()
    with capsys.disabled():
        print("\n| request | gap alone, ms | beside | first token |", *rows, sep="\n")
    assert not bad
