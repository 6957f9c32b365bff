#!/usr/bin/env python3
"""Time prompts, and say where the time goes and how many expert bytes cross to the device.

A share of the experts, in percent, has a slot on the device; "whole": all of them. A prompt of
LENGTH tokens continues a sequence of DEPTH positions. One line of JSON for each sample: seconds,
tokens per second, expert bytes sent, and the host's seconds by phase: building graphs and copies,
launching, waiting for the device, and handling missing experts. The first sample of each test is
marked as such, because graphs are built in it. With --profile, one more sample says what the GPU
did (PyTorch must be installed).

    scripts/bench_prompts.py 35b.gguf --settings whole 60 25 --prompt 512 2048 8192
    scripts/bench_prompts.py 35b.gguf --settings whole --prompt 512 --depth 8192 32768
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
import numpy as np
from _kernels import profiled

from moegraph import Engine, EngineConfig


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("model", type=bench.model_path, help="a GGUF file, or a shipped model's name")
    bench.add_common(p, samples=3)
    p.add_argument("--settings", nargs="+", default=["whole", "60", "25"], metavar="whole|PERCENT")
    p.add_argument("--prompt", type=int, nargs="+", default=[512, 2048, 8192], metavar="LENGTH")
    p.add_argument("--depth", type=int, nargs="+", default=[0])
    p.add_argument("--ubatch", type=bench.positive, default=2048)
    p.add_argument("--mode", default="auto", choices=("auto", "layered", "whole"))
    p.add_argument("--profile", action="store_true", help="milliseconds of kernels and copies")
    return p


def engine_for(args: Any, setting: str) -> Engine:
    """Load the engine of a setting."""
    config: dict[str, Any] = {
        "device": args.device, "n_ctx": max(args.prompt) + max(args.depth), "profile": "none",
        "n_ubatch": args.ubatch, "mode": args.mode, "deterministic": True,
    }  # fmt: skip
    if args.threads:
        config["n_threads"] = args.threads
    if setting != "whole":
        from moegraph.modelfile import open_model

        with open_model(args.model) as model:
            n_all = model.hparams.n_layer * model.hparams.n_expert
        slots = round(float(setting) / 100 * n_all)
        config |= {"pin_layers": 0, "cache_slots": slots}
    return Engine.load(args.model, EngineConfig(**config))


def phases_of(engine: Engine) -> dict[str, float]:
    """Return the seconds of each phase, summed since the engine was loaded."""
    return engine.runner.sweeps.phases if engine.runner.sweeps else {}


def sample(engine: Engine, n: int, depth: int, seed: int) -> dict[str, Any]:
    """Time one prompt."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, engine.hparams.n_vocab, depth + n).astype(np.int32)
    engine.reset()
    if depth:
        engine.prefill(ids[:depth], greedy=True)
    engine.device.synchronize()
    phases, stats = dict(phases_of(engine)), engine.expert_stats()
    begin = time.perf_counter()
    engine.prefill(ids[depth:], greedy=True)
    seconds = time.perf_counter() - begin
    after = engine.expert_stats()
    spent = {name: t - phases[name] for name, t in phases_of(engine).items()}
    sent = after.n_bytes_to_device - stats.n_bytes_to_device if after and stats else 0
    return {
        "seconds": round(seconds, 5), "tok_s": round(n / seconds, 1), "sent_bytes": sent,
        "phases_s": {name: round(t, 5) for name, t in spent.items()},
    }  # fmt: skip


def rows(args: Any, engine: Engine, n: int, depth: int) -> Iterator[dict[str, Any]]:
    """Yield what is measured of prompts of n tokens after depth positions."""
    for at in range(args.samples + 1):
        yield {"first": at == 0, **sample(engine, n, depth, at)}
    if args.profile:
        found: dict[str, Any] = {}
        profile = profiled(lambda: found.update(sample(engine, n, depth, args.samples + 1)))
        yield {"first": False, **found, "gpu_ms": profile}


def main() -> int:
    """Run all samples."""
    args = parser().parse_args()
    out = open(args.out, "a", encoding="utf-8") if args.out else None  # noqa: SIM115
    for setting in args.settings:
        with engine_for(args, setting) as engine:
            for depth, n in product(args.depth, args.prompt):
                test = {"setting": setting, "mode": engine.mode, "prompt": n, "depth": depth}
                for row in rows(args, engine, n, depth):
                    peak = engine.device.note_peak() / 2**30
                    line = json.dumps(
                        {**test, "ubatch": args.ubatch, **row, "device_peak_gib": peak}
                    )
                    print(line, flush=True)
                    if out:
                        print(line, file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
