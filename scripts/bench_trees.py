#!/usr/bin/env python3
"""Time several builds in turn on one model: decode, passes of a few rows, prompts.

Every SYSTEM is NAME=FOLDER[,VAR=VALUE...]: a checkout with a built moegraph package, or, if NAME
starts with "upstream", the folder of unpatched llama.cpp that tests/oracle uses. Each system has
its own process, which keeps the model loaded; all load at the same time. Systems take turns after
every sample, in an order that is reversed each time. The first sample of each is written to the
raw lines but not counted. Ratios are relative to the first system.

A setting is "whole" or a percentage of the experts that have a slot on the device. With a
percentage, passes of one row replay the routing of a generated trace, the same for all systems. A
model of 22 GB takes up to 20 GB of host memory for each system and setting.

All systems get the same token ids at the same positions; every pass of --rows starts from an empty
sequence and has ids of its own, as llama-bench's passes have. moegraph copies only the argmax of a
pass to the host, unless --results says otherwise.

--then 8 32 128 times prompts and the first tokens after each, and nothing else. Every prompt is
another one of the trace's model, and so are the tokens after it: the cache counts the prompt as if
its rows had chosen what the trace says, although its graphs compute what the file's router chooses.

    scripts/bench_trees.py 35b.gguf before=../old after=. --out rows.jsonl
    scripts/bench_trees.py 35b.gguf upstream=.oracle now=. --results logits argmax --gen 0 --prompt
    scripts/bench_trees.py tiny before=../old after=. --device cpu --gen 16 --prompt 64 --rows 1 4
    scripts/bench_trees.py 35b.gguf before=../old after=. --settings 60 25 --then 8 32 128
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench

if TYPE_CHECKING:
    from _traces import ModelFacts


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("model", type=bench.model_path, help="a GGUF file, or a shipped model's name")
    p.add_argument("systems", nargs="+", metavar="SYSTEM")
    bench.add_common(p)
    p.add_argument(
        "--settings",
        nargs="+",
        default=["whole", "60", "25", "0"],
        type=setting,
        metavar="whole|PERCENT",
        help="experts on the device",
    )
    p.add_argument("--gen", type=int, default=128, help="tokens of a decode sample; 0: none")
    p.add_argument("--prompt", type=int, nargs="*", default=[512, 2048])
    p.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    p.add_argument(
        "--depth",
        type=int,
        nargs="*",
        default=[0],
        help="positions that a sequence holds before a decode sample",
    )
    p.add_argument(
        "--seqs",
        type=bench.positive,
        nargs="*",
        default=[],
        help="sequences that decode one token each in a pass; then no other test runs, because "
        "the engine has memory for so many sequences; not for upstream",
    )
    p.add_argument(
        "--then",
        type=bench.positive,
        nargs="*",
        default=[],
        metavar="N",
        help="time the first N tokens after each prompt; then no other test runs; not for upstream",
    )
    p.add_argument(
        "--repeat",
        type=bench.positive,
        default=7,
        help="passes of one sample of --rows; their median is the sample",
    )
    p.add_argument(
        "--warm", type=int, default=96, help="tokens to decode first, if experts are missing"
    )
    p.add_argument("--ubatch", type=bench.positive, default=512)
    p.add_argument(
        "--results",
        nargs="+",
        default=["argmax"],
        choices=("argmax", "logits"),
        help="what moegraph copies to the host after a pass: the device's argmax, or "
        "the logits, as llama_decode always does; give both to measure both",
    )
    p.add_argument(
        "--all-rows",
        action="store_true",
        help="return the results of all rows in passes of --rows, not only of the last row",
    )
    p.add_argument(
        "--miss",
        default="auto",
        choices=("auto", "stream", "cpu"),
        help="as of moegraph; auto depends on what each system measures while it loads, and they "
        "load at the same time",
    )
    p.add_argument(
        "--host-pin",
        default="auto",
        choices=("auto", "all", "none"),
        help="as of moegraph; only graphs of layers in pinned memory fetch missing experts",
    )
    p.add_argument("--trace", default="sticky", help="preset of the replayed routing")
    return p


def setting(text: str) -> str:
    """Read 'whole' or a percentage, for argparse."""
    return text if text == "whole" else f"{bench.share(text):g} %"


@dataclass(frozen=True)
class Test:
    """One test: its name, its unit, and a function that takes a sample, with or without logits."""

    name: str
    unit: str
    sample: Callable[[bench.Worker, int, bool], tuple[float, dict[str, object]]]


def tests(args: argparse.Namespace) -> list[Test]:
    """Return the tests in the order in which they run."""

    def decode(depth: int) -> Test:
        def sample(worker: bench.Worker, at: int, logits: bool) -> tuple[float, dict[str, object]]:
            found = worker.ask("decode", n=args.gen, seed=at, depth=depth, logits=logits)
            return args.gen / found["seconds"], {"experts": found["experts"]}

        return Test(f"tg{args.gen}" + (f" @ {depth}" if depth else ""), "tok/s", sample)

    def together(n: int) -> Test:
        def sample(worker: bench.Worker, at: int, logits: bool) -> tuple[float, dict[str, object]]:
            found = worker.ask("together", n_seqs=n, n=args.gen, seed=at)
            return n * args.gen / found["seconds"], {"experts": found["experts"]}

        return Test(f"seqs {n}", "tok/s", sample)

    def prompt(n: int) -> Test:
        def sample(worker: bench.Worker, at: int, logits: bool) -> tuple[float, dict[str, object]]:
            found = worker.ask("prompt", n=n, seed=at, logits=logits)
            return n / found["seconds"], {"experts": found["experts"]}

        return Test(f"pp{n}", "tok/s", sample)

    def rows(n: int) -> Test:
        def sample(worker: bench.Worker, at: int, logits: bool) -> tuple[float, dict[str, object]]:
            found = worker.ask("rows", n=n, seed=at, repeat=args.repeat, logits=logits,
                               all_rows=args.all_rows)  # fmt: skip
            times = found["times"]
            return 1e3 * statistics.median(times), {"times": times, "experts": found["experts"]}

        return Test(f"rows {n}", "ms", sample)

    if args.then:
        return []
    if args.seqs:
        return [together(n) for n in args.seqs]
    generation = [decode(depth) for depth in args.depth] if args.gen else []
    return [*generation, *map(rows, args.rows), *map(prompt, args.prompt)]


def config_for(args: argparse.Namespace, name: str, setting: str, n_all: int) -> dict[str, object]:
    """Return the settings with which a worker loads."""
    decoded = max(args.gen, args.warm) + max(args.depth, default=0)
    n_then = max(args.then, default=0)
    longest = max([decoded, *(n + n_then for n in args.prompt), *args.rows, 256])
    common = {"n_ctx": longest, "n_ubatch": args.ubatch}
    if bench.is_upstream(name):
        place = {"device": "cpu" if args.device == "cpu" else "gpu"}
        n_threads = args.threads or len(os.sched_getaffinity(0))
        return {**common, **place, "threads": n_threads, "n_batch": max(2048, args.ubatch)}
    threads = {"n_threads": args.threads} if args.threads else {}
    config = {**common, **threads, "device": args.device, "profile": "none"}
    if args.seqs:
        config["n_seq"] = max(args.seqs)
    if setting == "whole":
        return config | {"mode": "whole"}
    slots = round(float(setting.split()[0]) / 100 * n_all)
    config |= {"pin_layers": 0, "cache_slots": slots}
    return config | {"miss": args.miss, "host_pin": args.host_pin}


def routings(
    args: argparse.Namespace, raw: bench.Raw, facts: ModelFacts, folder: Path
) -> tuple[Path, list[Path]]:
    """Write the routing of single rows, and with --then that of each prompt; see _traces.py."""
    from _traces import write_prompts, write_routing

    if args.then:
        lengths = [n for n in args.prompt for _ in range(args.samples + 1)]
        return write_prompts(folder, facts, args.trace, args.warm, lengths, max(args.then))
    raw.add("traces", **write_routing(folder / "routing.npy", facts, [args.trace], 2048))
    return folder / "routing.npy", []


def measure(args: argparse.Namespace, raw: bench.Raw, workers: list[bench.Worker]) -> None:
    """Take all samples of all settings."""
    from _traces import ModelFacts

    facts = ModelFacts.of(args.model)
    with tempfile.TemporaryDirectory() as scratch:
        routing, read = routings(args, raw, facts, Path(scratch))
        for setting in args.settings:
            partial = setting != "whole"
            # upstream has no such setting: -ncmoe keeps whole layers on the CPU
            taking = [w for w in workers if not (partial and bench.is_upstream(w.name))]
            for worker in taking:
                replayed = str(routing) if partial else None
                config = config_for(args, worker.name, setting, facts.n_experts)
                more = {} if bench.is_upstream(worker.name) else {"routing": replayed}
                worker.tell("load", model=str(args.model), config=config, **more)
            for worker in taking:
                raw.add("load", setting=setting, system=worker.name, **worker.hear())
            if partial:
                for worker in taking:
                    worker.ask("decode", n=args.warm, seed=0)
            if args.then:
                run_answers(args, raw, taking, setting, read if partial else [])
            for test in tests(args):
                run_test(args, raw, taking, setting, test)
            for worker in taking:
                memory = worker.ask("memory")
                raw.add("memory", setting=setting, system=worker.name, **memory)
                worker.ask("unload")


def run_test(
    args: argparse.Namespace, raw: bench.Raw, workers: list[bench.Worker], setting: str, test: Test
) -> None:
    """Take the samples of one test, the systems in turn."""
    for at in range(args.samples + 1):
        for worker in workers if at % 2 else reversed(workers):
            for results in args.results:
                first = results == args.results[0]
                if bench.is_upstream(worker.name) and not first:
                    continue  # llama_decode always copies the logits
                name = worker.name if first else f"{worker.name}, {results}"
                value, more = test.sample(worker, at, results == "logits")
                raw.sample(setting, test.name, name, at, value, test.unit, **more)


def run_answers(
    args: argparse.Namespace,
    raw: bench.Raw,
    workers: list[bench.Worker],
    setting: str,
    read: list[Path],
) -> None:
    """Time the first tokens after prompts, the systems in turn.

    read: the routing of each prompt, in the order in which the prompts come; [] for the router's.
    """
    then, n_each = sorted(args.then), args.samples + 1
    for at in range(n_each * len(args.prompt)):
        n, sample = args.prompt[at // n_each], at % n_each
        routing = str(read[at]) if read else None
        for worker in workers if at % 2 else reversed(workers):
            found = worker.ask("answer", n=n, seed=at, then=then, routing=routing)
            raw.sample(setting, f"pp{n}", worker.name, sample, n / found["seconds"])
            more = {"prompt_s": found["seconds"], "experts": found["experts"]}
            for count, seconds in zip(then, found["then_seconds"]):
                name = f"{count} after pp{n}"
                raw.sample(setting, name, worker.name, sample, 1e3 * seconds, "ms", **more)


def main() -> int:
    """Run the comparison."""
    args = parser().parse_args()

    def run() -> None:
        bench.check_systems(args.systems)
        if args.seqs and any(map(bench.is_upstream, args.systems)):
            raise bench.BenchError("--seqs: upstream's batches of several sequences are not timed")
        if args.then and (args.seqs or any(map(bench.is_upstream, args.systems))):
            raise bench.BenchError("--then: not with --seqs, and not of upstream")
        clock, raw = bench.Clock(args.time_limit), bench.Raw("trees", args)

        def compare() -> None:
            with ExitStack() as stack:
                workers = [
                    stack.enter_context(bench.start_worker(spec, clock)) for spec in args.systems
                ]
                for spec, worker in zip(args.systems, workers):
                    bench.note_system(raw, spec, worker)
                measure(args, raw, workers)

        bench.finish(args, raw, args.systems[0].partition("=")[0], compare)

    return bench.guarded("bench_trees.py", run)


if __name__ == "__main__":
    sys.exit(main())
