#!/usr/bin/env python3
"""Compare moegraph with llama.cpp's -ncmoe if not all experts fit: same device memory, same -ub.

For each N of --ncmoe, llama-bench runs prompts and decode as one block, and the driver reports its
peak of device memory. moegraph gets the same amount as --vram and the same -ub, and runs the same
tests. On both sides, the first sample of each test is written to the raw lines but not counted.
--ubatch takes several values: decode is measured with the first, prompts with each.

moegraph's speed depends on which experts a token chooses; llama.cpp's does not. In decode,
moegraph replays each of --traces in turn: first --warm tokens that are not counted, then the
samples, each from where the one before ended. Rows of moegraph copy the logits to the host, as
llama_decode does; "argmax" rows copy only the device's argmax; "sampled" rows go through
`Engine.generate` at temperature 0.8. In prompts, the model's own router chooses.

On the CPU there is no device memory to compare: moegraph gets slots for the share of the experts
that -ncmoe leaves on the device.

    scripts/bench_residency.py 35b.gguf --llama-bench up/llama-bench --ncmoe 16 30 40 --out r.jsonl
    scripts/bench_residency.py 35b.gguf --llama-bench up/llama-bench --ncmoe 16 --traces sticky flat
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
from _llama_bench import (
    LlamaBench,
    add_upstream,
    test_name,
    used_device_bytes,
)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("model", type=bench.model_path, help="a GGUF file, or a shipped model's name")
    add_upstream(p)
    bench.add_common(p)
    p.add_argument(
        "--ncmoe",
        type=int,
        nargs="+",
        default=[16, 30, 40],
        help="layers whose experts llama.cpp keeps on the CPU",
    )
    p.add_argument(
        "--traces",
        nargs="*",
        default=["sticky", "flat", "recorded"],
        help="presets of the generator (NAME or NAME:PROMPT) or trace files; with no "
        "value, decode is not measured",
    )
    p.add_argument("--gen", type=bench.positive, default=128, help="tokens of a decode sample")
    p.add_argument(
        "--warm",
        type=bench.positive,
        default=96,
        help="tokens at the start of a trace that are not counted",
    )
    p.add_argument("--prompt", type=bench.positive, nargs="*", default=[512, 2048])
    p.add_argument(
        "--ubatch", type=bench.positive, nargs="+", default=[512], help="-ub of both sides"
    )
    p.add_argument(
        "--sweep",
        type=bench.positive,
        nargs="*",
        default=[],
        metavar="THREADS",
        help="first try upstream with these numbers of threads, and use the best",
    )
    return p


@dataclass
class Replayed:
    """The recording that engines replay, and the position in it.

    step: the step that the next pass of one row consumes. parts: the first step of each trace.
    """

    path: Path
    parts: dict[str, int]
    step: int = 0


class Comparison:
    """One run: blocks of upstream and of our workers for all budgets."""

    def __init__(self, args: argparse.Namespace, raw: bench.Raw, clock: bench.Clock) -> None:
        from _traces import ModelFacts

        self.args, self.raw, self.clock = args, raw, clock
        self.facts = ModelFacts.of(args.model)
        self.program = LlamaBench(args, clock)
        self.threads = args.threads or len(os.sched_getaffinity(0))

    def run(self, scratch: Path) -> None:
        """Measure every budget."""
        args = self.args
        replayed = self._write_traces(scratch)
        partial = [n for n in args.ncmoe if n]
        if args.sweep and partial:
            self._sweep(partial[0])
        for ncmoe in args.ncmoe:
            for ubatch in args.ubatch:
                setting = f"ncmoe {ncmoe}, ub {ubatch}"
                with_gen = ubatch == args.ubatch[0]
                budget = self._upstream(setting, ncmoe, ubatch, with_gen)
                replayed.step = 0
                self._ours(setting, ncmoe, ubatch, budget, replayed, with_gen)

    def _write_traces(self, scratch: Path) -> Replayed:
        """Write the traces end to end, with as many steps as `_decode` and `_sampled` need."""
        from _traces import write_routing

        args, path = self.args, scratch / "routing.npy"
        each = args.warm + 2 * (args.samples + 1) * args.gen
        about = write_routing(path, self.facts, args.traces or ["sticky"], each)
        parts = {name: at * each for at, name in enumerate(args.traces)}
        self.raw.add("traces", each=each, parts=parts, n_used=self.facts.n_expert_used,
                     **about)  # fmt: skip
        return Replayed(path, parts)

    def _sweep(self, ncmoe: int) -> None:
        """Find upstream's best number of threads."""
        options = [
            "-ncmoe", str(ncmoe), "-ub", str(self.args.ubatch[0]), "-p", "0", "-n", "32",
            "-t", ",".join(map(str, self.args.sweep)),
        ]  # fmt: skip
        speed: dict[int, float] = {}
        for row in self.program.rows(options, 3):
            tps = row["samples_ts"][1:]
            speed[row["n_threads"]] = statistics.median(tps)
            name = f"upstream, {row['n_threads']} threads"
            for at, value in enumerate(row["samples_ts"]):
                self.raw.sample(f"ncmoe {ncmoe}, sweep", test_name(row), name, at, value)
        self.threads = max(speed, key=lambda n: speed[n])
        print(f"upstream is fastest with {self.threads} threads", file=sys.stderr)

    def _upstream(self, setting: str, ncmoe: int, ubatch: int, with_gen: bool) -> int:
        """Run llama-bench's block; return its peak of device memory in bytes."""
        args = self.args
        common = [
            "-ncmoe", str(ncmoe), "-ub", str(ubatch), "-b", str(max(2048, ubatch)),
            "-t", str(self.threads),
        ]  # fmt: skip
        with_gen = with_gen and bool(args.traces)
        gen = str(args.gen if with_gen else 0)
        prompts = ",".join(map(str, args.prompt)) or "0"
        options = [*common, "-p", prompts, "-n", gen]
        self.program.block(self.raw, setting, options, args.samples)
        return self.program.device_bytes

    def _ours(
        self, setting: str, ncmoe: int, ubatch: int, budget: int, replayed: Replayed,
        with_gen: bool,
    ) -> None:  # fmt: skip
        """Load moegraph with the budget and take its samples."""
        args, spec = self.args, f"moegraph={bench.ROOT}"
        used_before = used_device_bytes()
        with bench.start_worker(spec, self.clock) as worker:
            bench.note_system(self.raw, spec, worker)
            self._load(worker, setting, ncmoe, ubatch, budget, replayed.path)
            if with_gen:
                for name in replayed.parts:
                    self._decode(worker, setting, name, replayed)
            for length in args.prompt:
                for at in range(args.samples + 1):
                    found = worker.ask("prompt", n=length, seed=at)
                    self.raw.sample(
                        setting, f"pp{length}", "moegraph", at, length / found["seconds"],
                        experts=found["experts"],
                    )  # fmt: skip
            if with_gen:
                self._sampled(worker, setting)
            memory = worker.ask("memory")
            memory["device_driver_bytes"] = used_device_bytes() - used_before  # none is given back
            self.raw.add("memory", setting=setting, system="moegraph", **memory)

    def _load(
        self, worker: bench.Worker, setting: str, ncmoe: int, ubatch: int, budget: int, path: Path
    ) -> None:
        """Load with the budget as --vram; if that is too small, load without expert slots."""
        args, facts = self.args, self.facts
        longest = max([*args.prompt, args.gen, 256])
        config: dict[str, Any] = {
            "device": args.device, "n_ctx": longest, "n_ubatch": ubatch, "profile": "none",
        }  # fmt: skip
        if args.threads:
            config["n_threads"] = args.threads
        left = max(0, facts.n_layer - ncmoe)
        fitting: dict[str, Any] = {"vram": f"{budget}B"} if budget else {"pin_layers": 0}
        if not budget:
            fitting["cache_slots"] = left * facts.n_expert
        request = {"model": str(args.model), "routing": str(path) if args.traces else None}
        try:
            found = worker.ask("load", config=config | fitting, **request)
        except bench.BenchError as error:
            if not budget or "OutOfDeviceMemory" not in str(error):
                raise
            self.raw.add("refused", setting=setting, budget=budget, why=str(error))
            print(f"{error}\n{setting}: loading without expert slots", file=sys.stderr)
            found = worker.ask("load", config=config | {"pin_layers": 0, "cache_slots": 0},
                               **request)  # fmt: skip
        self.raw.add(
            "load", setting=setting, system="moegraph", ncmoe=ncmoe, ubatch=ubatch, budget=budget,
            share=sum(found["n_slots"]) / facts.n_experts,
            expert_bytes=facts.expert_bytes, **found,
        )  # fmt: skip

    def _decode(self, worker: bench.Worker, setting: str, name: str, replayed: Replayed) -> None:
        """Take decode samples over one trace, after its --warm tokens."""
        args = self.args
        warm = replayed.parts[name] + args.warm - replayed.step
        worker.ask("decode", n=warm, seed=0)
        replayed.step += warm
        for system, logits in (("moegraph", True), ("moegraph, argmax", False)):
            for at in range(args.samples + 1):
                found = worker.ask("decode", n=args.gen, seed=at, logits=logits)
                self.raw.sample(
                    setting, f"tg{args.gen}", f"{system}, {name}", at,
                    args.gen / found["seconds"], step=replayed.step, experts=found["experts"],
                )  # fmt: skip
                replayed.step += args.gen

    def _sampled(self, worker: bench.Worker, setting: str) -> None:
        """Take samples through `Engine.generate`; the replay restarts with the first trace.

        The first sample, which is not counted, warms the slots.
        """
        args = self.args
        if not args.traces:
            return
        for at in range(args.samples + 1):
            found = worker.ask("generate", n=args.gen, n_prompt=8, seed=at, sampling=bench.SAMPLING)
            self.raw.sample(
                setting, f"tg{args.gen}", f"moegraph, sampled, {args.traces[0]}", at,
                found["n"] / found["seconds"], experts=found["experts"],
            )  # fmt: skip


def main() -> int:
    """Run the comparison."""
    args = parser().parse_args()

    def run() -> None:
        clock, raw = bench.Clock(args.time_limit), bench.Raw("residency", args)
        with tempfile.TemporaryDirectory() as scratch:
            comparison = Comparison(args, raw, clock)
            bench.finish(args, raw, "upstream", lambda: comparison.run(Path(scratch)))

    return bench.guarded("bench_residency.py", run)


if __name__ == "__main__":
    sys.exit(main())
