#!/usr/bin/env python3
"""Compare moegraph with llama-bench, with every expert on the device: decode and prompts, by depth.

Both run the same file on the same device with the same -ub, in turn and in blocks: llama-bench
with -r N is one block, and the same number of samples of moegraph is the next. moegraph's process
keeps the model loaded. On both sides, the first sample of a block is written to the raw lines but
not counted.

Rows of moegraph copy the logits of a pass's last row to the host, as llama_decode does. "argmax"
rows copy only the device's argmax, as greedy generation does; "sampled" rows go through
`Engine.generate` with --sampling. At a depth, moegraph computes the tokens before the test again
for every sample (not timed), while llama-bench does so once: use few samples there.

    scripts/bench_vs_upstream.py 35b.gguf --llama-bench up/llama-bench --ubatch 512 2048
    scripts/bench_vs_upstream.py 35b.gguf --llama-bench up/llama-bench --depth 8192 32768 \
        --prompt 512 --samples 3
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
from _llama_bench import LlamaBench, add_upstream, settings_of, test_name


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("model", type=bench.model_path, help="a GGUF file, or a shipped model's name")
    add_upstream(p)
    bench.add_common(p)
    p.add_argument(
        "--blocks",
        type=bench.positive,
        default=1,
        metavar="N",
        help="number of blocks of each side; a block has --samples samples",
    )
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
    p.add_argument("--modes", nargs="+", default=["whole"], choices=("whole", "layered"))
    p.add_argument(
        "--sampling",
        type=json.loads,
        default={"temperature": 0.8, "seed": 1},
        metavar="JSON",
        help="settings of 'sampled' rows, as fields of SamplingParams",
    )
    p.add_argument(
        "--graph-opt",
        action="store_true",
        help="also measure upstream's decode with GGML_CUDA_GRAPH_OPT=1",
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
    note_rows(args, raw, program, f"ub {ubatch}", "upstream", [*common, *tests])
    if args.graph_opt and gen:
        note_rows(args, raw, program, f"ub {ubatch}", "upstream, GRAPH_OPT",
                  [*common, "-p", "0", "-n", str(gen)], GGML_CUDA_GRAPH_OPT="1")  # fmt: skip


def note_rows(
    args: argparse.Namespace, raw: bench.Raw, program: LlamaBench, setting: str, system: str,
    options: list[str], **variables: str,
) -> None:  # fmt: skip
    """Run one block of llama-bench; append every sample and its memory."""
    for _, row in program.rows(options, args.samples + 1, **variables):
        raw.add("upstream", setting=setting, system=system, flags=options, row=settings_of(row))
        for at, tps in enumerate(row["samples_ts"]):
            raw.sample(setting, test_name(row), system, at, tps)
    raw.add("memory", setting=setting, system=system, VmHWM=program.rss_bytes,
            device_peak_bytes=program.device_bytes)  # fmt: skip


def our_block(
    args: argparse.Namespace, raw: bench.Raw, worker: bench.Worker, mode: str, ubatch: int
) -> None:
    """Take moegraph's samples of the same tests, as one block."""
    setting = f"ub {ubatch}"
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
                found = worker.ask("generate", n=n, n_prompt=8, seed=at, sampling=args.sampling)
                raw.sample(setting, test, f"{mode}, sampled", at, found["n"] / found["seconds"])


def compare(args: argparse.Namespace, raw: bench.Raw, clock: bench.Clock) -> None:
    """Measure every -ub, with blocks of upstream and of each mode in turn."""
    program = LlamaBench(args, clock)
    longest = max(args.depth) + max([*args.prompt, args.gen, 256])
    for ubatch in args.ubatch:
        with ExitStack() as stack:
            workers = {}
            for mode in args.modes:
                worker = stack.enter_context(bench.start_worker(f"{mode}={bench.ROOT}", clock))
                bench.note_system(raw, f"{mode}={bench.ROOT}", worker)
                config = {"device": args.device, "mode": mode, "n_ubatch": ubatch,
                          "n_ctx": longest, "profile": "none"}  # fmt: skip
                if args.threads:
                    config["n_threads"] = args.threads
                loaded = worker.ask("load", model=str(args.model), config=config)
                raw.add("load", setting=f"ub {ubatch}", system=mode, **loaded)
                workers[mode] = worker
            for _ in range(args.blocks):
                upstream_block(args, raw, program, ubatch)
                for mode, worker in workers.items():
                    our_block(args, raw, worker, mode, ubatch)
            for mode, worker in workers.items():
                raw.add("memory", setting=f"ub {ubatch}", system=mode, **worker.ask("memory"))


def main() -> int:
    """Run the comparison."""
    args = parser().parse_args()

    def run() -> None:
        clock, raw = bench.Clock(args.time_limit), bench.Raw("vs_upstream", args)
        bench.finish(args, raw, "upstream", lambda: compare(args, raw, clock))

    return bench.guarded("bench_vs_upstream.py", run)


if __name__ == "__main__":
    sys.exit(main())
