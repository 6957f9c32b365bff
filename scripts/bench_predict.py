#!/usr/bin/env python3
"""Fit a machine's times to a few rows of bench_residency and predict the decode speed of the rest.

Replays of the same trace with the same slots count the missing experts. The script fits times to
the rows that --fit (their -ncmoe) and --trace name; all other rows are held out. It reads raw
lines and needs no device.

Three times are fitted: that of a token without misses, that of a layer to fetch its first missing
expert, and that of each further expert. Rows without expert slots, in which the CPU computes the
experts, are ignored.

    scripts/bench_predict.py docs/benchmarks/residency.jsonl --fit 0 16 36 --trace sticky
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench

from moegraph.experts.cost import Curve, Machine
from moegraph.experts.machines import MACHINES
from moegraph.experts.policy import POLICIES
from moegraph.placement.identity import RouterShape
from moegraph.placement.simulate import simulate
from moegraph.placement.trace import Trace


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("raw", type=bench.existing, help="raw lines of bench_residency.py")
    p.add_argument("--fit", type=int, nargs="+", default=[0, 16, 36], metavar="NCMOE")
    p.add_argument("--trace", default="sticky", help="trace of the rows to fit")
    p.add_argument(
        "--results",
        default="argmax",
        choices=("argmax", "logits"),
        help="use the rows that copied the argmax, or those that copied the logits",
    )
    p.add_argument("--out", type=Path, metavar="FILE", help="append the predictions as JSON lines")
    return p


@dataclass(frozen=True)
class Point:
    """One measured row: its missing experts, numpy [n_tokens, n_layer], and its speed.

    n_lookups: number of layers that look up slots. seconds: measured, of a token.
    """

    ncmoe: int
    trace: str
    share: float
    missing: npt.NDArray[np.int64]
    n_lookups: int
    seconds: float

    @property
    def counts(self) -> tuple[float, float, float]:
        """Return, per token: 1, layers with misses, missing experts beyond a layer's first."""
        some = float((self.missing > 0).sum(axis=1).mean())
        return 1.0, some, float(self.missing.sum(axis=1).mean()) - some


def points_of(lines: Sequence[bench.Line], results: str) -> list[Point]:
    """Return the decode rows that had expert slots, with misses counted by a replay."""
    from _traces import find_trace

    found: list[Point] = []
    for run in {line["run"]: None for line in lines}:
        mine = [line for line in lines if line["run"] == run]
        traces = next((line for line in mine if line["kind"] == "traces"), None)
        if traces is None:
            continue
        for load in (x for x in mine if x["kind"] == "load" and any(x["n_slots"])):
            n_experts = sum(load["n_slots"]) / load["share"]
            shape = RouterShape(
                len(load["n_slots"]), round(n_experts / len(load["n_slots"])), traces["n_used"]
            )
            parts = [
                find_trace(t["name"], shape, traces["each"], traces["seed"])
                for t in traces["traces"]
            ]
            whole = Trace(shape, np.concatenate([part.ids for part in parts]))
            found += _points(mine, load, whole, traces["parts"], results)
    return found


def _points(
    lines: Sequence[bench.Line], load: bench.Line, trace: Trace, names: dict[str, int], results: str
) -> list[Point]:
    n_slots, n_expert = load["n_slots"], trace.shape.n_expert
    policy = POLICIES[load["policy"]]()
    missing = simulate(trace, n_slots, policy, MACHINES["h200"], mode=load["miss"]).missing
    points = []
    for name in names:
        system = f"moegraph, argmax, {name}" if results == "argmax" else f"moegraph, {name}"
        samples = [
            x for x in lines if x["kind"] == "sample" and x["at"] and x["system"] == system
            and x["setting"] == load["setting"]
        ]  # fmt: skip
        if not samples:
            continue
        n = int(samples[0]["test"][2:])
        steps = np.concatenate([np.arange(x["step"], x["step"] + n) for x in samples])
        seconds = statistics.median(1 / x["value"] for x in samples)
        points.append(Point(
            load["ncmoe"], name, load["share"], missing[steps],
            sum(0 < slots < n_expert for slots in n_slots), seconds,
        ))  # fmt: skip
    return points


def fit(points: Sequence[Point], base: Machine) -> Machine:
    """Return a machine with times fitted to the points by least squares, none below zero.

    base: the machine with all other times, such as that of a look-up.
    """
    a = np.array([p.counts for p in points])
    b = np.array([p.seconds - base.fetch_layer * p.n_lookups for p in points])
    kept = list(range(a.shape[1]))
    times = np.zeros(a.shape[1])
    while True:  # a time that comes out negative is set to 0, and the others are fitted again
        times[:] = 0.0
        times[kept] = np.linalg.lstsq(a[:, kept], b, rcond=None)[0]
        negative = [at for at in kept if times[at] < 0 and at]
        if not negative:
            break
        kept.remove(negative[0])
    whole, first, more = (float(t) for t in times)
    return replace(base, name="fitted", whole=whole, fetch=Curve(((1, first), (2, first + more))))


def predict(machine: Machine, point: Point) -> float:
    """Return the predicted tokens per second of a point."""
    one, more = machine.fetch(1), machine.fetch(2) - machine.fetch(1)
    _, some, further = point.counts
    seconds = machine.whole + machine.fetch_layer * point.n_lookups + some * one + further * more
    return 1 / seconds


def predictions(points: Sequence[Point], fitted: set[int], trace: str) -> list[dict[str, Any]]:
    """Fit to some points and return the predictions for all.

    Raises:
        BenchError: no point matches `fitted` and `trace`.
    """
    chosen = [p for p in points if p.ncmoe in fitted and p.trace == trace]
    if not chosen:
        raise bench.BenchError(f"no row of trace {trace} with ncmoe {sorted(fitted)} in the file")
    machine = fit(chosen, MACHINES["h200"])
    return [
        {
            "kind": "prediction", "ncmoe": p.ncmoe, "trace": p.trace, "share": p.share,
            "how": "fitted" if any(p is c for c in chosen) else "held out",
            "measured": 1 / p.seconds, "predicted": predict(machine, p),
            "whole_us": machine.whole * 1e6,
            "fetch_us": [machine.fetch(1) * 1e6, machine.fetch(2) * 1e6],
        }
        for p in points
    ]  # fmt: skip


def main() -> int:
    """Print the predictions."""
    args = parser().parse_args()

    def run() -> None:
        lines = bench.read_lines([args.raw])
        found = predictions(points_of(lines, args.results), set(args.fit), args.trace)
        print("| ncmoe | trace | how | measured, tok/s | predicted | off by |")
        print("|---|---|---|---|---|---|")
        for row in found:
            off = row["predicted"] / row["measured"] - 1
            print(f"| {row['ncmoe']} | {row['trace']} | {row['how']} | {row['measured']:.1f} | "
                  f"{row['predicted']:.1f} | {off:+.1%} |")  # fmt: skip
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.writelines(bench.json_line({**row, "run": lines[0]["run"]}) for row in found)

    return bench.guarded("bench_predict.py", run)


if __name__ == "__main__":
    sys.exit(main())
