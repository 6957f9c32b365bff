#!/usr/bin/env python3
"""Profile decoded tokens kernel by kernel with NVIDIA's ncu, beside their time without it.

ncu runs one kernel at a time, without the early starts and branches of a captured graph: "left",
the time of a token less that of its kernels, is negative where these hide more than gaps cost.
Launches of a layer are those from a router's top-k to the next: experts of one layer and the mixer
of the one after.

    scripts/profile_token.py 35b.gguf --settings whole 60
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
import bench_trees as trees

OPTIONS = """--csv --metrics gpu__time_duration.sum --print-units base --clock-control none
    --cache-control none --graph-profiling node --profile-from-start off --log-file""".split()
# A launch: name and grid of a kernel, and us.
Launch = tuple[str, str, float]


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.bench_parser(__doc__)
    p.add_argument("--settings", nargs="+", default=["whole", "60"], type=trees.setting,
                   metavar="whole|PERCENT", help="experts on the device")  # fmt: skip
    p.add_argument("--tokens", type=bench.positive, default=4, metavar="N", help="under ncu")
    p.add_argument("--ncu", default="ncu", metavar="FILE")
    p.set_defaults(gen=0, prompt=[], rows=[], seqs=[], ubatch=512, threads=None, warm=96,
                   miss="stream")  # fmt: skip
    return p


def parse(lines: Iterable[str]) -> list[Launch]:
    """Return the launches of ncu's CSV in order; lines of other kinds are skipped."""
    # what is left out of names: types of results, casts of template arguments, parameters
    rest = re.compile(r"^void |\((\w| )+\)(?=[\w-])|\([^()]*\)$")
    return [
        (rest.sub("", row["Kernel Name"])[:70], re.sub(r"[() ]", "", row["Grid Size"]),
         float(row["Metric Value"].replace(",", "")) / 1e3)
        for row in csv.DictReader(line for line in lines if line.startswith('"'))
    ]  # fmt: skip


def by_kernel(launches: Sequence[Launch], n: int) -> list[list[str]]:
    """Return rows of n tokens: kernel, grid, launches a token, us each, us a token, share."""
    found: dict[tuple[str, str], list[float]] = {}
    for name, grid, us in launches:
        found.setdefault((name, grid), []).append(us)
    all_us = [us for _, _, us in launches]
    lines = [*sorted(found.items(), key=lambda item: -sum(item[1])), (("all", ""), all_us)]
    return [
        [*key, f"{len(us) / n:g}", f"{statistics.mean(us):.2f}", f"{sum(us) / n:.1f}",
         f"{sum(us) / sum(all_us):.1%}"]
        for key, us in lines
    ]  # fmt: skip


def by_layer(launches: Sequence[Launch], n: int) -> list[list[str]]:
    """Return rows of n tokens: kind of layer, layers a token, launches and us of each."""
    chooses = ("topk_moe", "moegraph_router")  # for several rows, and for one
    ends = [at for at, (name, _, _) in enumerate(launches, 1) if name.startswith(chooses)]
    found: dict[str, list[Sequence[Launch]]] = {}
    for at, (begin, end) in enumerate(zip(ends, ends[1:]), 1):
        part = launches[begin:end]
        kind = "attention" if any("attn" in name for name, _, _ in part) else "another mixer"
        found.setdefault(kind if at % (len(ends) // n) else "around the head", []).append(part)
    return [
        [kind, f"{len(parts) / n:g}", bench.spread([len(part) for part in parts], 0),
         bench.spread([sum(us for _, _, us in part) for part in parts])]
        for kind, parts in found.items()
    ]  # fmt: skip


def profile(args: argparse.Namespace) -> None:
    """Time and profile all settings, and print their tables."""
    from _traces import router_of, write_routing

    if not shutil.which(args.ncu):
        raise bench.BenchError(f"there is no {args.ncu}; it comes with CUDA's toolkit")
    raw, own = bench.Raw("profile", args), bench.System("moegraph", bench.ROOT, {})
    shape, n = router_of(args.model)[0], args.tokens
    with tempfile.TemporaryDirectory() as scratch:
        for setting in args.settings:
            log, routing = Path(scratch) / f"{setting}.csv", Path(scratch) / "routing.npy"
            write_routing(routing, shape, ["sticky"], 1024)
            config = trees.config_for(args, setting, shape.n_layer * shape.n_expert)
            replayed = None if setting == "whole" else str(routing)
            load = {"model": str(args.model), "config": config, "routing": replayed}
            with bench.started(raw, own) as worker:
                worker.ask("load", **load)
                worker.ask("decode", n=args.warm, seed=0)
                found = [worker.ask("decode", n=64, seed=at)["seconds"] for at in (1, 2, 3)]
            with bench.started(raw, own, [args.ncu, *OPTIONS, str(log)]) as worker:
                worker.ask("load", **load)
                worker.ask("decode", n=args.warm, seed=0)
                worker.ask("decode", n=n, seed=1, profiled=True)
                worker.end()
            said = log.read_text(errors="replace").splitlines() if log.is_file() else []
            launches, times = parse(said), [1e6 * seconds / 64 for seconds in found]
            if not launches:
                raise bench.BenchError(f"ncu saw no kernel: {' / '.join(said[-2:])}")
            raw.add("profile", setting=setting, times=times, n=n, launches=launches)
            left = statistics.median(times) - sum(us for _, _, us in launches) / n
            print(f"\n{setting}: a token takes {bench.spread(times)} us, left {left:.1f} us\n")
            head = ["kernel", "grid", "launches a token", "us each", "us a token", "share"]
            print(bench.table(head, by_kernel(launches, n)))
            print(bench.table(["layer", "a token", "launches", "us"], by_layer(launches, n)))


if __name__ == "__main__":
    sys.exit(bench.main(parser(), profile))
