#!/usr/bin/env python3
"""Compare decode speed with different CPU threads, with and without other programs at work.

For each number of --busy cores, the script starts processes that only spin on the CPUs of this
process. moegraph runs with its defaults and with fixed -t and --poll. llama-bench runs with each
-t and, for builds with OpenMP, with active and with passive waiting. All take turns, --rounds
times, and the medians are compared. The last column is the ratio to llama-bench's best. Run the
script under taskset to measure fewer cores:

    taskset -c 0,1 scripts/bench_threads.py tiny --llama-bench upstream/llama-bench --busy 0 1 2
    taskset -c 0-3 scripts/bench_threads.py tiny --llama-bench upstream/llama-bench \\
        --llama-args="-ngl 0" --llama-env CUDA_VISIBLE_DEVICES= --out rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moegraph.modelfile import resolve_target
from moegraph.threads import default_threads, usable_cpus

SPIN = "while True: pass"


@dataclass(frozen=True)
class Way:
    """One program with its settings."""

    system: str
    name: str
    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("model", help="a GGUF file or a shipped model's name")
    p.add_argument(
        "--llama-bench", type=Path, help="unpatched llama-bench (default: measure only moegraph)"
    )
    p.add_argument("--llama-args", default="", help="more options for llama-bench, in one string")
    p.add_argument("--llama-env", nargs="*", default=[], metavar="NAME=VALUE", type=assignment,
                   help="environment of llama-bench")  # fmt: skip
    p.add_argument("--busy", type=count, nargs="+", default=[0, 1, 2], metavar="K",
                   help="how many processes spin meanwhile (default: 0 1 2)")  # fmt: skip
    p.add_argument("--threads", type=positive, nargs="+", metavar="N",
                   help="fixed -t of both (default: 1 to the cores, all up to 4)")  # fmt: skip
    p.add_argument("--gen", type=positive, default=256, help="tokens of a run (default: 256)")
    p.add_argument(
        "--depth", type=count, default=0, help="context positions filled before a run (default: 0)"
    )
    p.add_argument(
        "--short",
        action="store_true",
        help="fixed settings of llama-bench only, with threads that wait actively",
    )
    p.add_argument("--repetitions", type=positive, default=5, help="timed runs in a process")
    p.add_argument("--rounds", type=positive, default=3, help="processes of each way")
    p.add_argument("--out", type=Path, help="append JSON lines here")
    return p


def count(text: str) -> int:
    """Parse a number from 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def positive(text: str) -> int:
    """Parse a number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def assignment(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}; write NAME=VALUE")
    return name, value


def ways(args: argparse.Namespace) -> list[Way]:
    """Return the programs and settings to compare, moegraph with its defaults first."""
    model, threads = str(resolve_target(args.model)), args.threads or _counts(default_threads())
    test = ("-p", "0", "-n", str(args.gen), "-d", str(args.depth), "-r", str(args.repetitions))
    shared = ("-m", model, *test, "-o", "json")
    ours = (sys.executable, "-m", "moegraph", "bench", *shared, "--device", "cpu")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    found = [Way("moegraph", "default", ours, {"PYTHONPATH": path})]
    for n in threads if not args.short else ():
        for poll in (50, 0) if n > 1 else (50,):
            fixed = (*ours, "-t", str(n), "--poll", str(poll))
            found.append(Way("moegraph", f"-t {n} --poll {poll}", fixed, {"PYTHONPATH": path}))
    if args.llama_bench is None:
        return found
    theirs = (str(args.llama_bench), *shared, "-fa", "1", *shlex.split(args.llama_args))
    paths = (str(args.llama_bench.parent), os.environ.get("LD_LIBRARY_PATH"))
    env = {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths)), **dict(args.llama_env)}
    for n in threads:
        command = (*theirs, "-t", str(n))
        if n == 1 or not args.short:
            found.append(Way("upstream", f"-t {n}", command, env))
        policies = ("active",) if args.short else ("active", "passive")
        for policy in policies if n > 1 else ():
            more = {**env, "OMP_WAIT_POLICY": policy}
            found.append(Way("upstream", f"-t {n} {policy}", command, more))
    return found


def _counts(n: int) -> list[int]:
    return [*range(1, min(n, 4) + 1), *({n // 2, n} - set(range(5)))]


@contextmanager
def busy_cores(n: int) -> Iterator[None]:
    """Run n processes that spin on the CPUs of this process."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(n)]
    try:
        time.sleep(0.3 if n else 0)
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def run(way: Way) -> tuple[list[float], str]:
    """Return the tokens per second of each repetition, and the threads in use at the end."""
    done = subprocess.run(
        way.command, env={**os.environ, **way.env}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{shlex.join(way.command)} ended with {done.returncode}: "
                         f"{done.stderr[-400:].strip()}")  # fmt: skip
    row = json.loads(done.stdout)[-1]
    used = f"{row['n_threads']}"
    if way.system == "moegraph":
        used += f" poll {row['poll']}"
    return row["samples_ts"], used


def measure(args: argparse.Namespace, n_busy: int) -> list[dict[str, Any]]:
    """Return a row for each way, measured while n_busy cores are busy."""
    compared = ways(args)
    samples: dict[int, list[float]] = {at: [] for at in range(len(compared))}
    used: dict[int, list[str]] = {at: [] for at in range(len(compared))}
    with busy_cores(n_busy):
        for _ in range(args.rounds):
            for at, way in enumerate(compared):
                tps, threads = run(way)
                samples[at] += tps
                used[at].append(threads)
    rows: list[dict[str, Any]] = [
        {
            "busy": n_busy, "cpus": usable_cpus(), "system": way.system, "way": way.name,
            "median_tps": statistics.median(samples[at]), "samples_tps": samples[at],
            "threads_used": used[at], "model": args.model, "when": time.strftime("%Y-%m-%d"),
        }
        for at, way in enumerate(compared)
    ]  # fmt: skip
    theirs = [row["median_tps"] for row in rows if row["system"] == "upstream"]
    for row in rows:
        row["ratio"] = row["median_tps"] / max(theirs) if theirs else None
    return rows


def report(rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    print("| busy | system | threads | t/s, median | min .. max | used | to upstream's best |")
    print("|---:|---|---|---:|---|---|---:|")
    for row in rows:
        tps = row["samples_tps"]
        ratio = f"{row['ratio']:.3f}" if row["ratio"] else "-"
        used = ", ".join(dict.fromkeys(row["threads_used"]))
        print(
            f"| {row['busy']} | {row['system']} | {row['way']} | {row['median_tps']:.1f} "
            f"| {min(tps):.1f} .. {max(tps):.1f} | {used} | {ratio} |", flush=True,
        )  # fmt: skip


def main() -> int:
    """Run the comparison."""
    args = parser().parse_args()
    if args.llama_bench is not None and not args.llama_bench.is_file():
        print(f"bench_threads.py: {args.llama_bench}: no such file", file=sys.stderr)
        return 2
    for n_busy in args.busy:
        rows = measure(args, n_busy)
        report(rows)
        if args.out:
            with args.out.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
