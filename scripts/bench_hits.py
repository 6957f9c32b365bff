#!/usr/bin/env python3
"""Compare a model's hit rates on real text, measured on the CPU, with those of the simulator.

Feeds a text token by token, once for every share of slots and every policy, records the routing,
and replays the record in `simulate` with the same slots. The first tokens fill the cache and are
not counted.

Example:
    scripts/bench_hits.py tiny tests/data/heldout.py.txt
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench

from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.experts.machines import MACHINES
from moegraph.experts.policy import parse_policy
from moegraph.placement.identity import router_shape
from moegraph.placement.simulate import simulate
from moegraph.placement.trace import TraceRecorder
from moegraph.runner import LayeredRunner


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("model", help="a GGUF file, or the name of a shipped model")
    p.add_argument("text", type=bench.existing)
    p.add_argument("--tokens", type=bench.positive, default=500, help="tokens that are counted")
    p.add_argument(
        "--warm", type=bench.positive, default=100, help="tokens before them, not counted"
    )
    p.add_argument(
        "--policy", nargs="*", default=["lru", "lfu"], choices=("lru", "lfu", "adaptive", "static")
    )
    p.add_argument("--host-pin", default="none", choices=("none", "all"))
    p.add_argument(
        "--share",
        type=bench.share,
        nargs="*",
        default=[12.5, 25, 37.5, 50, 62.5, 75, 87.5],
        help="slots, %% of the experts",
    )
    return p


def hit_rates(
    args: argparse.Namespace, ids: list[int], slots: int, policy: str
) -> tuple[float, float]:
    """Return the hit rate of a run and that of its replay."""
    config = EngineConfig(
        device="cpu", n_ctx=len(ids), n_ubatch=64, pin_layers=0, cache_slots=slots, policy=policy,
        miss="stream", prefetch="off", host_pin=args.host_pin,
    )  # fmt: skip
    with Engine.load(args.model, config) as engine:
        recorder = TraceRecorder(router_shape(engine.file))
        runner = engine.runner
        assert isinstance(runner, LayeredRunner)  # because some experts have no slot
        runner.observers.append(recorder)
        before = runner.cache.stats
        for at, token in enumerate(ids):
            if at == args.warm:
                before = runner.cache.stats
            engine.forward(np.array([token], dtype=np.int32), greedy=True)
        measured = runner.cache.stats.since(before).hit_rate
        n_slots = runner.cache.n_slots
    found = simulate(
        recorder.trace(0, ""), n_slots, parse_policy(policy), MACHINES["h200"], mode="stream",
        skip=args.warm, is_pinned=args.host_pin == "all",
    )  # fmt: skip
    return measured, found.hit_rate


def main() -> int:
    """Print a table with two rows for each policy: run and replay."""
    args = parser().parse_args()

    def run() -> None:
        with Engine.load(args.model, EngineConfig(device="cpu")) as engine:
            n_experts = engine.hparams.n_layer * engine.hparams.n_expert
            ids = engine.tokenizer.encode(args.text.read_text())[: args.warm + args.tokens]
        if len(ids) <= args.warm:
            raise bench.BenchError(
                f"{args.text.name} has {len(ids)} tokens, of which the first {args.warm} do not "
                "count; name a longer text or lower --warm"
            )
        print("| slots, % of experts | " + " | ".join(f"{share:g}" for share in args.share) + " |")
        print("|---" * (len(args.share) + 1) + "|")
        for policy in args.policy:
            pairs = [
                hit_rates(args, ids, round(share / 100 * n_experts), policy) for share in args.share
            ]
            for name, rates in zip(("measured", "simulated"), zip(*pairs)):
                print(f"| `{policy}`, {name} | " + " | ".join(f"{r:.3f}" for r in rates) + " |")

    return bench.guarded("bench_hits.py", run)


if __name__ == "__main__":
    sys.exit(main())
