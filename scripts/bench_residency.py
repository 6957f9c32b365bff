#!/usr/bin/env python3
"""Decode speed when the experts do not fit, beside llama.cpp's -ncmoe at the same device memory.

For each N of --ncmoe: llama-bench -ncmoe N is run once and the driver is asked how much device
memory it takes; moegraph gets as many expert slots as fit into that. Then both run in turn.
moegraph's routing is replayed from a generated trace with the statistics of real models (its hash
is printed), each sample continuing where the last one ended, after --warm tokens that do not count.

Example:
    scripts/bench_residency.py 35b.gguf --llama-bench upstream/llama-bench --ncmoe 16 30 40
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_vs_upstream import common_parser, run_llama_bench  # noqa: E402

from moegraph.cli.svg import line_chart  # noqa: E402
from moegraph.config import EngineConfig, default_threads  # noqa: E402
from moegraph.engine import Engine  # noqa: E402
from moegraph.errors import MoegraphError  # noqa: E402
from moegraph.experts.cost import find_machine  # noqa: E402
from moegraph.experts.generator import generate_trace  # noqa: E402
from moegraph.experts.identity import RouterShape  # noqa: E402
from moegraph.experts.policy import POLICIES  # noqa: E402
from moegraph.experts.simulate import simulate  # noqa: E402
from moegraph.experts.trace import Trace  # noqa: E402
from moegraph.experts.tracestats import trace_stats  # noqa: E402
from moegraph.ggml.device import Device  # noqa: E402
from moegraph.ggml.lib import patchset  # noqa: E402
from moegraph.modelfile import open_model  # noqa: E402

MIB = 1 << 20


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = common_parser(__doc__)
    p.add_argument("--ncmoe", type=int, nargs="*", default=[16, 30, 40])
    p.add_argument("--tokens", type=int, default=128, help="tokens of a sample")
    p.add_argument("--warm", type=int, default=64, help="tokens before the first sample")
    p.add_argument("--miss", nargs="*", default=["auto"], choices=("auto", "cpu", "stream"))
    p.add_argument("--policy", default="lfu")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, default=default_threads())
    p.add_argument("--machine", help="predict the speeds too; as in moegraph simulate")
    p.add_argument("--plot", type=Path, help="draw medians against the share of experts (SVG)")
    return p


class MemoryWatch:
    """The most device memory in use while it is open, above what was in use when it opened."""

    def __enter__(self) -> MemoryWatch:
        self._device = Device("cuda:0")
        self._before = self._least = self._device.memory()[0]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self._least = min(self._least, self._device.memory()[0])

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._device.close()

    @property
    def n_bytes(self) -> int:
        """Bytes that others took meanwhile."""
        return self._before - self._least


def engine_for(
    args: argparse.Namespace, n_slots: int, miss: str, ids: npt.NDArray[np.int32]
) -> Engine:
    """Load an engine with n_slots expert slots in all."""
    config = EngineConfig(
        device="cuda:0", n_ctx=512, pin_layers=0, cache_slots=n_slots, policy=args.policy,
        miss=miss, n_threads=args.threads, n_ubatch=64,
    )  # fmt: skip
    return Engine.load(args.model, config, routing=ids)


def decode(engine: Engine, n: int) -> float:
    """Run n single-row passes from an empty sequence; return tokens per second."""
    engine.reset()
    start = time.perf_counter()
    for token in range(n):
        engine.forward(np.array([token], dtype=np.int32), greedy=True)
    return n / (time.perf_counter() - start)


def upstream(args: argparse.Namespace, ncmoe: int, n: int) -> float:
    """Run llama-bench once; return tokens per second."""
    extra = ["-ngl", "99", "-ncmoe", str(ncmoe), "-p", "0", "-n", str(n), "-t", str(args.threads)]
    return run_llama_bench(args.llama_bench, args.model, extra, args.lib_path)[f"tg{n}"]


def compare(
    args: argparse.Namespace, ncmoe: int, fixed: int, expert_bytes: int, trace: Trace
) -> list[dict[str, object]]:
    """Measure one point of the curve; return a row for upstream and one for each way of missing."""
    with MemoryWatch() as watch:
        upstream(args, ncmoe, 16)
    budget = watch.n_bytes
    n_all = trace.shape.n_layer * trace.shape.n_expert
    n_slots = max(0, min((budget - fixed - 64 * MIB) // expert_bytes, n_all))
    rows = [{"system": f"upstream -ncmoe {ncmoe}", "tps": [], "base": [], "device": budget}]
    for miss in args.miss:
        row, base = sample(args, ncmoe, miss, n_slots, trace)
        rows.append(row | {"base": base})
        rows[0]["tps"] = rows[0]["base"] = rows[0]["tps"] + base
    for row in rows:
        row |= {"ncmoe": ncmoe, "ratio": [a / b for a, b in zip(row["tps"], row["base"])]}
        row["share"] = n_slots / n_all
    return rows


def sample(
    args: argparse.Namespace, ncmoe: int, miss: str, n_slots: int, trace: Trace
) -> tuple[dict[str, object], list[float]]:
    """Run one engine and upstream in turn; return the engine's row and upstream's samples."""
    with engine_for(args, n_slots, miss, trace.ids.astype(np.int32)) as engine:
        decode(engine, args.warm)
        before, tps, base = engine.expert_stats(), [], []
        for _ in range(args.pairs):
            base.append(upstream(args, ncmoe, args.tokens))
            tps.append(decode(engine, args.tokens))
        stats = engine.expert_stats().since(before).report()
        misses = engine.runner.misses
        split = misses.split if misses else None
        row = {
            "system": f"{miss}, {n_slots} slots", "tps": tps,
            "device": engine.memory()["device_peak_bytes"], "hit_rate": stats["hit_rate"],
            "misses_token": stats["misses"] / stats["n_steps"],
            "mib_token": stats["fetched_mib_per_step"],
            "on_cpu": split.one_row if split else [], "phases": stats["phases_ms_per_step"],
            "fetching": stats["fetching_layers"],
        }  # fmt: skip
        if split and miss == "auto":  # what the cost law rests on, for moegraph simulate
            row["stream_us"] = [round(seconds * 1e6, 1) for seconds in split.streamed]
            row["cpu_us"] = [round(seconds * 1e6, 1) for seconds in split.on_cpu]
        if args.machine:
            found = simulate(
                trace, engine.plan.n_slots, POLICIES[args.policy](), find_machine(args.machine),
                mode=miss, skip=args.warm,
            )  # fmt: skip
            row["predicted"] = found.tokens_per_s
    return row, base


def show(row: dict[str, object]) -> str:
    """Return one line of the table."""
    tps, ratios = row["tps"], row["ratio"]
    text = (
        f"| {row['ncmoe']} | {row['system']} | {row['device'] / 2**30:.2f} | "
        f"{statistics.median(tps):.1f} ({min(tps):.1f} .. {max(tps):.1f}) | "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f}) |"
    )
    if "hit_rate" in row:
        text += (
            f" {row.get('predicted', 0):.0f} | {row['hit_rate']:.3f} | {row['misses_token']:.1f} | "
            f"{row['mib_token']:.1f} | {row['fetching']} | {row['on_cpu']} | {row['phases']} |"
        )
    return text


def draw(rows: list[dict[str, object]]) -> str:
    """Return the curve as SVG: tokens per second against the share of experts on the device."""
    series: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row["share"]):
        name = row["system"].split()[0].rstrip(",")
        name = name if name == "upstream" else f"moegraph, {name}"
        series.setdefault(name, []).append((100 * row["share"], statistics.median(row["tps"])))
        if "predicted" in row:
            series.setdefault("predicted", []).append((100 * row["share"], row["predicted"]))
    label = "experts on the device, % (upstream: same device memory)"
    return line_chart("Decoding, 35B-A3B shape", label, "tokens per second", series)


def main() -> int:
    """Run the comparison."""
    args = parser().parse_args()
    try:
        with open_model(args.model) as model:
            hp = model.hparams
            stacks = [i for i in model.tensors.values() if "_exps." in i.name]
            expert_bytes = sum(i.nbytes for i in stacks) // (hp.n_layer * hp.n_expert)
        shape = RouterShape(hp.n_layer, hp.n_expert, hp.n_expert_used)
        trace = generate_trace(shape, args.warm + args.pairs * args.tokens, args.seed)
        print(f"trace {trace.sha256[:16]}, {trace_stats(trace).line()}", flush=True)
        engine = engine_for(args, 0, args.miss[0], trace.ids.astype(np.int32))
        fixed = engine.memory()["device_peak_bytes"]
        engine.close()
        columns = "ncmoe system GiB t/s ratio predicted hit_rate misses MiB "
        columns += "fetching CPU_of_n host_ms"
        print("| " + " | ".join(columns.split()) + " |")
        print("|---|---|---|---|---|---|---|---|---|---|---|---|")
        rows = []
        for ncmoe in args.ncmoe:
            for row in compare(args, ncmoe, fixed, expert_bytes, trace):
                rows.append(row)
                print(show(row), flush=True)
                if args.out:
                    line = row | {"trace": trace.sha256, "patchset": patchset()}
                    with args.out.open("a") as file:
                        file.write(json.dumps(line) + "\n")
        if args.plot:
            args.plot.write_text(draw(rows), encoding="utf-8")
    except MoegraphError as error:
        print(f"bench_residency.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
