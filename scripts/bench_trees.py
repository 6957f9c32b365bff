#!/usr/bin/env python3
"""Time several checkouts in turn on one model: decode, passes of a few rows, prompts, programs.

Every SYSTEM is NAME=FOLDER[,VAR=VALUE...], a checkout with a built moegraph package. Each has its
own process, which keeps the model loaded; all load at the same time. Systems take turns after every
sample, in an order that is reversed each time. The first sample of each is written to the raw lines
but not counted. Ratios are relative to the first system.

A setting is "whole" or a percentage of the experts that have a slot on the device. With a
percentage, passes of one row replay the routing of a generated trace, the same for all systems. A
model of 22 GB takes up to 20 GB of host memory for each system and setting.

All systems get the same token ids at the same positions; every pass of --rows starts from an empty
sequence and has ids of its own, as llama-bench's passes have. If experts are missing, more samples
of --rows are not counted, because such rows choose other experts than what ran before. moegraph
copies only the argmax of a pass to the host.

With --programs, nothing of this is timed: each system's own bench_server.py (one client),
bench_lookup.py and bench_drafts.py run in turn, a process for each sample.

    scripts/bench_trees.py 35b.gguf before=../old after=. --out rows.jsonl
    scripts/bench_trees.py tiny before=../old after=. --device cpu --gen 16 --prompt 64 --rows 1 4
    scripts/bench_trees.py 35b.gguf before=../old after=. --programs server lookup
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench

# The options of each system's own scripts.
PROGRAMS = {
    "server": "bench_server.py --clients 1 --samples 3 -c 4096",
    "lookup": "bench_lookup.py --kind edit hopeless --ways off lookup --repeat 2",
    "drafts": "bench_drafts.py --kind code --mtp 3 --dflash 7 --repeat 1",
}


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.bench_parser(__doc__, samples=5)
    p.add_argument("systems", nargs="+", metavar="SYSTEM", type=bench.System.of)
    p.add_argument("--threads", type=bench.positive, metavar="N", help="CPU threads of all systems")
    p.add_argument("--settings", nargs="+", default=["whole", "60", "25", "0"], type=setting,
                   metavar="whole|PERCENT", help="experts on the device")  # fmt: skip
    p.add_argument("--gen", type=int, default=128, help="tokens of a decode sample; 0: none")
    p.add_argument("--prompt", type=int, nargs="*", default=[512, 2048])
    p.add_argument("--rows", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    p.add_argument("--seqs", type=bench.positive, nargs="*", default=[],
                   help="sequences that decode one token each in a pass; no other test runs then,"
                   " because the engine has memory for so many")  # fmt: skip
    p.add_argument("--repeat", type=bench.positive, default=7,
                   help="passes of one sample of --rows, which is their median")  # fmt: skip
    p.add_argument("--warm", type=int, default=96, help="tokens first, if experts are missing")
    p.add_argument("--ubatch", type=bench.positive, default=512)
    p.add_argument("--miss", default="auto", choices=("auto", "stream", "cpu"),
                   help="as of moegraph; auto depends on times while all load")  # fmt: skip
    p.add_argument("--programs", nargs="+", default=[], choices=PROGRAMS)
    p.add_argument("--tokens", type=bench.positive, default=256, help="of a program's answers")
    p.add_argument("--draft", default="", help="a DFlash file, for the program `drafts`")
    return p


def setting(text: str) -> str:
    """Read 'whole' or a percentage, for argparse."""
    if text == "whole":
        return text
    try:
        value = float(text.rstrip("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage, 0 to 100")
    return f"{value:g} %"


# Samples of --rows that precede those of a test if experts are missing.
_SETTLING = 6

# A sample: its value, and what else is noted. Of a worker and the number of the sample.
Sample = Callable[[bench.Worker, int], tuple[float, dict[str, object]]]


def tests(args: argparse.Namespace) -> dict[str, Sample]:
    """Return the tests by name in the order in which they run; those of rows take ms."""

    def timed(do: str, n_tokens: int, **request: int) -> Sample:
        def sample(worker: bench.Worker, at: int) -> tuple[float, dict[str, object]]:
            found = worker.ask(do, seed=at, **request)
            return n_tokens / found["seconds"], {"experts": found["experts"]}

        return sample

    def rows(n: int) -> Sample:
        def sample(worker: bench.Worker, at: int) -> tuple[float, dict[str, object]]:
            found = worker.ask("rows", n=n, seed=at, repeat=args.repeat, logits=False)
            times = found["times"]
            return 1e3 * statistics.median(times), {"times": times, "experts": found["experts"]}

        return sample

    gen = args.gen
    if args.seqs:
        return {f"seqs {n}": timed("together", n * gen, n_seqs=n, n=gen) for n in args.seqs}
    return {
        **({f"tg{gen}": timed("decode", gen, n=gen)} if gen else {}),
        **{f"rows {n}": rows(n) for n in args.rows},
        **{f"pp{n}": timed("prompt", n, n=n, logits=False) for n in args.prompt},
    }


def config_for(args: argparse.Namespace, setting: str, n_all: int) -> dict[str, object]:
    """Return the settings with which a worker loads."""
    longest = max([args.gen, args.warm, *args.prompt, *args.rows, 256])
    threads = {"n_threads": args.threads} if args.threads else {}
    config = {"n_ctx": longest, "n_ubatch": args.ubatch, **threads, "device": args.device}
    config["profile"] = "none"
    if args.seqs:
        config["n_seq"] = max(args.seqs)
    if setting == "whole":
        return config | {"mode": "whole"}
    slots = round(float(setting.split()[0]) / 100 * n_all)
    return config | {"pin_layers": 0, "cache_slots": slots, "miss": args.miss}


def measure(args: argparse.Namespace, raw: bench.Raw, workers: list[bench.Worker]) -> None:
    """Take all samples of all settings."""
    from _traces import router_of, write_routing

    shape, _ = router_of(args.model)
    with tempfile.TemporaryDirectory() as scratch:
        routing = Path(scratch) / "routing.npy"
        raw.add("traces", **write_routing(routing, shape, ["sticky"], 2048))
        for setting in args.settings:
            partial = setting != "whole"
            config = config_for(args, setting, shape.n_layer * shape.n_expert)
            replayed = str(routing) if partial else None
            for worker in workers:
                worker.tell("load", model=str(args.model), config=config, routing=replayed)
            for worker in workers:
                raw.add("load", setting=setting, system=worker.name, **worker.hear())
            if partial:
                for worker in workers:
                    worker.ask("decode", n=args.warm, seed=0)
            for test, sample in tests(args).items():
                is_rows = test.startswith("rows")
                unit, n_settling = "ms" if is_rows else "tok/s", _SETTLING * (is_rows and partial)
                for worker in workers:
                    for at in range(n_settling):
                        sample(worker, args.samples + 1 + at)
                for at in range(args.samples + 1):
                    for worker in workers if at % 2 else reversed(workers):
                        value, more = sample(worker, at)
                        raw.sample(setting, test, worker.name, at, value, unit, **more)
            for worker in workers:
                raw.add("memory", setting=setting, system=worker.name, **worker.ask("memory"))
                worker.ask("unload")


def run_programs(args: argparse.Namespace, raw: bench.Raw) -> None:
    """Run each program of all systems in turn; the first sample of each counts too."""
    for program in args.programs:
        for at in range(1, args.samples + 1):
            for one in args.systems if at % 2 else reversed(args.systems):
                for test, value in program_samples(args, program, one.folder):
                    raw.sample(program, test, one.name, at, value)


def program_samples(
    args: argparse.Namespace, program: str, folder: Path
) -> Iterator[tuple[str, float]]:
    """Run a program of one system; yield names of tests, and tokens a second."""
    script, *options = PROGRAMS[program].split()
    command = [sys.executable, str(folder / "scripts" / script), str(args.model)]
    command += [*options, "--tokens", str(args.tokens), "--device", args.device]
    command += ["--draft", args.draft] if args.draft and program == "drafts" else []
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "lines.jsonl"
        done = subprocess.run(
            [*command, "--out", str(out)], check=False, capture_output=True, text=True
        )
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise bench.BenchError(f"{folder}: {script}: {said[-1] if said else 'it failed'}")
        for line in map(json.loads, out.read_text(encoding="utf-8").splitlines()):
            if "error" in line:
                raise bench.BenchError(f"{folder}: {script}: {line['error']}")
            if line.get("what") == "clients":
                yield "one client", line["decode_per_s"] or line["tokens_per_s"]
            elif "way" in line:
                yield f"{line['kind']}, {line['way']}", line.get("at_rates", line["tps"])


def compare(args: argparse.Namespace) -> None:
    """Run the comparison."""
    names = [one.name for one in args.systems]
    if len(set(names)) < len(names):
        raise bench.BenchError(f"two systems have one name: {', '.join(names)}")
    raw = bench.Raw("trees", args)

    def work() -> None:
        if args.programs:
            return run_programs(args, raw)
        with ExitStack() as stack:
            own = stack.enter_context
            measure(args, raw, [own(bench.started(raw, one)) for one in args.systems])

    bench.finish(raw, names[0], work)


if __name__ == "__main__":
    sys.exit(bench.main(parser(), compare))
