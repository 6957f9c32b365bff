#!/usr/bin/env python3
"""Compare moegraph with llama-bench: same file, same device memory, same -ub.

Without --ncmoe, every expert is on the device, and tests may begin --depth tokens deep. For each N
of --ncmoe, llama-bench keeps the experts of N layers on the CPU, and the driver reports its peak of
device memory; moegraph gets that amount as --vram. On the CPU it gets slots for the share of the
experts that -ncmoe leaves on the device. With --ncmoe, llama-bench runs with --load-mode none: its
prompts are then four to five times as quick as from a mapped file (experts are sent from pinned
memory). Its decoding is often slower so, and is measured from a mapped file too: "upstream" is the
better of the two.

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
from _traces import router_of, write_routing


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.bench_parser(__doc__, samples=5)
    p.add_argument("--llama-bench", type=bench.existing, required=True, metavar="FILE",
                   help="of unpatched llama.cpp, built with the same options")  # fmt: skip
    p.add_argument("--threads", type=bench.positive, metavar="N", help="CPU threads of all systems")
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


# Beginnings of llama-bench's fields that are no settings.
_NO_SETTINGS = (
    "model_filename",
    "test_time",
    "samples_",
    "cpu_info",
    "gpu_info",
    "avg_",
    "stddev_",
)


def test_name(row: Line) -> str:
    """Return the name of a row's test: pp512, tg128 @ d8192."""
    parts = [("pp", row["n_prompt"]), ("tg", row["n_gen"])]
    name = "+".join(f"{kind}{n}" for kind, n in parts if n)
    return name + (f" @ d{row['n_depth']}" if row.get("n_depth") else "")


def json_rows(command: Sequence[str]) -> Iterator[Line]:
    """Run a program of llama.cpp; yield the JSON lines it prints, then a line of its memory."""
    program = Path(command[0])
    with bench.MemoryWatch() as watch, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, env=bench.with_libraries(program),
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
        if process.returncode:
            why = f"exit code {process.returncode}: {bench.last_words(errors)}"
            raise BenchError(f"{program.stem} ended with {why}")
    yield {"rss_bytes": usage.ru_maxrss * 1024, "device_bytes": watch.n_bytes}


class Comparison:
    """One run: for each setting a block of llama-bench, then one of moegraph.

    setting, ncmoe, ubatch, gen: of the block that is measured; gen is 0 where decode is not.
    step: of the traces, the step that the next pass of one row consumes.
    """

    setting, gen, step, n_ctx = "", 0, 0, 0
    ncmoe: int | None
    worker: bench.Worker

    def __init__(self, args: argparse.Namespace, raw: bench.Raw, routing: Path | None) -> None:
        self.args, self.raw, self.routing = args, raw, routing
        self.shape, self.expert_bytes = router_of(args.model)
        self.threads: int | None = args.threads
        self.system = "moegraph" if args.ncmoe else "whole"

    def run(self) -> None:
        """Measure every setting."""
        args = self.args
        self.n_ctx = max(args.depth) + max([*args.prompt, args.gen, 256])
        self.each = args.warm + 2 * (args.samples + 1) * args.gen
        if args.ncmoe:
            self.threads = args.threads or len(os.sched_getaffinity(0))
            assert self.routing
            about = write_routing(self.routing, self.shape, args.traces, self.each)
            parts = {name: at * self.each for at, name in enumerate(args.traces)}
            self.raw.add("traces", each=self.each, parts=parts, n_used=self.shape.n_expert_used,
                         **about)  # fmt: skip
        partial = [n for n in args.ncmoe if n]
        if args.sweep and partial:
            self._sweep(partial[0])
        for self.ncmoe in args.ncmoe or [None]:
            for self.ubatch in args.ubatch:
                place = "" if self.ncmoe is None else f"ncmoe {self.ncmoe}, "
                self.setting = f"{place}ub {self.ubatch}"
                self.gen = args.gen if self.ubatch == args.ubatch[0] else 0
                self._ours(self._upstream())

    def _rows(self, options: Sequence[str], n_samples: int) -> Iterator[Line]:
        """Run llama-bench once with -r n_samples; yield its rows, then a line of its memory."""
        args = self.args
        n_layers = "0" if args.device == "cpu" else "99"
        return json_rows([str(args.llama_bench), "-m", str(args.model), "-fa", "1", "-o", "jsonl",
                          "-ngl", n_layers, "-r", str(n_samples), *options])  # fmt: skip

    def _sweep(self, ncmoe: int) -> None:
        """Find llama-bench's best number of threads."""
        options = [
            "-ncmoe", str(ncmoe), "-ub", str(self.args.ubatch[0]), "-p", "0", "-n", "32",
            "-t", ",".join(map(str, self.args.sweep)),
        ]  # fmt: skip
        speed: dict[int, float] = {}
        for row in [*self._rows(options, 3)][:-1]:
            speed[row["n_threads"]] = statistics.median(row["samples_ts"][1:])
            for at, value in enumerate(row["samples_ts"]):
                self.raw.sample(f"ncmoe {ncmoe}, sweep", test_name(row),
                                f"upstream, {row['n_threads']} threads", at, value)  # fmt: skip
        self.threads = max(speed, key=lambda n: speed[n])
        print(f"upstream is fastest with {self.threads} threads", file=sys.stderr)

    def _upstream(self) -> int:
        """Run llama-bench's block; return its peak of device memory in bytes."""
        args, raw, ncmoe = self.args, self.raw, self.ncmoe
        options = [
            *(["-ncmoe", str(ncmoe)] if ncmoe is not None else []), "-ub", str(self.ubatch),
            "-b", str(max(2048, self.ubatch)), *(["-t", str(self.threads)] if self.threads else []),
            *(["-d", ",".join(map(str, args.depth))] if ncmoe is None else []),
        ]  # fmt: skip
        prompts = ["-p", ",".join(map(str, args.prompt)) or "0", "-n", str(self.gen)]
        ways = [prompts]
        if ncmoe:
            ways = [["-lm", "none", *prompts]]
            if self.gen:
                ways.append(["-lm", "auto", "-p", "0", "-n", str(self.gen)])
        rows: list[Line] = []
        peaks: list[Line] = []
        for way in ways:
            *more, peak = self._rows([*options, *way], args.samples + 1)
            rows += more
            peaks.append(peak)
        memory = {name: max(peak[name] for peak in peaks) for name in peaks[0]}
        n_bytes: int = memory["device_bytes"]
        raw.add("memory", setting=self.setting, system="upstream", VmHWM=memory["rss_bytes"],
                device_peak_bytes=n_bytes, device_driver_bytes=n_bytes)  # fmt: skip
        speeds = [statistics.median(row["samples_ts"][1:]) for row in rows]
        best: dict[str, float] = {}
        for row, speed in zip(rows, speeds, strict=True):
            best[test_name(row)] = max(speed, best.get(test_name(row), 0.0))
        for row, speed in zip(rows, speeds, strict=True):
            test = test_name(row)
            system = "upstream" + f", -lm {row['load_mode']}" * (speed < best[test])
            kept = {k: v for k, v in row.items() if not k.startswith(_NO_SETTINGS)}
            raw.add("upstream", setting=self.setting, system=system, flags=options, row=kept)
            for at, tps in enumerate(row["samples_ts"]):
                raw.sample(self.setting, test, system, at, tps)
        return n_bytes

    def _ours(self, budget: int) -> None:
        """Load moegraph, and take its samples and its memory."""
        used_before = bench.used_device_bytes()
        own = bench.System(self.system, bench.ROOT, {})
        with bench.started(self.raw, own) as self.worker:
            self._load(budget)
            self._measure()
            memory = self.worker.ask("memory")
            memory["device_driver_bytes"] = bench.used_device_bytes() - used_before
            self.raw.add("memory", setting=self.setting, system=self.system, **memory)

    def _measure(self) -> None:
        """Take moegraph's samples."""
        args, gen, is_whole = self.args, self.gen, self.ncmoe is None
        if gen and not is_whole:
            self.step = 0
            for at, name in enumerate(args.traces):
                warm = at * self.each + args.warm - self.step
                self.worker.ask("decode", n=warm, seed=0)
                self.step += warm
                self._decode(0, f", {name}")
        for depth in args.depth if is_whole else [0]:
            at_depth = f" @ d{depth}" if depth else ""
            for n in args.prompt:
                self._samples(f"pp{n}{at_depth}", self.system, "prompt", n=n, depth=depth)
            if gen and is_whole:
                self._decode(depth, "")
        if gen and 0 in args.depth:
            trace = "" if is_whole else f", {args.traces[0]}"
            self._samples(f"tg{gen}", f"{self.system}, sampled{trace}", "generate", n=gen,
                          n_prompt=8, sampling=bench.SAMPLING)  # fmt: skip

    def _decode(self, depth: int, trace: str) -> None:
        """Take decode samples with the logits, and with the argmax alone unless at a depth."""
        test = f"tg{self.gen}" + (f" @ d{depth}" if depth else "")
        for argmax in ("",) if depth else ("", ", argmax"):
            way = f"{self.system}{argmax}{trace}"
            self._samples(test, way, "decode", n=self.gen, depth=depth, logits=not argmax)

    def _samples(self, test: str, system: str, do: str, n: int, **request: Any) -> None:
        """Take all samples of a test, each with its number as the seed."""
        for at in range(self.args.samples + 1):
            found = self.worker.ask(do, n=n, seed=at, **request)
            more: dict[str, Any] = {"step": self.step} if do == "decode" else {}
            self.raw.sample(self.setting, test, system, at, found.get("n", n) / found["seconds"],
                            experts=found["experts"], **more)  # fmt: skip
            self.step += n if more else 0

    def _load(self, budget: int) -> None:
        """Load with the budget as --vram; if that is too small, load without expert slots."""
        args, shape, ncmoe = self.args, self.shape, self.ncmoe
        config: dict[str, Any] = {
            "device": args.device, "n_ubatch": self.ubatch, "profile": "none", "n_ctx": self.n_ctx,
        }  # fmt: skip
        if args.threads:
            config["n_threads"] = args.threads
        about: dict[str, Any] = {"setting": self.setting, "system": self.system}
        request: dict[str, Any] = {"model": str(args.model)}
        if ncmoe is None:
            found = self.worker.ask("load", config=config | {"mode": "whole"}, **request)
            self.raw.add("load", **about, **found)
            return
        fitting: dict[str, Any] = {"vram": f"{budget}B"} if budget else {
            "pin_layers": 0, "cache_slots": max(0, shape.n_layer - ncmoe) * shape.n_expert
        }  # fmt: skip
        request["routing"] = str(self.routing) if self.routing and args.gen else None
        try:
            found = self.worker.ask("load", config=config | fitting, **request)
        except BenchError as error:
            if not budget or "OutOfDeviceMemory" not in str(error):
                raise
            self.raw.add("refused", setting=self.setting, budget=budget, why=str(error))
            print(f"{error}\n{self.setting}: loading without expert slots", file=sys.stderr)
            none = {"pin_layers": 0, "cache_slots": 0}
            found = self.worker.ask("load", config=config | none, **request)
        self.raw.add(
            "load", **about, ncmoe=ncmoe, ubatch=self.ubatch, budget=budget,
            share=sum(found["n_slots"]) / (shape.n_layer * shape.n_expert),
            expert_bytes=self.expert_bytes, **found,
        )  # fmt: skip


def compare(args: argparse.Namespace) -> None:
    """Run the comparison."""
    raw = bench.Raw("upstream", args)
    with tempfile.TemporaryDirectory() as scratch:
        comparison = Comparison(args, raw, Path(scratch) / "routing.npy")
        bench.finish(raw, "upstream", comparison.run)


if __name__ == "__main__":
    sys.exit(bench.main(parser(), compare))
