#!/usr/bin/env python3
"""Compare moegraph with the newest llama.cpp: same file, token ids, device memory and -ub.

vendor/rival.json names that llama.cpp; `scripts/measure_card prepare --rival` builds it. Its expert
cache is not in llama-bench, so its llama-batched-bench runs: one sequence, turns of a prompt and
decoded tokens, of which the first is not counted. It runs with -ncmoe N, then with all experts in
host memory and a cache (--moe-cache-mib) of a size with which the driver reports the same peak of
device memory, within 2 %, if one correction can reach that; each also "unmapped" (--load-mode
none: quicker prompts, slower decoding). The best of the four is the baseline, test by test.
--ways leaves some out. moegraph gets the peak of -ncmoe as --vram, and the same ids; routing is the
file's own. Without --ncmoe, every expert is on the device; on the CPU, there is no cache.
--slow-link N has every large copy to the device made N times, on both sides (_slow_link.py).

    scripts/bench_rival.py 35b.gguf --batched-bench up/llama-batched-bench --ncmoe 16 --out r.jsonl
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
import _slow_link
from _bench import BenchError, Line
from _tools import fetch
from bench_upstream import Comparison, json_rows

NAME = fetch.RIVAL["llama_cpp_commit"]
UNMAPPED = ("--load-mode", "none")
# The first one tells the device memory that the others take.
WAYS = ("-ncmoe", "-ncmoe unmapped", "cache", "cache unmapped")


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.bench_parser(__doc__, samples=5)
    p.add_argument("--batched-bench", type=bench.existing, required=True, metavar="FILE",
                   help="of the newest llama.cpp, built with the same options")  # fmt: skip
    p.add_argument("--threads", type=bench.positive, metavar="N", help="CPU threads of all systems")
    p.add_argument("--sweep", type=bench.positive, nargs="*", default=[], metavar="THREADS",
                   help="first try -ncmoe with these, and use the best")  # fmt: skip
    p.add_argument("--ncmoe", type=bench.positive, nargs="+", default=[],
                   help="layers whose experts llama.cpp keeps on the CPU")  # fmt: skip
    p.add_argument("--prompt", type=bench.positive, default=512, metavar="N", help="tokens")
    p.add_argument("--gen", type=bench.positive, default=128, metavar="N", help="decoded tokens")
    p.add_argument("--ubatch", type=bench.positive, default=512, metavar="N", help="of both sides")
    p.add_argument("--ways", nargs="+", choices=WAYS[1:], default=WAYS[1:],
                   help="besides -ncmoe, which is always measured")  # fmt: skip
    p.add_argument("--slow-link", type=bench.positive, default=1, metavar="N",
                   help="times that the link to the device is slower, for both sides")  # fmt: skip
    p.add_argument("--theirs", type=shlex.split, default=[], metavar="OPTIONS",
                   help="further options of llama.cpp")  # fmt: skip
    return p


class Rival(Comparison):
    """One run: for each --ncmoe, llama.cpp with it, with its cache, then moegraph."""

    def run(self) -> None:
        """Measure every setting."""
        args = self.args
        self.ubatch, self.n_ctx = args.ubatch, -(-(args.prompt + args.gen) // 256) * 256
        speed = {}
        for self.threads in args.sweep if args.ncmoe else ():
            speed[self.threads] = self._turns(["-ncmoe", str(args.ncmoe[0])], 2)[1]["speed_tg"]
        self.threads = max(speed, key=lambda n: speed[n]) if speed else args.threads
        for self.ncmoe in args.ncmoe or [None]:
            place = "" if self.ncmoe is None else f"ncmoe {self.ncmoe}, "
            slow = f"link 1/{args.slow_link}, " if args.slow_link > 1 else ""
            self.setting = f"{place}{slow}ub {args.ubatch}"
            self._ours(self._theirs())

    def _turns(self, options: Sequence[str], n_turns: int) -> list[Line]:
        """Run llama-batched-bench; return a row of each turn, then a line of its memory."""
        args = self.args
        given = {
            "-m": args.model, "-fa": "on", "-ngl": 0 if args.device == "cpu" else 99, "-npl": 1,
            "-npp": ",".join([str(args.prompt)] * n_turns), "-ntg": args.gen, "-c": self.n_ctx,
            "-ub": args.ubatch, "-b": max(2048, args.ubatch), "--output-format": "jsonl",
        }  # fmt: skip
        if self.threads:
            given["-t"] = self.threads
        words = [str(word) for pair in given.items() for word in pair]
        for _ in range(3):  # it may end before its thread has printed the last row
            rows = [*json_rows([str(args.batched_bench), *words, *options, *args.theirs])]
            if len(rows) == n_turns + 1:
                return rows
        raise BenchError(f"llama-batched-bench gave {len(rows) - 1} turns, not {n_turns}")

    def _theirs(self) -> int:
        """Measure the ways of llama.cpp; return the device's peak of -ncmoe, in bytes."""
        n_turns, shape, ncmoe = self.args.samples + 1, self.shape, self.ncmoe
        if ncmoe is None:
            return self._keep("", [], self._turns([], n_turns))
        options = ["-ncmoe", str(ncmoe)]
        budget = self._keep(" -ncmoe", options, self._turns(options, n_turns))
        self._keep_unmapped(" -ncmoe", options)
        if not {"cache", "cache unmapped"} & {*self.args.ways}:
            return budget
        mib = (shape.n_layer - ncmoe) * shape.n_expert * self.expert_bytes >> 20
        if not budget or mib <= 0:
            print(f"{self.setting}: no device memory for a cache", file=sys.stderr)
            return budget
        mapped = "cache" in self.args.ways
        for _ in range(2):
            options = ["-ncmoe", str(shape.n_layer), "--moe-cache-mib", str(mib)]
            rows = self._turns([*options, *([] if mapped else UNMAPPED)], n_turns)
            off = budget - rows[-1]["device_bytes"]
            if abs(off) <= 0.02 * budget:
                break
            mib = max(1, mib + (off >> 20))
        if mapped:
            self._keep(" cache", options, rows)
            self._keep_unmapped(" cache", options)
        else:
            self._keep(" cache unmapped", [*options, *UNMAPPED], rows)
        return budget

    def _keep_unmapped(self, way: str, options: Sequence[str]) -> None:
        """Measure a way again with the experts of the host in pinned memory."""
        if f"{way.strip()} unmapped" not in self.args.ways:
            return
        options = [*options, *UNMAPPED]
        self._keep(f"{way} unmapped", options, self._turns(options, self.args.samples + 1))

    def _keep(self, way: str, options: Sequence[str], rows: list[Line]) -> int:
        """Keep the rows of a way as raw lines; return its peak of device memory in bytes."""
        *turns, memory = rows
        about = {"setting": self.setting, "system": NAME + way}
        n_bytes: int = memory["device_bytes"]
        self.raw.add("memory", **about, VmHWM=memory["rss_bytes"], device_peak_bytes=n_bytes,
                     device_driver_bytes=n_bytes)  # fmt: skip
        self.raw.add("upstream", **about, flags=[*options, *self.args.theirs], row=turns[-1])
        for at, row in enumerate(turns):
            for test, n in (("pp", row["pp"]), ("tg", row["tg"])):
                self.raw.sample(self.setting, f"{test}{n}", NAME + way, at, row[f"speed_{test}"])
        return n_bytes

    def _measure(self) -> None:
        """Take moegraph's samples, of the same ids."""
        args = self.args
        for at in range(args.samples + 1):
            found = self.worker.ask("turn", at=at, n_prompt=args.prompt, n=args.gen)
            for test, one, n in (
                ("pp", found["prompt"], args.prompt),
                ("tg", found["decode"], args.gen),
            ):
                self.raw.sample(self.setting, f"{test}{n}", self.system, at, n / one["seconds"],
                                experts=one["experts"])  # fmt: skip


def compare(args: argparse.Namespace) -> None:
    """Run the comparison."""
    raw = bench.Raw("rival", args)
    base = NAME + (" -ncmoe" if args.ncmoe else "")
    with tempfile.TemporaryDirectory() as scratch:
        if args.slow_link > 1:
            _slow_link.use(args.slow_link, Path(scratch))
        bench.finish(raw, base, Rival(args, raw, None).run)


if __name__ == "__main__":
    sys.exit(bench.main(parser(), compare))
