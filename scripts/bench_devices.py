#!/usr/bin/env python3
"""Measure several devices against one: decode, passes over several sequences, and prompts.

    scripts/bench_devices.py MODEL cuda:0 cuda:0,cuda:1 --share 0.6 --share 1

Every entry of DEVICES gets the same number of expert slots in all: a share of all experts. So two
cards with a share of 0.6 hold 30 % of all expert bytes each, which are 60 % of those of their own
layers. Each entry has a process of its own, which loads the model once. A line is printed as soon
as it is known. A measurement that takes longer than --limit ends its process, which says where it
was; the next entry goes on.
"""

from __future__ import annotations

import argparse
import faulthandler
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench

import moegraph
from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.kinds import Kind
from moegraph.passes.grouppasses import GroupPasses

Ids = npt.NDArray[np.int32]
# Rows of each sequence before its first measured pass.
_BEFORE = 128


class Lines:
    """Prints what was measured, and gives each measurement its time."""

    def __init__(self, args: argparse.Namespace, device: str, share: float) -> None:
        self._out, self._limit = args.out, args.limit
        self._device, self._share = device, share

    def begin(self) -> None:
        """Begin a measurement; if it takes too long, the process ends."""
        faulthandler.dump_traceback_later(self._limit, exit=True)

    def say(self, what: str, value: object, **more: Any) -> None:
        """Print a line, and begin the next measurement."""
        idle = f" (idle {more['idle']:.1%})" if "idle" in more else ""
        print(f"{self._share:5.0%}  {self._device:24} {what:14} {value}{idle}", flush=True)
        line = {"device": self._device, "share": self._share, "what": what, "value": value}
        bench.append_line(self._out, {**line, **more})
        self.begin()


def text_ids(engine: Engine, n: int) -> Ids:
    """Return n tokens of this project's own source."""
    ids: list[int] = []
    for path in sorted(Path(moegraph.__file__).parent.rglob("*.py")):
        ids += engine.tokenizer.encode(path.read_text(encoding="utf-8"), add_special=False)
        if len(ids) >= n:
            break
    return np.resize(np.array(ids, np.int32), n)


def decode(engine: Engine, ids: Ids, n: int) -> float:
    """Return tokens a second of an answer, the first 16 tokens left out."""
    times = []
    for event in engine.generate(ids, max_tokens=n, text=False, ignore_eos=True):
        times.append((event.n_generated, event.decode_s))
    (first, start), (last, end) = times[min(16, len(times) - 2)], times[-1]
    return (last - first) / (end - start)


def prompt(engine: Engine, ids: Ids) -> float:
    """Return tokens a second of a prompt."""
    engine.reset()
    start = time.perf_counter()
    engine.prefill(ids, greedy=True)
    return len(ids) / (time.perf_counter() - start)


def fill(engine: Engine, ids: Ids, n_seq: int) -> Ids:
    """Give each sequence a text of its own; return their next tokens."""
    rows = np.zeros(n_seq, np.int32)
    for seq in range(n_seq):
        engine.reset(seq)
        own = ids[seq * (_BEFORE + 3) :][:_BEFORE]
        rows[seq] = engine.prefill(own, seq, greedy=True).argmax[-1]  # type: ignore[index]
    return rows


def together(engine: Engine, rows: Ids, n: int) -> float:
    """Return tokens a second of n greedy passes of one row of each sequence; rows go on."""
    passes, start = engine.passes, 0.0
    for at in range(n):
        if at == n // 4:
            start = time.perf_counter()
        passes.submit(rows[:, None], range(len(rows)), False, True, None, Kind.DECODE)
        rows[:] = passes.collect().argmax  # type: ignore[assignment]
    return (n - n // 4) * len(rows) / (time.perf_counter() - start)


def in_groups(passes: GroupPasses, rows: Ids, n: int) -> tuple[float, float]:
    """Return tokens a second with a group in each stage, and the share of time without work."""
    flying: deque[npt.NDArray[np.intp]] = deque()
    waiting = deque(np.array_split(np.arange(len(rows)), passes.most))
    counts = passes.flights.counts
    n_ended, n_first, start, before, busy = 0, 0, 0.0, 0.0, 0.0
    while n_ended < n * passes.most:
        while waiting:
            slots = waiting.popleft()
            passes.submit_group(rows[slots][:, None], slots.tolist(), True, None)
            flying.append(slots)
        slots = flying.popleft()
        rows[slots] = passes.collect_group().argmax  # type: ignore[assignment]
        waiting.append(slots)
        n_ended += 1
        if n_ended == max(n // 4, 1) * passes.most:
            start, n_first = time.perf_counter(), n_ended
            before, busy = counts.seconds, sum(counts.busy_s)
    seconds = time.perf_counter() - start
    idle = 1 - (sum(counts.busy_s) - busy) / (passes.most * (counts.seconds - before))
    while flying:
        slots = flying.popleft()
        rows[slots] = passes.collect_group().argmax  # type: ignore[assignment]
    return (n_ended - n_first) * len(rows) / passes.most / seconds, idle


def settings_of(model: Path, share: float) -> dict[str, Any]:
    """Return the settings that give all devices together a share of the experts."""
    if share >= 1:
        return {}
    with open_model(model) as file:
        hp = file.hparams
    return {"pin_layers": 0, "cache_slots": round(share * hp.n_layer * hp.n_expert)}


def measure(args: argparse.Namespace, device: str, share: float) -> None:
    """Measure one entry: first what several sequences do, which is what two cards are for."""
    lines, start = Lines(args, device, share), time.perf_counter()
    lines.begin()
    n_seq, longest = max(args.sequences, default=1), max(args.prompts, default=0) + 1024
    config = EngineConfig(
        n_ctx=longest, n_kv=longest + n_seq * (_BEFORE + 4 * args.passes + 256), n_seq=n_seq,
        device=device, profile="none", **settings_of(args.model, share),
    )  # fmt: skip
    with Engine.load(args.model, config) as engine:
        lines.say("loaded", round(time.perf_counter() - start, 1), unit="s")
        layers = [[s.layers.start, s.layers.stop] for s in engine.stages]
        lines.say("layers", layers)
        ids = text_ids(engine, max(longest, (_BEFORE + 3) * n_seq + _BEFORE))
        speeds = [decode(engine, ids[:512], args.tokens) for _ in range(args.repeat)]
        each = np.round(speeds, 2).tolist()
        lines.say("1 sequence", round(max(speeds), 2), unit="tok/s", all=each)
        rows = fill(engine, ids, n_seq)
        lines.say("texts", n_seq)
        for n in args.sequences:
            speeds = [together(engine, rows[:n], args.passes) for _ in range(2)]
            each = np.round(speeds, 1).tolist()
            lines.say(f"{n} sequences", round(max(speeds), 1), unit="tok/s", all=each)
            if isinstance(engine.passes, GroupPasses) and n >= engine.passes.most:
                found = [in_groups(engine.passes, rows[:n], args.passes) for _ in range(2)]
                speed, idle = max(found)
                more = {"unit": "tok/s", "idle": round(idle, 3), "all": found}
                lines.say(f"{n} in groups", round(speed, 1), **more)
        for seq in range(n_seq):
            engine.reset(seq)
        for n in args.prompts:
            speeds = [prompt(engine, ids[:n]) for _ in range(args.repeat + 1)][1:]
            lines.say(f"prompt {n}", round(float(np.median(speeds)), 1), unit="tok/s")
        stats = engine.expert_stats()
        lines.say("hit rate", round(stats.cache.hit_rate, 4) if stats else 1.0)
        peak = engine.memory()["device_peak_bytes"] / 2**30
        lines.say("device peak", round(peak, 2), unit="GiB")


def main() -> int:
    """Run the command line and return the exit code."""
    parser = bench.Parser(__doc__)
    parser.add_argument("model", type=bench.model_path)
    parser.add_argument("devices", nargs="+")
    parser.add_argument("--share", type=float, action="append", default=None)
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 8192])
    parser.add_argument("--sequences", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--passes", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--limit", type=float, default=60, help="seconds of a measurement")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    args = parser.parse_args()
    entries = [(device, share) for share in args.share or [0.6, 1.0] for device in args.devices]
    if len(entries) == 1:
        return bench.guarded("bench_devices.py", lambda: measure(args, *entries[0]))
    failed = 0
    for device, share in entries:
        numbers = {"prompts": args.prompts, "sequences": args.sequences}
        command = [sys.executable, __file__, str(args.model), device, "--share", str(share)]
        for name, values in numbers.items():
            command += [f"--{name}", *map(str, values)]
        for name in ("tokens", "passes", "repeat", "limit"):
            command += [f"--{name}", str(getattr(args, name))]
        if args.out:
            command += ["--out", str(args.out)]
        failed += subprocess.run(command, check=False).returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
