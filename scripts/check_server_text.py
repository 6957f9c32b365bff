#!/usr/bin/env python3
"""Check that `moegraph serve` and llama-server answer the same requests with the same texts.

One client, greedy, on the CPU, the same -ub, llama-server without checkpoints of its prompt cache:
chats of several turns and plain completions. Prints the first difference of each pair. The exit
status is 1 if texts differ; --limit allows some that part at a near tie.

    scripts/check_server_text.py build/llama-server moegraph/models/tiny.gguf
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import _bench as bench
from bench_server import commands, free_port, served

ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = (
    "Write a function that reverses a list.",
    "What does this do?\n\n    for i in range(3):\n        print(i)",
    "class Stack:\n    def push(self, x):",
    "Naïve café: ünïcode, 日本語 and 🙂 in one line.",
)
Request = tuple[str, dict[str, Any]]


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument(
        "llama_server", type=bench.existing, help="llama-server, its libraries beside it"
    )
    p.add_argument("model", type=bench.existing, help="a GGUF file")
    p.add_argument("--requests", type=bench.positive, default=20, help="of each kind")
    p.add_argument("--tokens", type=bench.positive, default=48, help="of each answer")
    p.add_argument("--limit", type=int, default=0, help="texts that may differ")
    p.add_argument("-ub", "--ubatch", type=bench.positive, default=64, help="of both servers")
    p.add_argument("-c", "--ctx-size", type=bench.positive, default=2048)
    return p


def requests(n: int, n_tokens: int) -> Iterator[Request]:
    """Yield n completions and n chats; every third chat goes on where the last one ended."""
    source = (ROOT / "moegraph" / "units.py").read_text(encoding="utf-8")
    common = {"max_tokens": n_tokens, "temperature": 0, "seed": 1}
    for i in range(n):
        yield "/v1/completions", {"prompt": source[40 * i : 40 * i + 20 + 60 * i], **common}
    messages: list[dict[str, str]] = []
    for i in range(n):
        if i % 3 == 0:
            messages = []
            if i % 2:
                messages.append({"role": "system", "content": "You write short Python."})
        messages = [*messages, {"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}]
        yield "/v1/chat/completions", {"messages": messages, **common}
        messages = [*messages, {"role": "assistant", "content": f"Answer {i}."}]


def ask(port: int, path: str, body: dict[str, Any]) -> tuple[str, int]:
    """Return the text of an answer, reasoning included, and the tokens of the prompt."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(),
        {"content-type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=300) as reply:
        found = json.load(reply)
    choice = found["choices"][0]
    message = choice.get("message", {})
    text = choice.get("text") or ""
    text += (message.get("reasoning_content") or "") + (message.get("content") or "")
    return text, found["usage"]["prompt_tokens"]


def compare(
    ours: list[tuple[str, int]], theirs: list[tuple[str, int]], asked: list[Request]
) -> int:
    """Print where answers differ; return how many do."""
    n_different = 0
    for i, (mine, other, (path, _)) in enumerate(zip(ours, theirs, asked)):
        if mine == other:
            continue
        n_different += 1
        at = next((j for j, (a, b) in enumerate(zip(mine[0], other[0])) if a != b), -1)
        print(f"{path} {i}: {mine[1]} and {other[1]} prompt tokens; they part at character {at}:")
        print(f"  moegraph     {mine[0][max(at, 0) :][:60]!r}")
        print(f"  llama-server {other[0][max(at, 0) :][:60]!r}")
    return n_different


def main() -> int:
    """Ask both, compare, and return the exit status."""
    args = parser().parse_args()
    args.model, args.llama_server = str(args.model), str(args.llama_server)
    args.clients, args.beside, args.device = [1], 0, "cpu"
    args.ours = "--spec off -t 1 -tb 1 --cache-ram 0"
    args.theirs = "-t 1 -tb 1 -ctxcp 0 -cram 0 --no-repack --no-warmup"
    asked, port = list(requests(args.requests, args.tokens)), free_port()
    answers: dict[str, list[tuple[str, int]]] = {}
    for name, (command, env) in commands(args, port).items():
        with served(command, port, env):
            answers[name] = [ask(port, path, body) for path, body in asked]
    n_different = compare(answers["moegraph"], answers["llama-server"], asked)
    print(f"{len(asked) - n_different} of {len(asked)} texts are equal")
    return 0 if n_different <= args.limit else 1


if __name__ == "__main__":
    sys.exit(main())
