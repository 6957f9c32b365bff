#!/usr/bin/env python3
"""Time the turns of a conversation whose earlier answers lose their first half, as reasoning does.

Every turn has a question of --question tokens and an answer of --answer tokens. The next prompt has
only the second half of that answer. Three ways: `cold` computes each prompt from its start, `held`
goes on only where the prompt continues what the sequence holds, `kept` also where states are kept
(docs/conversations.md). The first table has milliseconds to the first token of each turn, the
second what the copies to host memory and back cost.

    scripts/bench_prefixes.py 35b.gguf --vram 8
    scripts/bench_prefixes.py tiny --device cpu --turns 4
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
import numpy as np

from moegraph import Engine, EngineConfig
from moegraph.ggml.lib import C, ffi

WAYS = ("cold", "held", "kept")
# Tokens that a template puts between a question and its answer.
_HEADER = 4


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("model", type=bench.model_path, help="a GGUF file, or a shipped model's name")
    bench.add_common(p, samples=5)
    p.add_argument("--turns", type=bench.positive, default=6)
    p.add_argument("--system", type=bench.positive, default=200, help="tokens before all turns")
    p.add_argument("--question", type=bench.positive, default=60, help="tokens")
    p.add_argument("--answer", type=bench.positive, default=200, help="tokens")
    p.add_argument("--vram", default="auto", help="device memory in GiB, as of moegraph")
    return p


def conversation(engine: Engine, way: str, turns: int, system: int, n_new: int, n: int) -> list[
    tuple[float, int]
]:  # fmt: skip
    """Return for each turn the milliseconds to its first token, and the prompt tokens computed."""
    rng = np.random.default_rng(1)
    n_vocab, found = engine.hparams.n_vocab, []
    engine.reset()
    engine.prefixes.clear()
    before = rng.integers(0, n_vocab, system).tolist()
    for _ in range(turns):
        asked = before + rng.integers(0, n_vocab, n_new).tolist()
        prompt = asked + [1] * _HEADER
        marks = (system, len(asked)) if way == "kept" else ()
        tokens, first_s, began = [], 0.0, time.perf_counter()
        for event in engine.generate(
            prompt, max_tokens=n, ignore_eos=True, text=False, reuse=way != "cold", marks=marks
        ):
            first_s = first_s or time.perf_counter() - began
            tokens.append(event.token)
        found.append((1e3 * first_s, event.n_computed))
        before = asked + tokens[n // 2 :]
    return found


def timed(work: Callable[[], object], n: int) -> float:
    """Return the median milliseconds of n calls, after one that is not counted."""
    times = []
    for _ in range(n + 1):
        began = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[1:])


def copies(engine: Engine, n: int) -> dict[str, tuple[int, float]]:
    """Return bytes and milliseconds of each kind of copy, for a sequence that holds 512 tokens."""
    copies, state = engine.state.copies, engine.state
    engine.reset()
    engine.forward(np.ones(min(512, engine.runner.n_ubatch), dtype=np.int32), greedy=True)
    n_rows = state.n_past[0]
    states, rows = copies.take_states(0, n_rows), copies.take_rows(0, 0, n_rows)
    first = timed(lambda: copies.take_states(0, n_rows), 1)

    def there() -> None:
        copies.take_states(0, n_rows).close()  # the next one takes its memory

    def back() -> None:
        copies.put_states(states, 0)
        engine.device.synchronize()

    plain = np.ones(states.n_bytes, dtype=np.uint8)

    def there_plain() -> None:
        engine.device.synchronize()
        at = 0
        for tensor in (*state.conv.values(), *state.ssm.values()):
            n_bytes = tensor.nb[1]
            C.ggml_backend_tensor_get(tensor, ffi.from_buffer(plain[at : at + n_bytes]), 0, n_bytes)
            at += n_bytes

    return {
        "states to new pinned memory": (states.n_bytes, first),
        "states to pinned memory": (states.n_bytes, timed(there, n)),
        "states to ordinary memory": (states.n_bytes, timed(there_plain, n)),
        "states back": (states.n_bytes, timed(back, n)),
        f"rows of {n_rows} tokens": (
            rows.n_bytes,
            timed(lambda: copies.take_rows(0, 0, n_rows), n),
        ),
        "rows back": (rows.n_bytes, timed(lambda: copies.put_rows(rows, 0, 0, 0), n)),
    }


def measure(args: argparse.Namespace) -> None:
    """Measure, print two tables, and append the raw lines."""
    clock, raw = bench.Clock(args.time_limit), bench.Raw("bench_prefixes", args)
    longest = args.system + args.turns * (args.question + args.answer) + _HEADER
    given = {"device": args.device, "vram": args.vram, "n_ctx": max(longest, 512)}
    if args.threads:
        given["n_threads"] = args.threads
    with Engine.load(args.model, EngineConfig(**given)) as engine:
        sizes = (args.turns, args.system, args.question, args.answer)
        print("| turn | " + " | ".join(f"{way}, ms (tokens read)" for way in WAYS) + " |")
        print("|---" * (len(WAYS) + 1) + "|")
        runs: dict[str, list[list[tuple[float, int]]]] = {way: [] for way in WAYS}
        for at in range(args.samples + 1):
            for way in WAYS:
                clock.left()
                found = conversation(engine, way, *sizes)
                raw.add("turns", at=at, way=way, turns=found)
                runs[way] += [found] if at else []
        for turn in range(args.turns):
            cells = (
                f"{statistics.median(run[turn][0] for run in runs[way]):.1f} "
                f"({runs[way][0][turn][1]})"
                for way in WAYS
            )
            print(f"| {turn + 1} | " + " | ".join(cells) + " |", flush=True)
        print("\n| copy | MiB | ms | GB/s |\n|---|---|---|---|")
        for name, (n_bytes, ms) in copies(engine, args.samples).items():
            raw.add("copy", name=name, n_bytes=n_bytes, ms=ms)
            print(f"| {name} | {n_bytes / 2**20:.1f} | {ms:.2f} | {1e-6 * n_bytes / ms:.1f} |")


def main() -> int:
    """Run the command line and return the exit code."""
    args = parser().parse_args()
    return bench.guarded("bench_prefixes.py", lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
