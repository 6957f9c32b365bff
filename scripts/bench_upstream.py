#!/usr/bin/env python3
"""Compare moegraph with llama-bench: same file, same device memory, same -ub.

Without --ncmoe, every expert is on the device, and tests may begin --depth tokens deep. For each N
of --ncmoe, llama-bench keeps the experts of N layers on the CPU, and the driver reports its peak of
device memory; moegraph gets that amount as --vram. On the CPU it gets slots for the share of the
experts that -ncmoe leaves on the device.

llama-bench runs with -r N, then moegraph takes as many samples in a process that keeps the model
loaded. On both sides, the first sample of a test is written to the raw lines but not counted.
--ubatch takes several values: decode is measured with the first, prompts with each.

Rows of moegraph copy the logits of a pass's last row to the host, as llama_decode does; "argmax"
rows copy only the device's argmax; "sampled" rows go through `Engine.generate` at temperature 0.8.
With missing experts, speed depends on which ones a token chooses: decode replays each of --traces,
first --warm tokens that are not counted, then the samples, each from where the one before ended. In
prompts, the model's own router chooses. At a depth, moegraph computes the tokens before the test
again for every sample (not timed), while llama-bench does so once: use few samples there.

    scripts/bench_upstream.py 35b.gguf --llama-bench up/llama-bench --depth 0 8192 --samples 3
    scripts/bench_upstream.py 35b.gguf --llama-bench up/llama-bench --ncmoe 16 30 40 --out r.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
from _bench import BenchError, Line
from _traces import ModelFacts, write_routing


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("model", type=bench.model_path, help="a GGUF file, or a shipped model's name")
    p.add_argument("--llama-bench", type=bench.existing, required=True, metavar="FILE",
                   help="of unpatched llama.cpp, built with the same options")  # fmt: skip
    bench.add_common(p)
    p.add_argument("--ncmoe", type=int, nargs="+", default=[],
                   help="layers whose experts llama.cpp keeps on the CPU")  # fmt: skip
    p.add_argument("--prompt", type=bench.positive, nargs="*", default=[512, 2048])
    p.add_argument("--gen", type=int, default=128, help="tokens of a decode sample; 0: none")
    p.add_argument("--depth", type=int, nargs="+", default=[0],
                   help="positions filled before a test, with all experts")  # fmt: skip
    p.add_argument("--ubatch", type=bench.positive, nargs="+", default=[512], metavar="N",
                   help="-ub of both sides")  # fmt: skip
    p.add_argument("--traces", nargs="+", default=["sticky", "flat", "recorded"],
                   help="presets of the generator (NAME or NAME:PROMPT), or files")  # fmt: skip
    p.add_argument("--warm", type=bench.positive, default=96,
                   help="tokens at the start of a trace that are not counted")  # fmt: skip
    p.add_argument("--sweep", type=bench.positive, nargs="*", default=[], metavar="THREADS",
                   help="first try llama-bench with these, and use the best")  # fmt: skip
    return p


class LlamaBench:
    """llama-bench on a model. rss_bytes, device_bytes: the peaks of the last call."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._program = args.llama_bench
        self._command = [str(self._program), "-m", str(args.model), "-fa", "1", "-o", "jsonl",
                         "-ngl", "0" if args.device == "cpu" else "99"]  # fmt: skip
        self.rss_bytes = self.device_bytes = 0

    def rows(self, options: Sequence[str], n_samples: int) -> Iterator[Line]:
        """Run llama-bench once with -r n_samples; yield its rows as they come."""
        command = [*self._command, "-r", str(n_samples), *options]
        with bench.MemoryWatch() as watch, tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(command, env=bench.with_libraries(self._program),
                                       stdout=subprocess.PIPE, stderr=errors)  # fmt: skip
            try:
                for line in process.stdout or ():
                    if line.startswith(b"{"):
                        yield json.loads(line)
            except BaseException:
                process.kill()
                raise
            finally:
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
                process.stdout.close()  # type: ignore[union-attr]
            self.rss_bytes = usage.ru_maxrss * 1024
            if process.returncode:
                why = f"exit code {process.returncode}: {bench.last_words(errors)}"
                raise BenchError(f"llama-bench ended with {why}")
        self.device_bytes = watch.n_bytes


def test_name(row: Line) -> str:
    """Return the name of a row's test: pp512, tg128 @ d8192."""
    parts = [("pp", row["n_prompt"]), ("tg", row["n_gen"])]
    name = "+".join(f"{kind}{n}" for kind, n in parts if n)
    return name + (f" @ d{row['n_depth']}" if row.get("n_depth") else "")


def settings_of(row: Line) -> Line:
    """Return the settings in a row, without samples and times, for the raw lines."""
    left_out = {"model_filename", "test_time", "samples_ns", "samples_ts", "cpu_info", "gpu_info"}
    timed = ("avg_", "stddev_")
    return {k: v for k, v in row.items() if k not in left_out and not k.startswith(timed)}


class Comparison:
    """One run: for each setting a block of llama-bench, then one of moegraph.

    step: of the traces, the step that the next pass of one row consumes.
    """

    def __init__(self, args: argparse.Namespace, raw: bench.Raw) -> None:
        self.args, self.raw = args, raw
        self.facts = ModelFacts.of(args.model)
        self.program = LlamaBench(args)
        self.threads: int | None = args.threads
        self.each = args.warm + 2 * (args.samples + 1) * args.gen
        self.step = 0

    def run(self, scratch: Path) -> None:
        """Measure every setting."""
        args, routing = self.args, scratch / "routing.npy"
        if args.ncmoe:
            self.threads = args.threads or len(os.sched_getaffinity(0))
            about = write_routing(routing, self.facts, args.traces, self.each)
            parts = {name: at * self.each for at, name in enumerate(args.traces)}
            self.raw.add("traces", each=self.each, parts=parts, n_used=self.facts.n_expert_used,
                         **about)  # fmt: skip
        partial = [n for n in args.ncmoe if n]
        if args.sweep and partial:
            self._sweep(partial[0])
        for ncmoe in args.ncmoe or [None]:
            for ubatch in args.ubatch:
                setting = f"ub {ubatch}" if ncmoe is None else f"ncmoe {ncmoe}, ub {ubatch}"
                gen = args.gen if ubatch == args.ubatch[0] else 0
                budget = self._upstream(setting, ncmoe, ubatch, gen)
                self._ours(setting, ncmoe, ubatch, gen, budget, routing)

    def _sweep(self, ncmoe: int) -> None:
        """Find llama-bench's best number of threads."""
        options = [
            "-ncmoe", str(ncmoe), "-ub", str(self.args.ubatch[0]), "-p", "0", "-n", "32",
            "-t", ",".join(map(str, self.args.sweep)),
        ]  # fmt: skip
        speed: dict[int, float] = {}
        for row in self.program.rows(options, 3):
            speed[row["n_threads"]] = statistics.median(row["samples_ts"][1:])
            for at, value in enumerate(row["samples_ts"]):
                self.raw.sample(f"ncmoe {ncmoe}, sweep", test_name(row),
                                f"upstream, {row['n_threads']} threads", at, value)  # fmt: skip
        self.threads = max(speed, key=lambda n: speed[n])
        print(f"upstream is fastest with {self.threads} threads", file=sys.stderr)

    def _upstream(self, setting: str, ncmoe: int | None, ubatch: int, gen: int) -> int:
        """Run llama-bench's block; return its peak of device memory in bytes."""
        args, raw = self.args, self.raw
        options = [
            *(["-ncmoe", str(ncmoe)] if ncmoe is not None else []), "-ub", str(ubatch),
            "-b", str(max(2048, ubatch)), *(["-t", str(self.threads)] if self.threads else []),
            *(["-d", ",".join(map(str, args.depth))] if ncmoe is None else []),
            "-p", ",".join(map(str, args.prompt)) or "0", "-n", str(gen),
        ]  # fmt: skip
        for row in self.program.rows(options, args.samples + 1):
            raw.add("upstream", setting=setting, system="upstream", flags=options,
                    row=settings_of(row))  # fmt: skip
            for at, tps in enumerate(row["samples_ts"]):
                raw.sample(setting, test_name(row), "upstream", at, tps)
        peak = self.program.device_bytes
        raw.add("memory", setting=setting, system="upstream", VmHWM=self.program.rss_bytes,
                device_peak_bytes=peak, device_driver_bytes=peak)  # fmt: skip
        return peak

    def _ours(
        self, setting: str, ncmoe: int | None, ubatch: int, gen: int, budget: int, routing: Path
    ) -> None:
        """Load moegraph and take its samples."""
        args, system = self.args, "whole" if ncmoe is None else "moegraph"
        spec, used_before = f"{system}={bench.ROOT}", bench.used_device_bytes()
        with bench.start_worker(spec) as worker:
            bench.note_system(self.raw, spec, worker)
            self._load(worker, setting, ncmoe, ubatch, budget, routing)
            if gen and ncmoe is not None:
                self.step = 0
                for at, name in enumerate(args.traces):
                    warm = at * self.each + args.warm - self.step
                    worker.ask("decode", n=warm, seed=0)
                    self.step += warm
                    self._decode(worker, setting, system, gen, 0, f", {name}")
            for depth in args.depth if ncmoe is None else [0]:
                at_depth = f" @ d{depth}" if depth else ""
                for n in args.prompt:
                    self._samples(worker, setting, f"pp{n}{at_depth}", system, "prompt", n=n,
                                  depth=depth)  # fmt: skip
                if gen and ncmoe is None:
                    self._decode(worker, setting, system, gen, depth, "")
            if gen and 0 in args.depth:
                trace = f", {args.traces[0]}" if ncmoe is not None else ""
                self._samples(worker, setting, f"tg{gen}", f"{system}, sampled{trace}", "generate",
                              n=gen, n_prompt=8, sampling=bench.SAMPLING)  # fmt: skip
            memory = worker.ask("memory")
            memory["device_driver_bytes"] = bench.used_device_bytes() - used_before
            self.raw.add("memory", setting=setting, system=system, **memory)

    def _decode(
        self, worker: bench.Worker, setting: str, system: str, n: int, depth: int, trace: str
    ) -> None:
        """Take decode samples with the logits, and with the argmax alone unless at a depth."""
        test = f"tg{n}" + (f" @ d{depth}" if depth else "")
        for way, logits in ((system, True), (f"{system}, argmax", False))[: 1 if depth else 2]:
            self._samples(worker, setting, test, way + trace, "decode", n=n, depth=depth,
                          logits=logits)  # fmt: skip

    def _samples(
        self, worker: bench.Worker, setting: str, test: str, system: str, do: str, n: int,
        **request: Any,
    ) -> None:  # fmt: skip
        """Take all samples of a test, each with its number as the seed."""
        for at in range(self.args.samples + 1):
            found = worker.ask(do, n=n, seed=at, **request)
            more: dict[str, Any] = {"step": self.step} if do == "decode" else {}
            self.raw.sample(setting, test, system, at, found.get("n", n) / found["seconds"],
                            experts=found["experts"], **more)  # fmt: skip
            self.step += n if more else 0

    def _load(
        self, worker: bench.Worker, setting: str, ncmoe: int | None, ubatch: int, budget: int,
        routing: Path,
    ) -> None:  # fmt: skip
        """Load with the budget as --vram; if that is too small, load without expert slots."""
        args, facts = self.args, self.facts
        config: dict[str, Any] = {
            "device": args.device, "n_ubatch": ubatch, "profile": "none",
            "n_ctx": max(args.depth) + max([*args.prompt, args.gen, 256]),
        }  # fmt: skip
        if args.threads:
            config["n_threads"] = args.threads
        if ncmoe is None:
            found = worker.ask("load", model=str(args.model), config=config | {"mode": "whole"})
            self.raw.add("load", setting=setting, system="whole", **found)
            return
        fitting: dict[str, Any] = {"vram": f"{budget}B"} if budget else {
            "pin_layers": 0, "cache_slots": max(0, facts.n_layer - ncmoe) * facts.n_expert
        }  # fmt: skip
        request = {"model": str(args.model), "routing": str(routing) if args.gen else None}
        try:
            found = worker.ask("load", config=config | fitting, **request)
        except BenchError as error:
            if not budget or "OutOfDeviceMemory" not in str(error):
                raise
            self.raw.add("refused", setting=setting, budget=budget, why=str(error))
            print(f"{error}\n{setting}: loading without expert slots", file=sys.stderr)
            none = {"pin_layers": 0, "cache_slots": 0}
            found = worker.ask("load", config=config | none, **request)
        self.raw.add(
            "load", setting=setting, system="moegraph", ncmoe=ncmoe, ubatch=ubatch, budget=budget,
            share=sum(found["n_slots"]) / facts.n_experts,
            expert_bytes=facts.expert_bytes, **found,
        )  # fmt: skip


def main() -> int:
    """Run the comparison."""
    args = parser().parse_args()

    def run() -> None:
        raw = bench.Raw("upstream", args)
        with tempfile.TemporaryDirectory() as scratch:
            comparison = Comparison(args, raw)
            bench.finish(raw, "upstream", lambda: comparison.run(Path(scratch)))

    return bench.guarded("bench_upstream.py", run)


if __name__ == "__main__":
    sys.exit(main())
