#!/usr/bin/env python3
"""Time prompts, and say where the time goes and how many expert bytes cross to the device.

A share of the experts, in percent, has a slot on the device; "whole": all of them. A prompt of
LENGTH tokens continues a sequence of DEPTH positions. One line of JSON for each sample: seconds,
tokens per second, expert bytes sent, and the host's seconds by phase: building graphs and copies,
launching, waiting for the device, and handling missing experts. The first sample of each test is
marked as such, because graphs are built in it. With --profile, one more sample says what the GPU
did (PyTorch must be installed).

--link-times N really sends each expert N times, so that one sees what cards on slower links will
see. If "whole" is measured first, "predicted_s" is what the law of `moegraph simulate` says for the
bytes that were sent, the measured link, and the time of the same prompt with all experts resident.

    scripts/bench_prompts.py 35b.gguf --settings whole 60 25 --prompt 512 2048 8192
    scripts/bench_prompts.py 35b.gguf --settings whole --prompt 512 --depth 8192 32768
    scripts/bench_prompts.py 35b.gguf --link-times 1 2 4 --prompt 512 8192
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
import numpy as np
from _kernels import profiled

from moegraph import Engine, EngineConfig
from moegraph.placement.prompttime import sweep_seconds
from moegraph.runner import Runner


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("model", type=bench.model_path, help="a GGUF file, or a shipped model's name")
    bench.add_samples(p, 3)
    bench.add_basic(p)
    p.add_argument("--settings", nargs="+", default=["whole", "60", "25"], metavar="whole|PERCENT")
    p.add_argument("--prompt", type=int, nargs="+", default=[512, 2048, 8192], metavar="LENGTH")
    p.add_argument("--depth", type=int, nargs="+", default=[0])
    p.add_argument("--link-times", type=bench.positive, nargs="+", default=[1], metavar="N")
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
        from moegraph.arch import open_model

        with open_model(args.model) as model:
            n_all = model.hparams.n_layer * model.hparams.n_expert
        slots = round(float(setting) / 100 * n_all)
        config |= {"pin_layers": 0, "cache_slots": slots}
    return Engine.load(args.model, EngineConfig(**config))


def phases_of(engine: Engine) -> dict[str, float]:
    """Return the seconds of each phase, summed since the engine was loaded."""
    runner = engine.runner
    return runner.sweeps.phases if isinstance(runner, Runner) and runner.sweeps else {}


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
    found = after.since(stats) if after and stats else None
    return {
        "seconds": round(seconds, 5), "tok_s": round(n / seconds, 1),
        "sent_bytes": found.n_bytes_to_device if found else 0,
        "hit_rate": round(found.cache.hit_rate, 4) if found else 1.0,
        "phases_s": {name: round(t, 5) for name, t in spent.items()},
    }  # fmt: skip


def _at_once(engine: Engine) -> int:
    """Return how many experts the upload has whose time is taken for the link's."""
    return min(16, engine.hparams.n_expert)


def predicted(engine: Engine, row: dict[str, Any], whole_s: float) -> float:
    """Return what the law of sweeps says of a sample; whole_s: with all experts resident."""
    misses: Any = getattr(engine.runner, "misses", None)
    store, n = misses.store, row["prompt"]
    at_once = _at_once(engine)
    per_byte = misses.link.seconds(at_once) / at_once
    per_byte /= store.packing(store.layers[0]).n_bytes
    link = np.array(row["sent_bytes"] * per_byte * row["link_times"])
    first = min(row["ubatch"], n) / n
    return float(sweep_seconds(whole_s, np.array(1 - row["hit_rate"]), link, first))


class Samples:
    """Takes samples and writes a line for each.

    whole_s: the least seconds of prompts with all experts resident, by (length, depth).
    """

    def __init__(self, args: Any) -> None:
        self._args = args
        self._out = open(args.out, "a", encoding="utf-8") if args.out else None  # noqa: SIM115
        self.whole_s: dict[tuple[int, int], float] = {}

    def take(self, engine: Engine, setting: str, n: int, depth: int, times: int, at: int) -> None:
        """Time a prompt; at: the number of the sample, of which the last may be profiled."""
        row = {"setting": setting, "mode": engine.mode, "prompt": n, "depth": depth,
               "ubatch": self._args.ubatch, "link_times": times, "first": at == 0}  # fmt: skip
        if at > self._args.samples:
            row["gpu_ms"] = profiled(lambda: row.update(sample(engine, n, depth, at)))
        else:
            row |= sample(engine, n, depth, at)
        if setting == "whole" and 0 < at <= self._args.samples:
            known = self.whole_s.get((n, depth), row["seconds"])
            self.whole_s[n, depth] = min(known, row["seconds"])
        elif setting != "whole" and (n, depth) in self.whole_s:
            row["predicted_s"] = round(predicted(engine, row, self.whole_s[n, depth]), 5)
        row["device_peak_gib"] = engine.device.note_peak() / 2**30
        print(json.dumps(row), flush=True)
        if self._out:
            print(json.dumps(row), file=self._out, flush=True)


def measure(args: argparse.Namespace) -> None:
    """Take all samples."""
    clock, samples = bench.Clock(args.time_limit), Samples(args)
    for setting in args.settings:
        with engine_for(args, setting) as engine:
            for times in [1] if setting == "whole" else args.link_times:
                misses = getattr(engine.runner, "misses", None)
                if misses:
                    misses.link.seconds(_at_once(engine))  # of the link as it is
                    misses.slow_link(times)
                for depth in args.depth:
                    for n in args.prompt:
                        for at in range(args.samples + 1 + args.profile):
                            clock.left()
                            samples.take(engine, setting, n, depth, times, at)


def main() -> int:
    """Run the command line and return the exit code."""
    args = parser().parse_args()
    return bench.guarded("bench_prompts.py", lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
