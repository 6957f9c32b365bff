#!/usr/bin/env python3
"""Time passes of a few rows with several builds in turn: medians and ratios to the first.

Every SYSTEM is NAME=FOLDER[,VAR=VALUE...]: a folder that holds a built moegraph package, or the
package llama_cpp when NAME starts with "upstream". Each runs in a process of its own that keeps the
model loaded; a round asks every system for every width before the next round begins.

Example:
    scripts/bench_passes.py 35b.gguf upstream=/opt/llama before=../old now=. --rows 1 8 16 23
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

Pass = Callable[[int, int], float]


def moegraph_pass(model: str) -> Pass:
    """Load the engine; return a function that times passes of n rows (seconds, median)."""
    import numpy as np

    from moegraph.config import EngineConfig
    from moegraph.engine import Engine

    engine = Engine.load(model, EngineConfig(device="cuda", mode="whole", n_ctx=4096))
    rng = np.random.default_rng(0)

    def run(n_rows: int, repetitions: int) -> float:
        ids = rng.integers(0, engine.hparams.n_vocab, n_rows).astype(np.int32)
        engine.reset()
        times = []
        for _ in range(repetitions):
            begin = time.perf_counter()
            engine.forward(ids, greedy=True)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    return run


def upstream_pass(model: str) -> Pass:
    """Do the same with llama.cpp: n tokens at an empty cache, logits of the last one."""
    import llama_cpp.llama_cpp as lc

    lc.llama_backend_init()
    mparams = lc.llama_model_default_params()
    mparams.n_gpu_layers = 99
    loaded: Any = lc.llama_model_load_from_file(model.encode(), mparams)
    cparams = lc.llama_context_default_params()
    cparams.n_ctx, cparams.n_batch, cparams.n_ubatch = 4096, 512, 512
    ctx: Any = lc.llama_init_from_model(loaded, cparams)

    def run(n_rows: int, repetitions: int) -> float:
        batch = lc.llama_batch_init(n_rows, 0, 1)
        batch.n_tokens = n_rows
        for i in range(n_rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = (7919 * i + 11) % 100000, i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, i == n_rows - 1
        times = []
        for _ in range(repetitions):
            lc.llama_memory_clear(lc.llama_get_memory(ctx), True)
            lc.llama_synchronize(ctx)
            begin = time.perf_counter()
            if lc.llama_decode(ctx, batch) != 0:
                raise SystemExit("llama_decode failed")
            lc.llama_synchronize(ctx)
            times.append(time.perf_counter() - begin)
        lc.llama_batch_free(batch)
        return statistics.median(times)

    return run


def serve(kind: str, model: str) -> None:
    """Answer lines 'rows repetitions' on stdin with seconds on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    run = (upstream_pass if kind.startswith("upstream") else moegraph_pass)(model)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        n_rows, repetitions = map(int, line.split())
        print(run(n_rows, repetitions), file=answers, flush=True)


class System:
    """One build in its own process."""

    def __init__(self, spec: str, model: Path) -> None:
        self.name, _, rest = spec.partition("=")
        folder, *settings = rest.split(",")
        env = dict(os.environ, **dict(s.split("=", 1) for s in settings))
        env["PYTHONPATH"] = os.pathsep.join([folder, env.get("PYTHONPATH", "")])
        if self.name.startswith("upstream"):
            libs = os.path.join(folder, "llama_cpp", "lib")
            env["LD_LIBRARY_PATH"] = os.pathsep.join([libs, env.get("LD_LIBRARY_PATH", "")])
        command = [sys.executable, __file__, str(model), "--serve", self.name]
        self.process = subprocess.Popen(
            command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, cwd="/",
        )  # fmt: skip

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self.process.stdin is not None and self.process.stdout is not None
        return self.process.stdin, self.process.stdout

    def wait(self) -> None:
        """Block until the model is loaded."""
        if self._pipes()[1].readline().strip() != "ready":
            raise SystemExit(f"{self.name}: did not start")

    def measure(self, n_rows: int, repetitions: int) -> float:
        """Return the median time of a pass in milliseconds."""
        to, back = self._pipes()
        print(n_rows, repetitions, file=to, flush=True)
        answer = back.readline()
        if not answer:
            raise SystemExit(f"{self.name}: died at {n_rows} rows")
        return float(answer) * 1e3


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("model", type=Path)
    p.add_argument("systems", nargs="*", metavar="NAME=FOLDER[,VAR=VALUE...]")
    p.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 23, 32])
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--repetitions", type=int, default=7, help="passes per width and round")
    p.add_argument("--serve", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.serve:
        serve(args.serve, str(args.model))
        return
    systems = [System(spec, args.model.resolve()) for spec in args.systems]
    for system in systems:
        system.wait()
    for system in systems:  # capture and warm up
        for n_rows in args.rows:
            system.measure(n_rows, 4)
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(args.rounds):
        for n_rows in args.rows:
            for system in systems:
                ms = system.measure(n_rows, args.repetitions)
                found.setdefault((system.name, n_rows), []).append(ms)
    first = systems[0].name
    print(f"| rows | system | ms, median | min .. max | times faster than {first} |")
    print("|---|---|---|---|---|")
    for n_rows in args.rows:
        for system in systems:
            values = found[system.name, n_rows]
            ratios = [a / b for a, b in zip(found[first, n_rows], values)]
            print(
                f"| {n_rows} | {system.name} | {statistics.median(values):.2f} "
                f"| {min(values):.2f} .. {max(values):.2f} "
                f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f}) |",
                flush=True,
            )
    for system in systems:
        system.process.kill()


if __name__ == "__main__":
    main()
