#!/usr/bin/env python3
"""Compare moegraph with llama.cpp's llama-bench on one model: alternating pairs, medians, ratios.

Both run the same file on the same device in turn. llama-bench is started anew for every sample (it
loads the model each time); moegraph's engines stay loaded and idle meanwhile. One JSON line per row
goes to --out; the table goes to stdout.

Example:
    scripts/bench_vs_upstream.py 35b.gguf --llama-bench upstream/llama-bench --pairs 5 --out
    rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moegraph.bench import BenchSpec, run_bench  # noqa: E402
from moegraph.config import EngineConfig  # noqa: E402
from moegraph.engine import Engine  # noqa: E402
from moegraph.errors import MoegraphError  # noqa: E402
from moegraph.ggml.lib import patchset  # noqa: E402


def common_parser(about: str | None) -> argparse.ArgumentParser:
    """Return a command line with what every comparison with llama-bench needs."""
    p = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("model", type=Path)
    p.add_argument("--llama-bench", type=Path, required=True, help="the unpatched llama-bench")
    p.add_argument("--lib-path", default="", help="extra LD_LIBRARY_PATH of llama-bench")
    p.add_argument("--pairs", type=int, default=5)
    p.add_argument("--out", type=Path, help="append JSON lines here")
    return p


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = common_parser(__doc__)
    p.add_argument("--device", default="cuda:0", choices=("cuda:0", "cpu"))
    p.add_argument("--prompt", type=int, nargs="*", default=[512, 2048])
    p.add_argument("--gen", type=int, nargs="*", default=[128])
    p.add_argument("--depth", type=int, nargs="*", default=[0])
    p.add_argument("--ubatch", type=int, nargs="*", default=[512, 2048])
    p.add_argument("--modes", nargs="*", default=["whole", "layered"])
    p.add_argument("--threads", type=int, default=0, help="CPU threads of both (0: each one's own)")
    return p


def run_llama_bench(
    program: Path, model: Path, options: list[str], lib_path: str = ""
) -> dict[str, float]:
    """Run llama-bench once; return tokens per second by test name."""
    command = [str(program), "-m", str(model), "-r", "1", "-o", "json", "-fa", "1", *options]
    env = dict(os.environ)
    paths = (str(program.parent), lib_path, env.get("LD_LIBRARY_PATH"))
    env["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"llama-bench failed ({done.returncode}): {done.stderr[-600:]}")
    rows = {}
    for row in json.loads(done.stdout):
        kind, n = ("pp", row["n_prompt"]) if row["n_prompt"] else ("tg", row["n_gen"])
        depth = row.get("n_depth", 0)
        rows[f"{kind}{n}" + (f" @ d{depth}" if depth else "")] = row["avg_ts"]
    return rows


def upstream(args: argparse.Namespace, ubatch: int) -> dict[str, float]:
    """Run llama-bench once with a ubatch; decode only with the first."""
    options = [
        "-ngl", "0" if args.device == "cpu" else "99", "-ub", str(ubatch),
        "-b", str(max(2048, ubatch)), "-p", ",".join(map(str, args.prompt)) or "0",
        "-n", ",".join(map(str, args.gen)) if ubatch == args.ubatch[0] else "0",
        "-d", ",".join(map(str, args.depth)),
    ]  # fmt: skip
    if args.threads:
        options += ["-t", str(args.threads)]
    return run_llama_bench(args.llama_bench, args.model, options, args.lib_path)


def ours(engine: Engine, args: argparse.Namespace, with_gen: bool) -> dict[str, float]:
    """Measure one repetition of every test; return tokens per second by test name."""
    spec = BenchSpec(
        tuple(args.prompt), tuple(args.gen) if with_gen else (), tuple(args.depth), repetitions=1
    )
    return {row.test: row.mean_tps for row in run_bench(engine, spec)}


def load(args: argparse.Namespace, mode: str, ubatch: int) -> Engine:
    """Load one engine for a mode and ubatch."""
    longest = max(args.depth) + max([*args.prompt, *args.gen, 256])
    extra = {"n_threads": args.threads} if args.threads else {}
    config = EngineConfig(device=args.device, mode=mode, n_ubatch=ubatch, n_ctx=longest, **extra)
    start = time.perf_counter()
    engine = Engine.load(args.model, config)
    print(f"loaded {mode} ub{ubatch} in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return engine


def measure(args: argparse.Namespace) -> dict[tuple[int, str, str], list[float]]:
    """Return samples by (ubatch, test, system), upstream and each mode in turn."""
    samples: dict[tuple[int, str, str], list[float]] = {}
    for at, ubatch in enumerate(args.ubatch):
        engines = {mode: load(args, mode, ubatch) for mode in args.modes}
        for _ in range(args.pairs):
            found = {"upstream": upstream(args, ubatch)}
            found |= {mode: ours(engine, args, at == 0) for mode, engine in engines.items()}
            for system, rows in found.items():
                for test, tps in rows.items():
                    samples.setdefault((ubatch, test, system), []).append(tps)
        for engine in engines.values():
            print(f"{engine.mode} ub{ubatch}: {engine.memory()}", file=sys.stderr)
            engine.close()
    return samples


def report(args: argparse.Namespace, samples: dict[tuple[int, str, str], list[float]]) -> None:
    """Print the table and append the JSON lines."""
    print("| ubatch | test | system | median t/s | min .. max | pairs' ratio to upstream |")
    print("|---|---|---|---|---|---|")
    lines = []
    for (ubatch, test, system), values in samples.items():
        base = samples.get((ubatch, test, "upstream"), values)
        ratios = [a / b for a, b in zip(values, base)]
        middle = statistics.median(values)
        print(
            f"| {ubatch} | {test} | {system} | {middle:.1f} "
            f"| {min(values):.1f} .. {max(values):.1f} "
            f"| {statistics.median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f}) |"
        )
        lines.append(
            {
                "ubatch": ubatch,
                "test": test,
                "system": system,
                "tps": values,
                "ratio": ratios,
                "model": args.model.name,
                "device": args.device,
                "patchset": patchset(),
                "machine": platform.machine(),
                "when": time.strftime("%Y-%m-%d"),
            }
        )
    if args.out:
        with args.out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def main() -> int:
    """Run the comparison."""
    args = parser().parse_args()
    try:
        report(args, measure(args))
    except MoegraphError as error:
        print(f"bench_vs_upstream.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
