#!/usr/bin/env python3
"""Send requests of mixed lengths within budgets of device memory, and watch all memory.

Each budget (GiB, or "whole") is a process of its own, because a context on a device keeps its
memory. A request is a prompt with marks, which may continue the one before, and some tokens. The
longest comes first and again at the end. One line of JSON for each budget: the peak of device
memory as the driver reports it; host memory after a fifth of the requests, at the end and at most,
and how much of it is pinned. Kept beginnings of prompts, which have a limit of their own, do not
count after a fifth and at the end. The exit status is 1 if a peak is above its budget, or if memory
grew.

    scripts/bench_memory.py 35b.gguf --vram 6 8 12 --requests 200 --longest 32768
    scripts/bench_memory.py tiny --device cpu --vram whole --requests 30 --longest 2000
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
import numpy as np

from moegraph import Engine, EngineConfig

# What may be added to host memory after the first fifth of the requests.
_MAX_GROWTH = 64 << 20
_NEW = 4  # tokens of an answer
NAME = "bench_memory.py"


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("model", type=bench.model_path, help="a GGUF file, or a shipped model's name")
    bench.add_basic(p)
    p.add_argument("--vram", nargs="+", default=["6", "8", "12"], metavar="GIB|whole")
    p.add_argument("--requests", type=bench.positive, default=200)
    p.add_argument("--longest", type=bench.positive, default=32768, metavar="TOKENS")
    p.add_argument("--ubatch", type=bench.positive, help="default: as the engine chooses")
    p.add_argument("--one", metavar="GIB|whole", help="measure one budget in this process")
    return p


def host_bytes() -> int:
    """Return this process's resident memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def lengths(args: argparse.Namespace) -> list[int]:
    """Return the prompt length of each request: from one token to the longest, mostly short."""
    rng = np.random.default_rng(0)
    most = args.longest - _NEW
    found = np.exp(rng.uniform(0, np.log(max(2, most // 8)), args.requests)).astype(int)
    found[0] = found[-1] = most
    return [max(1, int(n)) for n in found]


def measure(args: argparse.Namespace, budget: str) -> dict[str, Any]:
    """Send all requests to an engine with one budget."""
    config: dict[str, Any] = {
        "device": args.device, "n_ctx": args.longest, "profile": "none", "cache_ram": 256,
        "n_ubatch": args.ubatch,
    }  # fmt: skip
    if args.threads:
        config["n_threads"] = args.threads
    if budget != "whole":
        config["vram"] = budget
    start, host = time.perf_counter(), []
    with Engine.load(args.model, EngineConfig(**config)) as engine:
        rng = np.random.default_rng(1)
        ids = np.zeros(0, dtype=np.int32)
        for at, n in enumerate(lengths(args)):
            goes_on = at % 3 and len(ids) < n
            fresh = rng.integers(0, engine.hparams.n_vocab, n).astype(np.int32)
            ids = np.concatenate([ids, fresh])[:n] if goes_on else fresh
            marks = (n // 2, max(1, n - 9))
            list(engine.generate(ids, max_tokens=_NEW, text=False, ignore_eos=True, reuse=True,
                                 marks=marks))  # fmt: skip
            engine.device.note_peak()
            host.append(host_bytes() - engine.prefixes.n_bytes)
            if at % 20 == 0:
                print(f"{budget}: {at + 1} of {args.requests}", file=sys.stderr, flush=True)
        limit = None if budget == "whole" else round(float(budget) * 2**30)
        peak = engine.device.peak_bytes
        early = max(host[: max(1, len(host) // 5)])
        return {
            "budget_gib": None if limit is None else limit / 2**30,
            "peak_gib": round(peak / 2**30, 3), "is_within": limit is None or peak <= limit,
            "planned_gib": round(engine.plan.total / 2**30, 3),
            "host_early_gib": round(early / 2**30, 3), "host_last_gib": round(host[-1] / 2**30, 3),
            "host_peak_gib": round(engine.memory()["host_peak_bytes"] / 2**30, 3),
            "host_pinned_gib": round(engine.memory()["host_pinned_bytes"] / 2**30, 3),
            "is_flat": host[-1] - early < _MAX_GROWTH, "requests": args.requests,
            "longest": args.longest, "seconds": round(time.perf_counter() - start, 1),
        }  # fmt: skip


def measure_all(args: argparse.Namespace) -> int:
    """Measure every budget in a process of its own; return the exit code."""
    clock, is_good = bench.Clock(args.time_limit), True
    for budget in args.vram:
        clock.left()
        command = [sys.executable, __file__, *sys.argv[1:], "--one", budget]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            return done.returncode
        print(done.stdout, end="", flush=True)
        if args.out:
            with open(args.out, "a", encoding="utf-8") as file:
                file.write(done.stdout)
        row = json.loads(done.stdout)
        is_good = is_good and row["is_within"] and row["is_flat"]
    return 0 if is_good else 1


def main() -> int:
    """Run the command line and return the exit code."""
    args = parser().parse_args()
    if args.one:
        return bench.guarded(NAME, lambda: print(json.dumps(measure(args, args.one)), flush=True))
    try:
        return measure_all(args)
    except bench.TimeUp:
        print(f"{NAME}: stopped at its time limit", file=sys.stderr)
        return 0


if __name__ == "__main__":
    sys.exit(main())
