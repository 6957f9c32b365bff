#!/usr/bin/env python3
"""Decode with experts in three tiers: device, host memory and file, beside what the disk allows.

moegraph runs in a control group of --memory GiB without swap, if this machine lets one be made;
else --host-mem alone limits its copies of experts, and the first line says so. The bound is the
disk's bandwidth, measured before and after by direct reads of 16 threads in pieces of 640 KiB, over
the bytes that a token reads from the file. The last line has what Linux says of the process:
VmSwap is what was swapped.

    scripts/bench_tiers.py 35b.gguf --vram 8 --memory 8 --out tiers.jsonl
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench

# Control groups, versions 2 and 1: the folder, limits in units of the bytes, the peak.
GROUPS = (
    ("/sys/fs/cgroup", {"memory.max": 1, "memory.swap.max": 0}, "memory.peak"),
    ("/sys/fs/cgroup/memory", {"memory.limit_in_bytes": 1, "memory.swappiness": 0},
     "memory.max_usage_in_bytes"),
)  # fmt: skip
PIECE, N_THREADS, DISK_S = 640 << 10, 16, 3.0


@contextmanager
def control_group(n_bytes: int) -> Iterator[tuple[Path, str] | None]:
    """Make a control group of so many bytes; yield it and the file of its peak, or None."""
    for root, limits, peak in GROUPS:
        group = Path(root) / f"bench-tiers-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if not all((group / name).is_file() for name in limits):
                continue  # no such control groups here
            try:
                for name, of in limits.items():
                    (group / name).write_text(str(of * n_bytes))
            except OSError:
                continue
            yield group, peak
            return
        finally:
            for _ in range(50):  # the process in it has just ended
                with suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.1)
    yield None


def disk_rate(path: Path) -> float:
    """Return the bytes a second of direct reads at random places by 16 threads."""
    n_pieces, end = path.stat().st_size // PIECE, time.monotonic() + DISK_S
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(seed: int) -> int:
        rng, n_read, buffer = random.Random(seed), 0, mmap.mmap(-1, PIECE)
        while time.monotonic() < end:
            n_read += os.preadv(file, [buffer], rng.randrange(n_pieces) * PIECE)
        return n_read

    try:
        start = time.monotonic()
        with ThreadPoolExecutor(N_THREADS) as pool:
            n_read = sum(pool.map(read, range(N_THREADS)))
        return n_read / (time.monotonic() - start)
    finally:
        os.close(file)


def compare(args: argparse.Namespace) -> None:
    """Measure; print a row, which `Raw` keeps too."""
    raw = bench.Raw("tiers", args)
    with control_group(int(args.memory * 2**30)) as group:
        config = {"device": args.device, "vram": args.vram, "profile": "none", "n_ctx": 4096,
                  "host_mem": "auto" if group else args.host_mem}  # fmt: skip
        under = [] if group is None else [
            "/bin/sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group[0])
        ]  # fmt: skip
        limit = f"control group of {args.memory:g} GiB" if group else f"--host-mem {args.host_mem}"
        rates = [disk_rate(args.model)]
        system = bench.System("moegraph", bench.ROOT, {})
        with bench.started(raw, system, under) as worker:
            raw.add("load", setting=limit, system="moegraph",
                    **worker.ask("load", model=str(args.model), config=config))  # fmt: skip
            worker.ask("decode", n=args.warm, seed=99)
            speeds, per_token = [], []
            for at in range(args.samples + 1):
                found = worker.ask("decode", n=args.gen, seed=at)
                raw.sample(limit, f"tg{args.gen}", "moegraph", at, args.gen / found["seconds"],
                           experts=found["experts"])  # fmt: skip
                if not found["experts"]:
                    raise bench.BenchError("all experts are on the device")
                if at:
                    speeds.append(args.gen / found["seconds"])
                    per_token.append(found["experts"]["file_bytes_per_pass"])
            memory = worker.ask("memory")
            rates.append(disk_rate(args.model))
            peak = int((group[0] / group[1]).read_text()) if group else 0
    rate, speed, n_bytes = max(rates), statistics.median(speeds), statistics.median(per_token)
    raw.add("memory", setting=limit, system="moegraph", group_peak_bytes=peak, **memory)
    line = {
        "limit": limit, "tps": round(speed, 2), "file_bytes_a_token": n_bytes,
        "disk_bytes_per_s": [round(one) for one in rates],
        "of_bound": round(speed * n_bytes / rate, 3), "swapped_bytes": memory.get("VmSwap"),
        "resident_peak_bytes": memory["VmHWM"], "group_peak_bytes": peak,
    }  # fmt: skip
    raw.add("tiers", **line)
    print(bench.json_line(line), end="")


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.bench_parser(__doc__, samples=5)
    p.add_argument("--vram", default="8", help="limit of device memory, in GiB")
    p.add_argument("--memory", type=float, default=8.0, metavar="GIB", help="of the control group")
    p.add_argument("--host-mem", default="5.5", help="as of moegraph, without a control group")
    p.add_argument("--gen", type=bench.positive, default=128, help="tokens of a sample")
    p.add_argument("--warm", type=bench.positive, default=256, help="tokens first")
    return p


if __name__ == "__main__":
    sys.exit(bench.main(parser(), compare))
