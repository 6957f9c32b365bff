#!/usr/bin/env python3
"""Time every token of a generation: does one take longer where the context crosses a length?

The first request after loading is not judged, because graphs may be built in it. The second one
generates --tokens tokens greedily from a prompt of one token. For every multiple of --every
positions, the slowest of the four tokens around it is compared with the median of all tokens.

    scripts/bench_gaps.py 35b.gguf
    scripts/bench_gaps.py tiny --device cpu --tokens 600
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench

from moegraph import Engine, EngineConfig

# Tokens of the request that is not judged: both of its passes have run by then.
FIRST = 8


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("model", type=bench.model_path, help="a GGUF file, or a shipped model's name")
    bench.add_common(p, samples=3)
    p.add_argument("--tokens", type=bench.positive, default=1100, help="tokens of a sample")
    p.add_argument("--every", type=bench.positive, default=256, metavar="POSITIONS")
    p.add_argument("--vram", default="auto", help="device memory in GiB, as of moegraph")
    return p


def token_times(engine: Engine, n_tokens: int) -> list[float]:
    """Return the milliseconds of each token of a generation, after its first."""
    times, before = [], 0.0
    prompt = [1]
    for event in engine.generate(prompt, max_tokens=n_tokens, ignore_eos=True, text=False):
        now = time.perf_counter()
        if event.token is not None:
            times.append(1e3 * (now - before))
        before = now
    return times[1:]


def crossings(times: Sequence[float], every: int) -> dict[int, float]:
    """Return the slowest time around each multiple of `every` positions, by position.

    times[i] is that of the token that makes the context i + 3 positions long.
    """
    return {
        at: max(times[max(at - 5, 0) : at - 1])
        for at in range(every, len(times) + 1, every)
    }  # fmt: skip


def measure(args: argparse.Namespace) -> None:
    """Measure, print a table, and append the raw lines."""
    clock, raw = bench.Clock(args.time_limit), bench.Raw("bench_gaps", args)
    given = {"device": args.device, "vram": args.vram, "n_ctx": args.tokens + 16}
    if args.threads:
        given["n_threads"] = args.threads
    with Engine.load(args.model, EngineConfig(**given)) as engine:
        token_times(engine, FIRST)
        print("| sample | median, ms | slowest, times | around (times the median) |")
        print("|---|---|---|---|")
        for at in range(args.samples):
            clock.left()
            times = token_times(engine, args.tokens)
            median = statistics.median(times)
            around = {n: t / median for n, t in crossings(times, args.every).items()}
            raw.add("gaps", at=at, median_ms=median, max_ms=max(times), around=around)
            shown = ", ".join(f"{n}: {ratio:.2f}" for n, ratio in around.items())
            print(f"| {at} | {median:.3f} | {max(times) / median:.2f} | {shown} |", flush=True)


def main() -> int:
    """Run the command line and return the exit code."""
    args = parser().parse_args()
    return bench.guarded("bench_gaps.py", lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
