#!/usr/bin/env python3
"""List where the time of a prompt goes on a GPU, kernel by kernel, with Nsight Compute (ncu).

Each prompt length is a process of `moegraph bench` that reads one prompt, untimed otherwise; with
--llama-bench, one of llama-bench follows. ncu runs the kernels one after another and times each, so
what would run at the same time adds up here, and the host does not count. Clocks stay as they are.

    scripts/profile_kernels.py 35b.gguf --prompt 512 2048
    scripts/profile_kernels.py 35b.gguf --prompt 512 --llama-bench LB --options "--vram 14"
"""

from __future__ import annotations

import argparse
import csv
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench

_TIME = "gpu__time_duration.sum"
_MS = {"ns": 1e-6, "nsecond": 1e-6, "us": 1e-3, "usecond": 1e-3, "ms": 1.0, "msecond": 1.0}
# What a kernel's name has before and behind what tells it apart.
_NAME = re.compile(r"(?:void )?([\w:~<>, ()*&-]+?)(?:\((?:[^()]|\([^()]*\))*\))?$")


@dataclass
class Kernel:
    """All launches of one kernel: their number, and milliseconds in all."""

    name: str
    n: int = 0
    ms: float = 0.0


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("model", type=bench.model_path, help="a GGUF file, or a shipped model's name")
    p.add_argument("--prompt", type=bench.positive, nargs="+", default=[512], metavar="TOKENS")
    p.add_argument("--device", default="cuda:0", help="of moegraph")
    p.add_argument("--options", default="", metavar="OPTIONS", help="more of moegraph bench")
    p.add_argument("--llama-bench", type=bench.existing, metavar="FILE")
    p.add_argument("--theirs", default="-ngl 99 -fa 1 -ub 2048", metavar="OPTIONS")
    p.add_argument("--top", type=bench.positive, default=20, help="kernels to list")
    p.add_argument("--out", type=Path, metavar="FILE", help="append JSON lines here")
    return p


def read_times(lines: Iterable[str]) -> list[Kernel]:
    """Return the kernels in ncu's CSV lines, those with the most time first.

    Raises:
        BenchError: the lines have no times of kernels.
    """
    table = csv.DictReader(line for line in lines if line.startswith('"'))
    found: dict[str, Kernel] = {}
    for row in table:
        unit, value = row.get("Metric Unit"), (row.get("Metric Value") or "").replace(",", "")
        if row.get("Metric Name") != _TIME or unit not in _MS:
            continue
        match = _NAME.match(row["Kernel Name"])
        name = match.group(1) if match else row["Kernel Name"]
        kernel = found.setdefault(name, Kernel(name))
        kernel.n += 1
        kernel.ms += float(value) * _MS[unit]
    if not found:
        raise bench.BenchError("ncu timed no kernel")
    return sorted(found.values(), key=lambda kernel: -kernel.ms)


def profile(command: Sequence[str]) -> list[Kernel]:
    """Return the kernels that a program runs.

    Raises:
        BenchError: there is no ncu, or it failed.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise bench.BenchError("ncu is not on the path; it comes with CUDA's toolkit")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        options = ["--clock-control", "none", "--metrics", _TIME, "--csv", "--log-file", str(log)]
        done = subprocess.run(
            [ncu, *options, *command], capture_output=True, text=True, errors="replace", check=False
        )
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    if done.returncode:
        said = [*lines, *done.stderr.splitlines()]
        words = [line for line in said if "ERROR" in line or "rror:" in line] or said[-1:]
        raise bench.BenchError(f"ncu ended with {done.returncode}: {' '.join(words[:1]).strip()}")
    return read_times(lines)


def commands(args: argparse.Namespace) -> Iterator[tuple[str, int, list[str]]]:
    """Yield each program with the length of its prompt and its command."""
    for n in args.prompt:
        once = ["-p", str(n), "-n", "0", "-r", "1", "--no-warmup"]
        ours = [sys.executable, "-m", "moegraph", "bench", str(args.model), *once]
        yield "moegraph", n, [*ours, "--device", args.device, *shlex.split(args.options)]
        if args.llama_bench:
            theirs = [str(args.llama_bench), "-m", str(args.model), *once]
            yield "llama.cpp", n, [*theirs, *shlex.split(args.theirs)]


def compare(args: argparse.Namespace) -> None:
    """Profile all prompts and print."""
    for program, n, command in commands(args):
        kernels = profile(command)
        total = sum(kernel.ms for kernel in kernels)
        print(f"\n{program}, prompt of {n}: {total:.1f} ms in "
              f"{sum(kernel.n for kernel in kernels)} kernels")  # fmt: skip
        for kernel in kernels[: args.top]:
            print(f"{kernel.ms:9.2f} ms {kernel.n:6}  {kernel.name[:90]}")
        rest = sum(kernel.ms for kernel in kernels[args.top :])
        print(f"{rest:9.2f} ms         all others", flush=True)
        for kernel in kernels:
            row = {
                "row": "kernel", "program": program, "n_prompt": n,
                "kernel": kernel.name, "n": kernel.n, "ms": round(kernel.ms, 4),
            }  # fmt: skip
            bench.append_line(args.out, row)


def main() -> int:
    """Run the command line and return the exit code."""
    args = parser().parse_args()
    return bench.guarded("profile_kernels.py", lambda: compare(args))


if __name__ == "__main__":
    sys.exit(main())
