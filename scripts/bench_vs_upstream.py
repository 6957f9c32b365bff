#!/usr/bin/env python3
"""Compare moegraph with llama-bench, with every expert on the device: decode and prompts, by depth.

Both run the same file on the same device with the same -ub, in turn: llama-bench with -r N, then
the same number of samples of moegraph, whose process keeps the model loaded. On both sides, the
first sample of a test is written to the raw lines but not counted.

Rows of moegraph copy the logits of a pass's last row to the host, as llama_decode does. "argmax"
rows copy only the device's argmax, as greedy generation does; "sampled" rows go through
`Engine.generate` at temperature 0.8. At a depth, moegraph computes the tokens before the test again
for every sample (not timed), while llama-bench does so once: use few samples there.

    scripts/bench_vs_upstream.py 35b.gguf --llama-bench up/llama-bench --ubatch 512 2048
    scripts/bench_vs_upstream.py 35b.gguf --llama-bench up/llama-bench --depth 8192 32768 \
        --prompt 512 --samples 3
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
from _llama_bench import LlamaBench, add_upstream


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("model", type=bench.model_path, help="a GGUF file, or a shipped model's name")
    add_upstream(p)
    bench.add_common(p)
    p.add_argument("--prompt", type=bench.positive, nargs="*", default=[512, 2048])
    p.add_argument("--gen", type=int, default=128, help="tokens of a decode sample; 0: none")
    p.add_argument(
        "--depth", type=int, nargs="+", default=[0], help="context positions filled before a test"
    )
    p.add_argument(
        "--ubatch",
        type=bench.positive,
        nargs="+",
        default=[512],
        help="-ub of both sides; decode is measured with the first",
    )
    return p


def upstream_block(
    args: argparse.Namespace, raw: bench.Raw, program: LlamaBench, ubatch: int
) -> None:
    """Run llama-bench once and append its samples."""
    gen = args.gen if ubatch == args.ubatch[0] else 0
    common = [
        "-ub", str(ubatch), "-b", str(max(2048, ubatch)), "-d", ",".join(map(str, args.depth)),
        *(["-t", str(args.threads)] if args.threads else []),
    ]  # fmt: skip
    prompts = ",".join(map(str, args.prompt)) or "0"
    tests = ["-p", prompts, "-n", str(gen)]
    program.block(raw, f"ub {ubatch}", [*common, *tests], args.samples)


def our_block(args: argparse.Namespace, raw: bench.Raw, worker: bench.Worker, ubatch: int) -> None:
    """Take moegraph's samples of the same tests, as one block."""
    setting, mode = f"ub {ubatch}", "whole"
    for depth in args.depth:
        at_depth = f" @ d{depth}" if depth else ""
        for n in args.prompt:
            for at in range(args.samples + 1):
                found = worker.ask("prompt", n=n, seed=at, depth=depth)
                raw.sample(setting, f"pp{n}{at_depth}", mode, at, n / found["seconds"])
        if not args.gen or ubatch != args.ubatch[0]:
            continue
        test, n = f"tg{args.gen}{at_depth}", args.gen
        ways = ((mode, True), (f"{mode}, argmax", False))
        for system, logits in ways[:1] if depth else ways:
            for at in range(args.samples + 1):
                found = worker.ask("decode", n=n, seed=at, depth=depth, logits=logits)
                raw.sample(setting, test, system, at, n / found["seconds"])
        if depth == 0:
            for at in range(args.samples + 1):
                found = worker.ask("generate", n=n, n_prompt=8, seed=at, sampling=bench.SAMPLING)
                raw.sample(setting, test, f"{mode}, sampled", at, found["n"] / found["seconds"])


def compare(args: argparse.Namespace, raw: bench.Raw, clock: bench.Clock) -> None:
    """Measure every -ub: a block of upstream, then ours."""
    program = LlamaBench(args, clock)
    longest = max(args.depth) + max([*args.prompt, args.gen, 256])
    for ubatch in args.ubatch:
        setting, spec = f"ub {ubatch}", f"whole={bench.ROOT}"
        with bench.start_worker(spec, clock) as worker:
            bench.note_system(raw, spec, worker)
            config = {"device": args.device, "mode": "whole", "n_ubatch": ubatch,
                      "n_ctx": longest, "profile": "none"}  # fmt: skip
            if args.threads:
                config["n_threads"] = args.threads
            loaded = worker.ask("load", model=str(args.model), config=config)
            raw.add("load", setting=setting, system="whole", **loaded)
            upstream_block(args, raw, program, ubatch)
            our_block(args, raw, worker, ubatch)
            raw.add("memory", setting=setting, system="whole", **worker.ask("memory"))


def main() -> int:
    """Run the comparison."""
    args = parser().parse_args()

    def run() -> None:
        clock, raw = bench.Clock(args.time_limit), bench.Raw("vs_upstream", args)
        bench.finish(args, raw, "upstream", lambda: compare(args, raw, clock))

    return bench.guarded("bench_vs_upstream.py", run)


if __name__ == "__main__":
    sys.exit(main())
