#!/usr/bin/env python3
"""Put a server under load: clients of mixed lengths, and check every answer.

Starts `moegraph serve`. First each of --requests different requests is answered alone. Then
--clients clients send them at random, as streams or not. Some leave in the middle of an answer,
some read slowly, some send bodies that are no requests, and some send requests of any interface
with one value replaced by another. Every answer must be that of the request alone. Without
--reference rounding may make a greedy answer part from it, where two tokens are nearly as likely:
such places are counted, and their margin must be small; sampled answers are compared in reference
mode only.

Exits with 1 if an answer is lost or wrong, a wrong body is not refused with 4xx, a replaced value
leads to 5xx, the server still waits for requests at the end, or its memory, without the beginnings
of prompts that it keeps up to a cap, grows by more than --grows MiB after the first quarter of the
time.

    scripts/load_server.py tiny --device cpu --reference --seconds 600
    scripts/load_server.py 35b.gguf -np 16 --clients 32 -- --spec mtp
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from _fuzz import mutated

ROOT = Path(__file__).resolve().parents[1]
# Bodies that are no requests.
MALFORMED: tuple[Any, ...] = (
    b"", b"{", b"[1, 2]", b'"text"', b"\xff\xfe", {}, {"prompt": 7.5}, {"prompt": {"a": 1}},
    {"prompt": ["x", 3]}, {"prompt": [-1]}, {"prompt": [1 << 40]}, {"prompt": [[1], []]},
    {"prompt": "x", "max_tokens": "many"}, {"prompt": "x", "max_tokens": -5},
    {"prompt": "x", "temperature": "hot"}, {"prompt": "x", "top_p": 7},
    {"prompt": "x", "stop": [[]]}, {"prompt": "x", "n": 10**6}, {"prompt": "x", "logit_bias": [1]},
    {"prompt": "x", "stream": "perhaps"}, {"prompt": "x" * 10**6, "max_tokens": 1},
)  # fmt: skip
WORDS = (
    "def class return if else for in import from self value name list dict index None True not "
    '( ) : , . = == + - [ ] { } \n 0 1 2 "text" print range len append i j x y'
).split(" ")
# Margin of log probabilities below which rounding may decide between two tokens; see
# docs/correctness.md.
_MARGIN = 0.5
_JSON = {"content-type": "application/json"}
# How a client behaves: weight of each way.
WAYS = {"stream": 6, "whole": 3, "leaves": 2, "slow": 1, "malformed": 1, "fuzzed": 1}


@dataclass
class Wanted:
    """A request, its answer alone, and the margin before the runner-up at each token.

    Where something is added to the logits, the margin is not known and counts as 0.
    """

    body: dict[str, Any]
    text: str = ""
    pieces: list[str] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return bool(self.body["temperature"] == 0)

    def margin_where(self, pieces: list[str]) -> float:
        """Return the margin at the first token at which another answer's tokens differ."""
        pairs = zip(pieces, self.pieces, self.margins)
        return next((margin for other, ours, margin in pairs if other != ours), 0.0)


@dataclass
class Result:
    """What came of all requests. gaps_s: times between tokens, as their clients saw them."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    parted: list[float] = field(default_factory=list)


def requests(n: int, seed: int) -> list[Wanted]:
    """Return different requests: words by chance, of mixed lengths and settings."""
    rng = random.Random(seed)
    found = []
    for i in range(n):
        words = rng.choices(WORDS, k=int(5 * 2 ** rng.uniform(0, 7.5)))
        body: dict[str, Any] = {
            "prompt": " ".join(words),
            "max_tokens": rng.choice((1, 5, 20, 40, 90)),
            "temperature": 0 if i % 3 else 0.9,
            "seed": i,
            "logprobs": 2,
        }
        if i % 5 == 0:
            body["stop"] = ["return", "\n\n"]
        if i % 7 == 0:
            body["frequency_penalty"] = 0.4
        found.append(Wanted(body))
    return found


class Load:
    """Clients of one server."""

    def __init__(self, http: httpx.AsyncClient, is_reference: bool, seed: int) -> None:
        self._http, self._is_reference = http, is_reference
        self._rng = random.Random(seed)
        self.result = Result()

    async def ask_alone(self, wanted: Wanted) -> None:
        """Record the answer of a request that nothing else accompanies."""
        found = (await self._http.post("/v1/completions", json=wanted.body)).json()["choices"][0]
        wanted.text, listed = found["text"], found["logprobs"]
        wanted.pieces = listed["tokens"]
        for p, top in zip(listed["token_logprobs"], listed["top_logprobs"]):
            others = [q for q in sorted(top.values(), reverse=True) if q != p]
            is_known = others and "frequency_penalty" not in wanted.body
            wanted.margins.append(abs(p - others[0]) if is_known else 0.0)

    async def client(self, all_wanted: list[Wanted], until: float) -> None:
        """Send requests one after another."""
        while time.monotonic() < until:
            wanted = self._rng.choice(all_wanted)
            way = self._rng.choices(list(WAYS), list(WAYS.values()))[0]
            try:
                await self._one(wanted, way)
            except Exception as error:  # noqa: BLE001 - whatever it is, an answer is lost
                self.result.wrong.append(f"{way}: {type(error).__name__}: {error}")

    async def _one(self, wanted: Wanted, way: str) -> None:
        self.result.counts[way] += 1
        if way in ("malformed", "fuzzed"):
            await (self._malformed() if way == "malformed" else self._fuzzed())
            return
        body = {**wanted.body}
        if self._is_reference and self._rng.random() < 0.5:
            del body["logprobs"]  # otherwise they tell where an answer parts
        if way == "whole":
            answer = await self._http.post("/v1/completions", json=body)
            if answer.status_code == 429:
                await self._refused(answer)
                return
            found = answer.json()["choices"][0]
            self._compare(wanted, found["text"], _pieces(found), way)
            return
        await self._stream(wanted, body, way)

    async def _malformed(self) -> None:
        body = self._rng.choice(MALFORMED)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await self._http.post("/v1/completions", content=data, headers=_JSON)
        if not (400 <= answer.status_code < 500 and answer.json()["error"]["message"]):
            shown = data[:60].decode(errors="replace")
            self.result.wrong.append(f"{shown} was answered with status {answer.status_code}")

    async def _fuzzed(self) -> None:
        """Send a request with one value replaced: it is answered, or refused with 4xx."""
        path, body = mutated(self._rng)
        answer = await self._http.post(path, content=json.dumps(body), headers=_JSON)
        self.result.counts[f"fuzzed {answer.status_code}"] += 1
        if answer.status_code >= 500:
            sent = json.dumps(body)
            self.result.wrong.append(f"{path} {sent} has status {answer.status_code}")

    async def _refused(self, answer: httpx.Response) -> None:
        self.result.counts["refused"] += 1
        await asyncio.sleep(min(float(answer.headers["retry-after"]), 2.0))

    async def _stream(self, wanted: Wanted, body: dict[str, Any], way: str) -> None:
        text, pieces, n_left = "", list[str](), self._rng.randrange(1, 10)
        start = before = time.perf_counter()
        async with self._http.stream("POST", "/v1/completions", json={**body, "stream": True}) as s:
            if s.status_code == 429:
                await s.aread()
                await self._refused(s)
                return
            is_done = False
            async for line in s.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    is_done = True
                    break
                piece = json.loads(line[6:])
                if "error" in piece:
                    raise RuntimeError(piece["error"]["message"])
                text += piece["choices"][0]["text"]
                pieces += _pieces(piece["choices"][0])
                now = time.perf_counter()
                if way == "slow":
                    await asyncio.sleep(0.2)
                else:
                    (self.result.gaps_s if before > start else self.result.first_s).append(
                        now - before
                    )
                before = now
                n_left -= 1
                if way == "leaves" and not n_left:
                    break
        if way != "leaves":
            if not is_done:
                raise RuntimeError("the stream ended without its last line")
            self._compare(wanted, text, pieces, way)
        elif not is_done and self._is_reference and not wanted.text.startswith(text):
            self.result.wrong.append(f"leaves: {text!r} for {wanted.text!r}")

    def _compare(self, wanted: Wanted, text: str, pieces: list[str], way: str) -> None:
        if text == wanted.text:
            self.result.counts["equal"] += 1
            return
        if not self._is_reference:
            if not wanted.is_greedy:
                self.result.counts["drawn otherwise"] += 1
                return
            margin = wanted.margin_where(pieces)
            self.result.parted.append(margin)
            if margin <= _MARGIN:
                return
        self.result.wrong.append(f"{way}: {text[:200]!r} for {wanted.text[:200]!r}")


def _pieces(choice: dict[str, Any]) -> list[str]:
    """Return the texts of an answer's tokens, if it has their probabilities."""
    return list(choice["logprobs"]["tokens"]) if choice["logprobs"] else []


def rss_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def percentile(values: list[float], share: float) -> float:
    """Return a percentile in milliseconds."""
    ordered = sorted(values) or [0.0]
    return 1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)]


@dataclass(frozen=True)
class Memory:
    """Resident memory of the server, and what of it are beginnings of prompts, which are capped."""

    rss_mib: float
    prefix_mib: float

    @property
    def rest_mib(self) -> float:
        """Return what must not grow."""
        return self.rss_mib - self.prefix_mib


async def memory_of(http: httpx.AsyncClient, pid: int) -> Memory:
    """Return what a server uses now."""
    found = re.search(r"^moegraph_prefix_bytes (\S+)", (await http.get("/metrics")).text, re.M)
    return Memory(rss_mib(pid), float(found[1]) / 2**20 if found else 0.0)


async def run(url: str, pid: int, args: argparse.Namespace) -> tuple[Result, list[Memory]]:
    """Put a server under load; return what came of it, and its memory during the time."""
    timeout, limits = httpx.Timeout(600.0), httpx.Limits(max_connections=args.clients + 4)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits) as http:
        load, wanted = Load(http, args.reference, args.seed), requests(args.requests, args.seed)
        for one in wanted:
            await load.ask_alone(one)
        until, memory = time.monotonic() + args.seconds, [await memory_of(http, pid)]
        clients = [asyncio.create_task(load.client(wanted, until)) for _ in range(args.clients)]
        while time.monotonic() < until:
            await asyncio.sleep(args.seconds / 40)
            memory.append(await memory_of(http, pid))
        await asyncio.gather(*clients)
        return load.result, memory


def report(result: Result, memory: list[Memory], grows: float) -> int:
    """Print what came of it; return the exit status."""
    settled = memory[len(memory) // 4]
    growth = max(one.rest_mib for one in memory[-3:]) - settled.rest_mib
    times = {"first": memory[0], "settled": settled, "middle": memory[len(memory) // 2],
             "last": memory[-1]}  # fmt: skip
    lines = {
        "requests": dict(result.counts),
        "wrong": result.wrong[:10],
        "parted": {"n": len(result.parted), "largest_margin": max(result.parted, default=0.0)},
        "between_tokens_ms": {f"p{p}": round(percentile(result.gaps_s, p / 100), 1)
                              for p in (50, 90, 99)},
        "first_token_ms": {f"p{p}": round(percentile(result.first_s, p / 100), 1)
                           for p in (50, 99)},
        "memory_mib": {name: [round(one.rss_mib), round(one.rest_mib)]
                       for name, one in times.items()},
    }  # fmt: skip
    for name, value in lines.items():
        print(f"{name}: {json.dumps(value)}")
    return int(bool(result.wrong) or not result.counts["equal"] or growth > grows)


class Said:
    """What a server writes to stderr, read all the time: a full pipe would stop it."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        assert server.stderr is not None
        self._stderr, self._lines = server.stderr, list[str]()
        self._reader = threading.Thread(target=lambda: self._lines.extend(self._stderr))

    def address(self) -> str:
        """Print lines up to the one with the server's address, and return that; "" without one."""
        for line in self._stderr:
            if found := re.search(r"served at (\S+)$", line):
                self._reader.start()
                return found[1]
            print(line, end="", file=sys.stderr)
        return ""

    def rest(self) -> str:
        """Return the lines after the one with the address; the server has ended."""
        if self._reader.ident is not None:
            self._reader.join()
        return "".join(self._lines)


def main() -> int:
    """Start a server, load it, and say what came of it."""
    p = argparse.ArgumentParser(
        description=__doc__,
        epilog="Options of the server come after --.",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    p.add_argument("model", help="a GGUF file, or a shipped model's name")
    p.add_argument("--device", default="auto")
    p.add_argument("--reference", action="store_true", help="every answer must be equal (CPU)")
    p.add_argument("-np", "--parallel", type=int, default=8, help="slots of the server")
    p.add_argument("-c", "--ctx-size", type=int, default=4096)
    p.add_argument("--clients", type=int, default=32)
    p.add_argument("--requests", type=int, default=48, help="different requests")
    p.add_argument("--seconds", type=float, default=60.0)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--grows", type=float, default=64.0, metavar="MiB")
    given, more = sys.argv[1:], list[str]()
    if "--" in given:
        given, more = given[: given.index("--")], given[given.index("--") + 1 :]
    args = p.parse_args(given)
    command = [
        sys.executable, "-m", "moegraph", "serve", args.model, "--port", "0",
        "--device", args.device, "-np", str(args.parallel), "-c", str(args.ctx_size),
        *(["--cpu-reference"] if args.reference else []), "--log-format", "off", *more,
    ]  # fmt: skip
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    said = Said(server)
    try:
        url = said.address()
        if not url:
            return 1
        result, memory = asyncio.run(run(url, server.pid, args))
    finally:
        server.terminate()
        code, text = server.wait(60), said.rest()
    status = report(result, memory, args.grows)
    print(f"the server ended with status {code}")
    # nobody asks any more: if it waits for requests, it has lost count of them
    is_late = "waiting up to" in text
    print(text, end="", file=sys.stderr)
    return status or int(is_late)


if __name__ == "__main__":
    sys.exit(main())
