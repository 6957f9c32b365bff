#!/usr/bin/env python3
"""Measure --spec auto with several clients at a time: each drafter alone, and none, in turn.

Each client continues a prompt of its own, greedily. Weights may be random: every draft and every
pass costs what it costs, and a script says how many drafted tokens a step accepts, as often as
scripts/bench_drafts.py says for the kind of text. So texts differ with and without drafts. What
counts is the tokens a second of all, from when every client decodes until the first ends.

    scripts/bench_drafts_clients.py 35b.gguf --draft dflash.gguf --clients 1 4 8
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
import numpy as np
from bench_drafts import RATES, drafting, turns

from moegraph.bench.scripted import ScriptedAccept
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.engine.service import Service
from moegraph.loop.requests import Request, Step
from moegraph.sampling import SamplingParams


class Client:
    """One request. times: when each token of the answer came."""

    def __init__(self, service: Service, prompt: Sequence[int], n_tokens: int) -> None:
        self.times: list[float] = []
        self._last: Step | None = None
        self._done = threading.Event()
        request = Request(prompt, SamplingParams(temperature=0.0), max_tokens=n_tokens,
                          ignore_eos=True, text=False, reuse=False)  # fmt: skip
        service.submit(request, self._take)

    def _take(self, step: Step) -> None:
        self.times += [time.perf_counter()] * len(step.tokens)
        if step.finish_reason:
            self._last = step
            self._done.set()

    def wait(self) -> list[float]:
        """Wait for the end of the answer; return when its tokens came.

        Raises:
            MoegraphError: the request has failed.
        """
        self._done.wait()
        if self._last and self._last.error:
            raise self._last.error
        return self.times


def serve(engine: Engine, n_clients: int, args: argparse.Namespace) -> float:
    """Return the tokens a second of clients of a new service.

    Raises:
        BenchError: the answers are so short that no token came while all decoded.
    """
    rng = np.random.default_rng(n_clients)
    prompts = rng.integers(0, engine.hparams.n_vocab, (n_clients, args.depth)).tolist()
    service = Service(engine)
    service.start()
    try:
        clients = [Client(service, prompt, args.tokens) for prompt in prompts]
        times = [client.wait() for client in clients]
    finally:
        service.close()
    start, end = max(one[0] for one in times), min(one[-1] for one in times)
    n_drawn = sum(start < at <= end for one in times for at in one)
    if not n_drawn:
        raise bench.BenchError("no token came while all clients decoded; raise --tokens")
    return n_drawn / (end - start)


def measure(args: argparse.Namespace) -> Iterator[bench.Line]:
    """Yield the row of each way for each number of clients."""
    n_seq = max(args.clients)
    config = EngineConfig(
        device=args.device, profile="none", n_draft=31, n_seq=n_seq, spec="auto", draft=args.draft,
        n_ctx=(args.depth + args.tokens + 64) * n_seq,
    )  # fmt: skip
    with Engine.load(args.model, config) as engine:
        found = engine.speculation.drafters if engine.speculation else {}
        drafters = {name: one for name, one in found.items() if name != "lookup"}
        if not drafters:
            raise bench.BenchError("by the plan, no drafter pays here")
        for n in args.clients:
            ways = {"off": None} | {
                name: drafting(engine, [one], config) for name, one in drafters.items()
            }
            for name, one in ways.items():
                if one:
                    rates = RATES[args.kind]
                    one.accept = ScriptedAccept(rates["mtp" if name == "mtp" else "dflash"])
            speeds: dict[str, list[float]] = {way: [] for way in ways}
            for _, way in turns(list(ways), args.samples + 1):
                engine.speculation = ways[way]
                speeds[way].append(serve(engine, n, args))
            for way, (_, *counted) in speeds.items():  # graphs are built in the first
                one = ways[way]
                yield {
                    "clients": n, "kind": args.kind, "way": way, "samples": counted,
                    "tps": statistics.median(counted),
                    "drafts": one.controller.stats.report() if one else None,
                }  # fmt: skip


def compare(args: argparse.Namespace) -> None:
    """Print the rows."""
    for row in measure(args):
        bench.note(args.out, row)


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.bench_parser(__doc__, samples=5)
    p.add_argument("--draft", default="", help="a DFlash or DSpark file")
    p.add_argument("--clients", type=bench.positive, nargs="+", default=[1, 4, 8])
    p.add_argument("--kind", default="structured", choices=RATES)
    p.add_argument("--tokens", type=bench.positive, default=256, help="of each answer")
    p.add_argument("--depth", type=bench.positive, default=64, help="tokens of the prompts")
    return p


if __name__ == "__main__":
    sys.exit(bench.main(parser(), compare))
