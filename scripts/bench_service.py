#!/usr/bin/env python3
"""Measure a service without HTTP: tokens a second by clients, and gaps while a prompt comes in.

First, --clients requests at a time decode --tokens tokens each. Then --beside requests decode while
a prompt of --prompt tokens is read: the time between their tokens before and beside it, its time
to the first token, and what it takes alone. Prompts are random; nothing is reused.

    scripts/bench_service.py 35b.gguf
    scripts/bench_service.py tiny --device cpu --clients 1 4 --prompt 2000 --tokens 40
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
from bench_drafts import with_share

from moegraph import Engine, EngineConfig, SamplingParams
from moegraph.engine.service import Service
from moegraph.loop.requests import Request, Step

GREEDY = SamplingParams(temperature=0.0)


class Client:
    """One request; tokens: of the answer so far. times: when each of them came."""

    def __init__(self, service: Service, prompt: list[int], n_tokens: int) -> None:
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.last: Step | None = None
        self._done = threading.Event()
        self.begun = time.perf_counter()
        request = Request(
            prompt, GREEDY, max_tokens=n_tokens, ignore_eos=True, text=False, reuse=False
        )
        self.ticket = service.submit(request, self._take)

    def _take(self, step: Step) -> None:
        self.times += [time.perf_counter()] * len(step.tokens)
        self.tokens += step.tokens
        if step.finish_reason:
            self.last = step
            self._done.set()

    def wait(self) -> Client:
        """Wait for the last step."""
        self._done.wait()
        if self.last and self.last.error:
            raise self.last.error
        return self


def prompt_of(engine: Engine, n: int, seed: int) -> list[int]:
    """Return random token ids."""
    rng = np.random.default_rng(seed)
    found: list[int] = rng.integers(0, engine.hparams.n_vocab, n).tolist()
    return found


def rate(clients: Sequence[Client]) -> float:
    """Return the tokens a second of clients, from when all decode to when the first ends."""
    start, end = max(c.times[0] for c in clients), min(c.times[-1] for c in clients)
    if end <= start:
        raise bench.BenchError(
            f"texts of {len(clients[0].tokens)} tokens are too short to have a part that all "
            f"clients decode (clients: {len(clients)}); give more --tokens"
        )
    n_drawn = sum(sum(start < at <= end for at in client.times) for client in clients)
    return n_drawn / (end - start)


def decode(service: Service, engine: Engine, n: int, n_tokens: int, seed: int) -> list[Client]:
    """Return n requests that have been answered."""
    clients = [Client(service, prompt_of(engine, 24, seed + i), n_tokens) for i in range(n)]
    return [client.wait() for client in clients]


def beside(service: Service, engine: Engine, n: int, n_prompt: int, seed: int) -> dict[str, float]:
    """Return what a long prompt does to n requests that decode, in milliseconds."""
    alone = Client(service, prompt_of(engine, n_prompt, seed), 1).wait()
    n_most = engine.n_ctx // (n + 1) - 64 if engine.config.n_kv else engine.n_ctx - 64
    clients = [Client(service, prompt_of(engine, 24, seed + i), n_most) for i in range(1, n + 1)]
    while min(len(client.times) for client in clients) < 60:
        if any(client.wait() for client in clients if client.last):
            raise bench.BenchError("an answer ended before the prompt began: too little context")
        time.sleep(0.001)
    time.sleep(0.3)
    begun = time.perf_counter()
    first = Client(service, prompt_of(engine, n_prompt, seed + 99), 1).wait().times[0]
    time.sleep(0.5)
    for client in clients:
        client.ticket.cancel()
        client.wait()
    gaps = [(at, at - before) for c in clients for before, at in zip(c.times[20:], c.times[21:])]
    # contexts grow, so what is usual is measured before and after
    usual = [gap for at, gap in gaps if at < begun or at - gap > first]
    slowed = [gap for at, gap in gaps if begun <= at <= first]
    median = float(np.median(usual))
    p99 = float(np.percentile(slowed, 99)) if slowed else 0.0
    return {
        "usual_ms": 1e3 * median,
        "beside_median_ms": 1e3 * float(np.median(slowed)) if slowed else 0.0,
        "beside_p99_ms": 1e3 * p99,
        "p99_over_usual": p99 / median,
        "first_token_s": first - begun,
        "first_token_alone_s": alone.times[0] - alone.begun,
    }


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("model", type=bench.model_path, help="a GGUF file, or a shipped model's name")
    bench.add_common(p, samples=3)
    p.add_argument("--clients", type=bench.positive, nargs="+", default=[1, 4, 8, 16, 32])
    p.add_argument("--tokens", type=bench.positive, default=200, help="of each answer")
    p.add_argument("--beside", type=bench.positive, default=8, help="requests beside the prompt")
    p.add_argument("--prompt", type=bench.positive, default=8192, help="tokens of the prompt")
    p.add_argument("--vram", default="auto", help="device memory in GiB, as of moegraph")
    p.add_argument("--spec", default="off", help="what drafts, as of moegraph")
    p.add_argument("--share", type=float, default=100, help="percent of the experts with slots")
    return p


def measure(args: argparse.Namespace) -> None:
    """Measure, print lines, and append the raw ones."""
    clock, raw = bench.Clock(args.time_limit), bench.Raw("bench_service", args)
    n_seq = max(*args.clients, args.beside + 1)
    n_ctx = args.prompt + 2048 * (args.beside + 1)
    given = {"device": args.device, "vram": args.vram, "n_ctx": n_ctx, "spec": args.spec}
    if args.threads:
        given["n_threads"] = args.threads
    config = with_share(EngineConfig(n_seq=n_seq, n_kv=-1, **given), args.model, args.share)
    with Engine.load(args.model, config) as engine:
        service = Service(engine)
        service.start()
        try:
            for at in range(args.samples + 1):  # graphs are built in the first
                for n in args.clients:
                    clock.left()
                    clients = decode(service, engine, n, args.tokens, 1000 * at)
                    if at:
                        speed = rate(clients)
                        raw.add("throughput", at=at, clients=n, tokens_per_s=speed)
                        print(f"{n} clients: {speed:.1f} tok/s", flush=True)
                clock.left()
                seed = 1000 * at + 500
                found = beside(service, engine, args.beside, args.prompt, seed)
                if at:
                    raw.add("beside", at=at, clients=args.beside, **found)
                    shown = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
                    print(f"{args.prompt} tokens beside {args.beside}: {shown}", flush=True)
        finally:
            service.close()


def main() -> int:
    """Run the command line and return the exit code."""
    args = parser().parse_args()
    return bench.guarded("bench_service.py", lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
