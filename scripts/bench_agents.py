#!/usr/bin/env python3
"""Count what `moegraph serve` computes again of conversations as agents have them.

Clients take turns. Each sends the same system prompt and tools, then its whole conversation with
every request. It leaves out the first half of each answer, as templates leave out reasoning, and
after some requests it edits a message in the middle. A line for each client says how many tokens
its prompts had, how many of them the server computed, and how many no earlier prompt began with:
fewer cannot be computed. The last line has the bytes that are kept, and the limit.

    scripts/bench_agents.py tiny --device cpu --turns 30 --out agents.jsonl
    scripts/bench_agents.py 35b.gguf --cache-ram 2048
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from bench_server import ROOT, WORDS, Stream, free_port, served

Message = dict[str, Any]
TOOLS = [
    {"type": "function", "function": {
        "name": name, "description": f"Work with a file: {name}.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}}
    for name in ("read_file", "write_file", "list_files", "run_tests")
]  # fmt: skip
# After so many requests, a client edits a message in the middle.
EDITED_AFTER = 7


def asked(port: int, method: str, path: str, body: object = None) -> bytes:
    """Return the body of an answer.

    Raises:
        RuntimeError: its status is not 200.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    text = None if body is None else json.dumps(body)
    connection.request(method, path, text, {"content-type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{path}: {answer.status} {content[:200]!r}")
    return content


def tokens_of(port: int, messages: list[Message]) -> list[int]:
    """Return the ids of a prompt."""
    body: dict[str, Any] = {"messages": messages, "tools": TOOLS}
    text = json.loads(asked(port, "POST", "/apply-template", body))["prompt"]
    body = {"content": text, "parse_special": True}
    return list(json.loads(asked(port, "POST", "/tokenize", body))["tokens"])


def n_known(ids: list[int], earlier: list[list[int]]) -> int:
    """Return how many first tokens of a prompt some earlier one has too."""
    most = 0
    for other in earlier:
        n = next((i for i, (a, b) in enumerate(zip(ids, other)) if a != b), len(other))
        most = max(most, min(n, len(ids)))
    return most


class Agent:
    """A client, what its prompts had, and what the server computed of them."""

    def __init__(self, seed: int, system: str) -> None:
        self._rng = random.Random(seed)
        self._messages: list[Message] = [{"role": "system", "content": system}]
        self.n_requests = self.n_tokens = self.n_computed = self.n_new = 0

    def words(self, n: int) -> str:
        """Return some words."""
        return " ".join(self._rng.choices(WORDS, k=n))

    def ask(self, port: int, earlier: list[list[int]], n_answer: int) -> None:
        """Send the next request; earlier: the prompts of all clients, to which it is added."""
        if self.n_requests % EDITED_AFTER == EDITED_AFTER - 1:
            self._messages[len(self._messages) // 4 * 2 + 1]["content"] = self.words(12)
        self._messages.append({"role": "user", "content": self.words(self._rng.randrange(10, 60))})
        ids = tokens_of(port, self._messages)
        body = {"messages": self._messages, "tools": TOOLS, "max_tokens": n_answer,
                "temperature": 0, "ignore_eos": True}  # fmt: skip
        answer = Stream(port, "/v1/chat/completions", body).send().done()
        n_cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
        self.n_requests += 1
        self.n_tokens += answer.usage["prompt_tokens"]
        self.n_computed += answer.usage["prompt_tokens"] - n_cached
        self.n_new += len(ids) - n_known(ids, earlier)
        earlier.append(ids)
        said = answer.text[len(answer.text) // 2 :]
        self._messages.append({"role": "assistant", "content": said})


def metric(port: int, name: str) -> float:
    """Return a number of /metrics."""
    lines = asked(port, "GET", "/metrics").decode().splitlines()
    return float(next(line for line in lines if line.startswith(name + " ")).split()[1])


def main() -> int:
    """Run the conversations; print lines, and append them to a file."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("model", help="a GGUF file, or the name of a shipped model")
    p.add_argument("--device", default="auto")
    p.add_argument("--clients", type=int, default=3)
    p.add_argument("--turns", type=int, default=30)
    p.add_argument("--answer", type=int, default=60, help="tokens of each answer")
    p.add_argument("--system", type=int, default=300, help="words of the system prompt")
    p.add_argument("-c", "--ctx-size", type=int, default=16384)
    p.add_argument("--cache-ram", type=int, default=8192, metavar="MiB")
    p.add_argument("--out", type=Path, metavar="FILE", help="append JSON lines here")
    args = p.parse_args()
    port, env = free_port(), dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "moegraph", "serve", args.model, "--device", args.device,
               "--port", str(port), "-np", "2", "-c", str(args.ctx_size), "--log-format", "off",
               "--cache-ram", str(args.cache_ram)]  # fmt: skip
    system = " ".join(random.Random(0).choices(WORDS, k=args.system))
    agents, most = [Agent(i, system) for i in range(args.clients)], 0.0
    earlier: list[list[int]] = []
    with served(command, port, env):
        for _ in range(args.turns):
            for agent in agents:
                agent.ask(port, earlier, args.answer)
                most = max(most, metric(port, "moegraph_prefix_bytes"))
        rows: list[dict[str, object]] = [
            {"client": i, "requests": a.n_requests, "prompt_tokens": a.n_tokens,
             "computed": a.n_computed, "new": a.n_new}
            for i, a in enumerate(agents)
        ]  # fmt: skip
        places = int(metric(port, "moegraph_prefix_places"))
    rows.append({"places": places, "most_mib": round(most / 2**20, 1), "limit_mib": args.cache_ram})
    for row in rows:
        print(json.dumps(row))
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"model": args.model, **row}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
