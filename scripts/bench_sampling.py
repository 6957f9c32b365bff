#!/usr/bin/env python3
"""Measure what sampling, text and the command line add to the time of a token.

  scripts/bench_sampling.py MODEL [--device cuda] [-n 256] [--rounds 5] [--cli] [--profile]

Each round times, one after another: the loop of `moegraph bench` (passes with the device's argmax,
and nothing else), and Engine.generate with each of the settings below. A figure is the median over
the rounds; the ratio is to the loop of the same round. `first_ms`: the first three tokens after the
prompt, before the first round, when graphs are built and captured; `median_ms`: of all tokens
there. `whole`: rows whose logits were read because the lists of candidates did not decide.

--cli also runs `moegraph run` as a process, with -n and with 4 times -n tokens: its own tok/s, and
those of the tokens in between, which have no share of what happens once.
--profile prints where Engine.generate spends the host's time with the first setting.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import pstats
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
import numpy as np

from moegraph import Engine, EngineConfig, SamplingParams

PROMPT = 32
OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy without text": {"temperature": 0.0},
    "greedy, end of text banned": {"temperature": 0.0, "logit_bias": {0: -math.inf}},
    "temp 0.8 top-k 40 top-p 0.95 min-p 0.05": {},
    "temp 1, nothing else": {**OFF, "temperature": 1.0},
    "temp 1 top-p 0.95 min-p 0.05": {"temperature": 1.0, "top_k": 0},
    "temp 1 top-p 0.95": {**OFF, "temperature": 1.0, "top_p": 0.95},
    "temp 1 top-k 1000": {**OFF, "temperature": 1.0, "top_k": 1000},
    "penalties": {"repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    "temp 1 penalties": {**OFF, "temperature": 1.0, "repeat_penalty": 1.1},
    "bias": {"logit_bias": dict.fromkeys(range(100, 130), 0.5)},
    "typical 0.9": {"typical_p": 0.9},
}


def prompt_of(engine: Engine) -> list[int]:
    """Return a prompt of random tokens."""
    rng = np.random.default_rng(1)
    return [int(token) for token in rng.integers(0, engine.hparams.n_vocab, PROMPT)]


def raw_loop(engine: Engine, n: int) -> float:
    """Return tokens per second of passes alone, as `moegraph bench` computes them."""
    engine.reset()
    engine.forward(prompt_of(engine), greedy=True)
    tokens = np.random.default_rng(2).integers(0, engine.hparams.n_vocab, n, dtype=np.int32)
    start = time.perf_counter()
    for token in tokens:
        engine.forward(token, greedy=True)
    return n / (time.perf_counter() - start)


def generate(engine: Engine, name: str, n: int, seed: int) -> tuple[list[float], int]:
    """Return the seconds of each step after the first token, and how many rows were read whole."""
    params, n_whole, stamps = SamplingParams(**SETTINGS[name], seed=seed), 0, []
    logits = engine.passes.logits

    def counted(row: int) -> Any:
        nonlocal n_whole
        n_whole += 1
        return logits(row)

    vars(engine.passes)["logits"] = counted
    for _ in engine.generate(
        prompt_of(engine), params, max_tokens=n, ignore_eos=True, text="text" not in name
    ):
        stamps.append(time.perf_counter())
    del vars(engine.passes)["logits"]
    return np.diff(stamps).tolist(), n_whole


def command(args: argparse.Namespace, n: int, *options: str) -> float:
    """Return the decode time in seconds that `moegraph run` reports for n tokens."""
    line = [sys.executable, "-m", "moegraph", "run", str(args.model), "-p", "The house of"]
    line += ["-n", str(n), "--device", args.device, "--ignore-eos"]
    line += ["-c", str(max(512, 8 * args.n)), *options]
    line += ["--vram", args.vram] if args.vram else []
    done = subprocess.run(
        line, capture_output=True, text=True, check=True, errors="replace",
        cwd=Path(__file__).resolve().parents[1],
    )  # fmt: skip
    found = re.search(r"decode (\d+) tokens in .*?, ([\d.]+) tok/s", done.stderr)
    if found is None:
        raise SystemExit(f"no statistics in: {done.stderr[-500:]}")
    return int(found[1]) / float(found[2])


def show(name: str, found: dict[str, Any]) -> None:
    """Print a row for people, and as JSON."""
    print(json.dumps({"row": name, **found}), flush=True)


def measure(engine: Engine, args: argparse.Namespace) -> None:
    """Print the rows of the engine."""
    names = [name for name in SETTINGS if args.only is None or re.search(args.only, name)]
    raw: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in names}
    speeds: dict[str, list[float]] = {name: [] for name in names}
    first: dict[str, dict[str, Any]] = {}
    whole: dict[str, int] = dict.fromkeys(names, 0)
    raw_loop(engine, 8)
    for turn in range(args.rounds + 1):
        before = raw_loop(engine, args.n)
        if turn:
            raw.append(before)
        for name in names:
            steps, n_whole = generate(engine, name, args.n, turn)
            if not turn:  # builds the graphs
                ms = [round(1e3 * step, 2) for step in steps]
                first[name] = {"first_ms": ms[:3], "median_ms": statistics.median(ms)}
                continue
            speeds[name].append(len(steps) / sum(steps))
            ratios[name].append(speeds[name][-1] / before)
            whole[name] += n_whole
    show("bench loop", {"tps": round(statistics.median(raw), 1)})
    for name in names:
        show(name, {
            "tps": round(statistics.median(speeds[name]), 1),
            "ratio": round(statistics.median(ratios[name]), 3),
            "lowest": round(min(ratios[name]), 3), **first[name],
            "whole": whole[name], "of": args.rounds * args.n,
        })  # fmt: skip


def main() -> int:
    """Run the command line and return the exit code."""
    parser = bench.Parser(__doc__)
    parser.add_argument("model", type=bench.model_path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("-n", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vram")
    parser.add_argument("--only", help="a pattern that names of settings match")
    parser.add_argument("--cli", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    return bench.guarded("bench_sampling.py", lambda: compare(args))


def compare(args: argparse.Namespace) -> None:
    """Measure all settings."""
    config = EngineConfig(device=args.device, n_ctx=max(512, 8 * args.n), vram=args.vram or "auto")
    with Engine.load(args.model, config) as engine:
        times = {name: round(s, 3) for name, s in engine.load_times.items()}
        show("load", {"mode": engine.mode, "device": engine.device_name, "seconds": times})
        measure(engine, args)
        if args.profile:
            profile = cProfile.Profile()
            name = next(n for n in SETTINGS if args.only is None or re.search(args.only, n))
            profile.runcall(generate, engine, name, args.n, 0)
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    if args.cli:
        for options in (["--temp", "0"], [], ["--temp", "1", "--top-k", "0"]):
            short, long = command(args, args.n, *options), command(args, 4 * args.n, *options)
            show("run " + " ".join(options), {
                "tps": round((args.n - 1) / short, 1),
                "tps_between": round(3 * args.n / (long - short), 1),
            })  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
