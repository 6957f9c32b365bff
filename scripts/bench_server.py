#!/usr/bin/env python3
"""Measure `moegraph serve` over HTTP, beside llama-server on the same file.

One server after the other: tokens a second and the time between tokens for several numbers of
clients; with --long also while a long prompt comes in, and the second turn of a long conversation;
with --mixed what clients get that ask again and again, with prompts of 50 to 3,000 tokens (fewer
where the context is small), once more with prompts that are kept.

Prompts are token ids, answers are greedy and have a fixed length. A character that takes several
tokens comes as one piece of a stream: the time before it counts as that of several tokens, if the
server says how many there are (`timings_per_token`). With an NVIDIA driver, the last line of each
server has its peak of device memory.

    scripts/bench_server.py 35b.gguf --llama-server bin/llama-server --long --out server.jsonl
    scripts/bench_server.py tiny --device cpu --clients 1 4 --tokens 30
    scripts/bench_server.py 35b.gguf --clients --mixed 20 --before ../older
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench

# Ids of prompts: the first ones of a vocabulary are bytes and common pieces.
IDS = range(100, 900)
WORDS = "time year people way day man thing woman life child world school state family".split()
# Seconds to wait for a server that loads a model.
LOADING_S = 240
# Seconds from loading to the start.
SETTLE_S = 2.0


class Stream(threading.Thread):
    """One streamed request; `send` begins it.

    times: when its pieces came; counts: tokens up to each of them; begun: when it was sent.
    """

    def __init__(self, port: int, path: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.times: list[float] = []
        self.counts: list[int] = []
        self.text = ""
        self.usage: dict[str, Any] = {}
        self.error = ""
        self._leaves = threading.Event()
        self._port, self._path = port, path
        self._body = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
        self.begun = 0.0

    def send(self) -> Stream:
        """Begin."""
        self.begun = time.perf_counter()
        self.start()
        return self

    def run(self) -> None:
        """Send the request and note the pieces."""
        try:
            self._run()
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = self.error or f"{type(error).__name__}: {error}"

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        head = {"content-type": "application/json"}
        connection.request("POST", self._path, self._body, head)
        answer = connection.getresponse()
        if answer.status != 200:
            self.error = answer.read().decode(errors="replace")[:300]
        while not (self.error or self._leaves.is_set()):
            line, now = answer.readline(), time.perf_counter()
            if line.startswith(b"data: [DONE]"):
                break
            if not line:
                self.error = "the answer ended without its last line"
            if line.startswith(b"data: "):
                self._note(line[6:], now)
        connection.close()
        if not self.times:  # tokens without text alone
            self.times.append(time.perf_counter())
            self.counts.append(1)

    def _note(self, data: bytes, now: float) -> None:
        piece = json.loads(data)
        if "error" in piece:
            self.error = str(piece["error"])[:300]
        self.usage = piece.get("usage") or self.usage
        for choice in piece.get("choices", ()):
            delta = choice.get("delta", {})
            text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
            self.text += text or ""
            if text is not None:
                self.times.append(now)
                n = (piece.get("timings") or {}).get("predicted_n")
                self.counts.append(n or (self.counts[-1] if self.counts else 0) + 1)

    def leave(self) -> None:
        """Close the connection after the next piece."""
        self._leaves.set()
        self.join()

    def done(self) -> Stream:
        """Wait for the end."""
        self.join()
        if self.error:
            raise RuntimeError(self.error)
        return self


def completion(port: int, n_prompt: int, n_tokens: int, seed: int, is_kept: bool = False) -> Stream:
    """Return a request of random ids, to be continued by a fixed number of tokens.

    is_kept: the prompt may be kept for later ones, though none goes on from it.
    """
    ids = random.Random(seed).choices(IDS, k=n_prompt)
    body = {"prompt": ids, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True,
            "cache_prompt": is_kept, "timings_per_token": True}  # fmt: skip
    return Stream(port, "/v1/completions", body)


def ms(values: list[float], share: float) -> float:
    """Return a percentile of seconds in milliseconds."""
    ordered = sorted(values) or [0.0]
    return round(1e3 * ordered[min(int(share * len(ordered)), len(ordered) - 1)], 2)


def gaps(streams: list[Stream], start: float = 0.0, end: float = 1e18) -> list[float]:
    """Return the times between tokens that came between two moments."""
    found: list[float] = []
    for s in streams:
        for a, b, n in zip(s.times, s.times[1:], map(int.__sub__, s.counts[1:], s.counts)):
            if start <= b <= end:
                found += [(b - a) / max(n, 1)] * max(n, 1)
    return found


def throughput(port: int, n: int, n_tokens: int, seed: int) -> dict[str, float | None]:
    """Return what n clients get, prompts of mixed lengths included.

    tokens_per_s counts everything; decode_per_s, from when half of the answers have begun until
    half have ended. It is None if no token came between these, as where answers are short.
    """
    seed += 100 * n  # no prompt comes twice
    rng = random.Random(seed)
    streams = [completion(port, rng.randrange(16, 400), n_tokens, seed + i) for i in range(n)]
    start = time.perf_counter()
    for one in streams:
        one.send()
    for one in streams:
        one.done()
    seconds = time.perf_counter() - start
    between = gaps(streams)
    first = statistics.median(s.times[0] for s in streams)
    last = statistics.median(s.times[-1] for s in streams)
    n_between = len(gaps(streams, first, last)) if last > first else 0
    return {
        "tokens_per_s": round(n * n_tokens / seconds, 1),
        "decode_per_s": round(n_between / (last - first), 1) if n_between else None,
        "between_p50_ms": ms(between, 0.5),
        "between_p99_ms": ms(between, 0.99),
        "first_p50_ms": ms([s.times[0] - s.begun for s in streams if s.times], 0.5),
    }


def long_prompt(port: int, n: int, n_prompt: int, seed: int) -> dict[str, float]:
    """Return what a long prompt does to n clients whose answers are under way."""
    streams = [completion(port, 32, 1500, seed + 5000 + i).send() for i in range(n)]
    long = completion(port, n_prompt, 4, seed + 5999)  # now: threads that note times run beside it
    while any(len(s.times) < 30 and s.is_alive() for s in streams):
        time.sleep(0.01)
    settled = time.perf_counter()
    time.sleep(0.5)
    first = long.send().done()
    ended = time.perf_counter()
    time.sleep(0.5)
    for one in streams:
        one.leave()
        if one.error:
            raise RuntimeError(one.error)
    # contexts grow, so what is usual is measured before and after
    usual = gaps(streams, settled, first.begun) + gaps(streams, ended + 0.1)
    beside = gaps(streams, first.begun, first.times[0])
    if not (usual and beside):
        raise RuntimeError("the answers ended before the long prompt was read; give more context")
    return {
        "usual_p50_ms": ms(usual, 0.5),
        "beside_p50_ms": ms(beside, 0.5),
        "beside_p99_ms": ms(beside, 0.99),
        "p99_over_usual": round(ms(beside, 0.99) / max(ms(usual, 0.5), 1e-9), 2),
        "first_s": round(first.times[0] - first.begun, 3),
    }


def chat_beside(port: int, n_prompt: int, seed: int) -> dict[str, float]:
    """Return how long a prompt of 200 tokens waits beside a long one, and the long one's time."""
    long = completion(port, n_prompt, 4, seed + 7000).send()
    time.sleep(0.2)
    short = completion(port, 200, 4, seed + 7001).send().done()
    long.done()
    return {
        "short_first_s": round(short.times[0] - short.begun, 3),
        "long_first_s": round(long.times[0] - long.begun, 3),
    }


class Asking(threading.Thread):
    """A client that asks again and again until a moment; `streams` are its requests.

    longest: tokens of prompts, at most; answers have 64 to 300.
    """

    def __init__(self, port: int, end: float, seed: int, longest: int, is_kept: bool) -> None:
        super().__init__(daemon=True)
        self.streams: list[Stream] = []
        self._port, self._end, self._seed = port, end, seed
        self._longest, self._is_kept = longest, is_kept

    def run(self) -> None:
        """Ask; the answer that is under way at the end is left."""
        rng = random.Random(self._seed)
        while (left := self._end - time.perf_counter()) > 0 and not self.error:
            n_prompt, n_tokens = rng.randint(50, self._longest), rng.randint(64, 300)
            seed = self._seed + len(self.streams)
            one = completion(self._port, n_prompt, n_tokens, seed, self._is_kept)
            self.streams.append(one.send())
            one.join(left)
        self.streams[-1].leave()

    @property
    def error(self) -> str:
        """Return why the last request failed, if it did."""
        return self.streams[-1].error if self.streams else ""


def mixed(
    longest: int, is_kept: bool, port: int, n: int, seconds: int, seed: int
) -> dict[str, float]:
    """Return what n clients get that ask again and again, after a fifth of the time."""
    start = time.perf_counter() + seconds / 5
    end = start + seconds * 4 / 5
    clients = [Asking(port, end, seed + 1000 * i, longest, is_kept) for i in range(n)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
        if client.error:
            raise RuntimeError(client.error)
    streams = [one for client in clients for one in client.streams]
    begun = [one for one in streams if one.times and start <= one.times[0] <= end]
    first, between = [one.times[0] - one.begun for one in begun], gaps(streams, start, end)
    return {
        "tokens_per_s": round((len(between) + len(begun)) / (end - start), 1),
        "between_p50_ms": ms(between, 0.5),
        "between_p99_ms": ms(between, 0.99),
        "p99_over_p50": round(ms(between, 0.99) / max(ms(between, 0.5), 1e-9), 2),
        "first_p50_ms": ms(first, 0.5),
        "first_p99_ms": ms(first, 0.99),
        "answers": len(begun),
    }


def count_tokens(port: int, text: str) -> int:
    """Return how many tokens a text has."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body, head = json.dumps({"content": text}), {"content-type": "application/json"}
    connection.request("POST", "/tokenize", body, head)
    found = json.loads(connection.getresponse().read())
    connection.close()
    return len(found["tokens"])


def second_turn(port: int, n_tokens: int, seed: int) -> dict[str, float]:
    """Return the times to the first token of both turns of a conversation of n_tokens tokens."""
    rng = random.Random(f"{n_tokens} {seed}")
    words = rng.choices(WORDS, k=n_tokens)
    n_each = count_tokens(port, " ".join(words[:1000])) / min(n_tokens, 1000)
    text = " ".join(words[: int(n_tokens / n_each)])
    messages = [{"role": "user", "content": text}]
    found: dict[str, float] = {}
    for turn in ("first", "second"):
        body = {"messages": messages, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = Stream(port, "/v1/chat/completions", body).send().done()
        found[f"{turn}_turn_s"] = round(answer.times[0] - answer.begun, 3)
        found[f"{turn}_n_prompt"] = answer.usage.get("prompt_tokens", 0)
        details = answer.usage.get("prompt_tokens_details") or {}
        found[f"{turn}_n_cached"] = details.get("cached_tokens", 0)
        messages.append({"role": "assistant", "content": answer.text})
        messages.append({"role": "user", "content": "And now the same once more, please."})
    return found


@contextmanager
def served(command: list[str], port: int, env: dict[str, str]) -> Iterator[Callable[[], str]]:
    """Run a server from when its health is good to the end of the block.

    The block gets a function: exit code and last words of a server that has ended, else "".
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=env)

        def why_it_ended() -> str:
            try:
                code = process.wait(1.0)  # a connection may break a moment before
            except subprocess.TimeoutExpired:
                return ""
            return f"exit code {code}: {bench.last_words(log, 3)}"

        try:
            end = time.monotonic() + LOADING_S
            while not _is_healthy(port):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{command[0]} does not come up: {bench.last_words(log)}")
                time.sleep(0.2)
            yield why_it_ended
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()  # its memory on the device is free for the next one


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


Work = Callable[..., Mapping[str, float | None]]


def works(args: argparse.Namespace) -> Iterator[tuple[str, int, Work, tuple[int, ...], int]]:
    """Yield what is measured: its name, clients, the work, what it is given, and a smaller size.

    That replaces the last of what is given once, before the samples that count.
    """
    for n in args.clients:
        yield "clients", n, throughput, (n, args.tokens), max(12, args.tokens // 4)
    for is_kept in (False, True) if args.mixed else ():
        what, n = f"mixed{', kept' * is_kept}", args.beside
        work = partial(mixed, min(3000, args.ctx_size // n - 300), is_kept)
        yield what, n, work, (n, args.mixed), args.mixed // 2
    if args.long:
        yield "long prompt", args.beside, long_prompt, (args.beside, args.prompt), args.prompt
        yield "second turn", 1, second_turn, (args.turn,), args.turn // 4
        yield "chat beside a prompt", 2, chat_beside, (args.turn,), args.turn // 4


def measure(
    name: str, command: list[str], port: int, env: dict[str, str], args: argparse.Namespace
) -> Iterator[bench.Line]:
    """Yield the lines of a server: what was found, or the error; it is started again if it ends."""
    left = [(one, at) for one in works(args) for at in range(args.samples + 1)]
    while left:
        with served(command, port, env) as why_it_ended:
            time.sleep(SETTLE_S)
            ended = ""
            while left and not ended:
                (what, n, work, given, smaller), at = left.pop(0)
                line = {"server": name, "what": what, "clients": n}
                given = given if at else (*given[:-1], smaller)
                try:
                    found = work(port, *given, 10_000 * at)
                except (RuntimeError, OSError, http.client.HTTPException) as error:
                    ended = why_it_ended()
                    why = f"{error}; the server ended with {ended}" if ended else str(error)
                    yield {**line, "error": why}
                else:
                    if at:
                        yield {**line, **found}


def of_tree(folder: Path) -> dict[str, str]:
    """Return the environment in which `python -m moegraph` is that of a tree.

    Without the second variable it would be that of the working directory.
    """
    if sys.version_info < (3, 11):
        raise bench.BenchError("--before needs Python 3.11 or later")
    return bench.with_path("PYTHONPATH", folder.resolve()) | {"PYTHONSAFEPATH": "1"}


def commands(args: argparse.Namespace, port: int) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return name, command and environment of each server."""
    slots = str(max([*args.clients, args.beside + args.long]))
    common = ["--port", str(port), "-np", slots, "-c", str(args.ctx_size), "-ub", str(args.ubatch)]
    ours = [sys.executable, "-m", "moegraph", "serve", str(args.model), "--log-format", "off",
            *common, "--device", args.device, *args.ours.split()]  # fmt: skip
    found = {"moegraph": (ours, bench.with_path("PYTHONPATH", bench.ROOT))}
    if args.before:
        trees = {"moegraph": bench.ROOT, "before": args.before}
        found = {name: (ours, of_tree(folder)) for name, folder in trees.items()}
    if args.llama_server:
        theirs = [str(args.llama_server), "-m", str(args.model), "--kv-unified", "-fa", "on",
                  *common, "-b", str(max(args.ubatch, 2048)), *args.theirs.split()]  # fmt: skip
        found["llama-server"] = (theirs, bench.with_libraries(args.llama_server))
    return found


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.bench_parser(__doc__, samples=1)
    p.add_argument("--llama-server", type=bench.existing, metavar="FILE")
    p.add_argument("--ours", default="", metavar="OPTIONS", help="more options of moegraph serve")
    p.add_argument("--theirs", default="-ngl 99", metavar="OPTIONS", help="of llama-server")
    p.add_argument("-c", "--ctx-size", type=int, default=40960)
    p.add_argument("-ub", "--ubatch", type=int, default=512, help="of both servers")
    p.add_argument("--clients", type=int, nargs="*", default=[1, 4, 8, 16, 32])
    p.add_argument("--tokens", type=int, default=128, help="of each answer")
    p.add_argument("--long", action="store_true", help="a long prompt, and a second turn")
    p.add_argument("--mixed", type=int, default=0, metavar="SECONDS", help="of the mixed load")
    p.add_argument("--before", type=bench.existing, metavar="FOLDER", help="an older tree too")
    p.add_argument("--beside", type=int, default=8,
                   help="clients beside the long prompt, and of the mixed load")  # fmt: skip
    p.add_argument("--prompt", type=int, default=8192, help="tokens of the long prompt")
    p.add_argument("--turn", type=int, default=20000, help="tokens of the conversation")
    return p


def compare(args: argparse.Namespace) -> None:
    """Measure each server; print lines, and append them to a file."""
    port, speeds = free_port(), dict[tuple[str, str, int], list[float]]()
    for name, (command, env) in commands(args, port).items():
        with bench.MemoryWatch() as watch:
            for line in measure(name, command, port, env, args):
                bench.note(args.out, line)
                if "tokens_per_s" in line:
                    key = name, line["what"], line["clients"]
                    speeds.setdefault(key, []).append(line["tokens_per_s"])
        if watch.n_bytes > 0:
            peak = round(watch.n_bytes / 2**30, 2)
            bench.note(args.out, {"server": name, "what": "memory", "device_gib": peak})
    rows = [[*map(str, key), f"{statistics.median(found):.1f}"] for key, found in speeds.items()]
    print(bench.table(["server", "what", "clients", "tok/s"], rows), end="")


if __name__ == "__main__":
    sys.exit(bench.main(parser(), compare))
