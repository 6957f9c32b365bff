#!/usr/bin/env python3
"""Measure a worker on this machine against the same split in one process.

    scripts/bench_worker.py MODEL --local cuda:0,cuda:1 --lent cuda:1

In the second engine, the worker's device --lent takes the place of the last device of --local. Both
engines hold all experts and half of the layers on each device. They are measured in turn, at a
depth, and the turns repeated.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]

import _bench as bench

from moegraph.config import EngineConfig
from moegraph.engine import Engine

_WARM = 32


def start_worker(device: str, threads: int | None) -> tuple[subprocess.Popen[str], str]:
    """Start a worker; return its process, and the spelling of its device."""
    command = [sys.executable, "-m", "moegraph", "worker", "--device", device]
    command += ["--listen", "127.0.0.1:0", *(["-t", str(threads)] if threads else [])]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr
    for line in process.stderr:
        found = re.search(r"listening on (\S+),", line)
        if found:
            return process, f"rpc://{found[1]}"
    raise SystemExit("the worker ended")


def measure(args: argparse.Namespace, device: str) -> dict[str, Any]:
    """Return tokens a second at a depth, and what a token moves."""
    config = EngineConfig(
        device=device, n_ctx=args.depth + args.tokens + 64, n_threads=args.threads, split="1,1",
        profile="none", spec="off",
    )  # fmt: skip
    with Engine.load(args.model, config) as engine:
        rng, times, traffic = np.random.default_rng(1), [], []
        link = engine.stages[-1].device.link
        ids = rng.integers(0, engine.hparams.n_vocab, args.depth).astype(np.int32)
        for event in engine.generate(ids, max_tokens=args.tokens, text=False, ignore_eos=True):
            times.append(event.decode_s)
            traffic.append(link.traffic() if link else None)
        n = len(times) - 1 - _WARM
        found = {"device": device, "tok_s": round(n / (times[-1] - times[_WARM]), 2)}
        first, last = traffic[_WARM], traffic[-1]
        if first and last:
            n_bytes = last.n_sent + last.n_received - first.n_sent - first.n_received
            found["bytes_per_token"] = n_bytes / n
            found["graphs_sent"] = last.n_graphs_sent - first.n_graphs_sent
            found["graphs_stored_per_token"] = (last.n_graphs_stored - first.n_graphs_stored) / n
            found["bytes_at_load"] = traffic[0].n_sent if traffic[0] else 0
        return found


def main() -> int:
    """Run the command line and return the exit code."""
    parser = bench.Parser(__doc__)
    parser.add_argument("model", type=bench.model_path)
    parser.add_argument("--local", default="cpu,cpu", help="the devices in one process")
    parser.add_argument("--lent", default="cpu", help="what the worker lends")
    parser.add_argument("--depth", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    if args.tokens < _WARM + 2:
        parser.error(f"--tokens {args.tokens}: the first {_WARM} do not count; name more")
    return bench.guarded("bench_worker.py", lambda: compare(args))


def compare(args: argparse.Namespace) -> None:
    """Measure both ways in turn; print what was measured."""
    process, lent = start_worker(args.lent, args.threads)
    try:
        remote = ",".join([*args.local.split(",")[:-1], lent])
        for _ in range(args.repeat):
            for device in (args.local, remote):
                print(json.dumps(measure(args, device)), flush=True)
    finally:
        process.terminate()


if __name__ == "__main__":
    sys.exit(main())
