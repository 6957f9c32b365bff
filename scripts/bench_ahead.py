#!/usr/bin/env python3
"""Time passes with and without experts that are copied ahead, of predictions that a script draws.

One engine replays a generated trace: rows are steps of it, and a pass of several rows goes on by as
many steps as drafts of that length give tokens. Before a pass, the script draws what is predicted:
of the absent experts that the pass will choose a share, the recall, and wrong ones, by score, for a
precision. That is what tokens chose last, as far as the engine knows. The ways take turns on that
engine, so its slots have the same history. The argmax of every row must be the same in all of them.

    scripts/bench_ahead.py 35b.gguf --share 25 --trace sticky
    scripts/bench_ahead.py 35b.gguf --share 60 10 --tokens 80
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
import numpy as np
import numpy.typing as npt
from _traces import find_trace, router_of

from moegraph import Engine, EngineConfig
from moegraph.ggml.lib import ffi
from moegraph.runner.ahead import AheadFetch

Ids = npt.NDArray[np.int32]


class Case(NamedTuple):
    """Passes of n_rows rows; each gives so many tokens on average."""

    kind: str
    n_rows: int
    n_tokens: float = 1.0


CASES = (
    Case("decode", 1),
    Case("code", 4, 3.0), Case("code", 8, 4.1),
    Case("structured", 4, 3.6), Case("structured", 8, 5.9),
)  # fmt: skip
# Recall and precision of what tokens chose last, measured with `tiny` (docs/benchmarks/predict.md),
# by the share of the slots, for the cases in order.
TEXT: Mapping[int, tuple[tuple[float, float], ...]] = {
    60: ((0.47, 0.56), (0.50, 0.55), (0.49, 0.55), (0.57, 0.64), (0.56, 0.68)),
    25: ((0.51, 0.58), (0.60, 0.65), (0.67, 0.72), (0.66, 0.70), (0.71, 0.77)),
    10: ((0.53, 0.60), (0.63, 0.68), (0.72, 0.76), (0.70, 0.72), (0.77, 0.79)),
}


def advances(mean: float) -> Iterator[int]:
    """Yield whole numbers whose mean is this one."""
    total, given = 0.0, 0
    while True:
        total += mean
        yield int(total) - given
        given = int(total)


class Drawn:
    """Predictions of a script, given to an engine as what tokens chose last."""

    def __init__(self, engine: Engine) -> None:
        runner: Any = engine.runner
        self._ahead, self._replay, self._cache = runner.misses.ahead, runner.replay, runner.cache
        self._rng = np.random.default_rng(1)
        self.recall, self.precision = 0.0, 1.0

    def prepare(self, tokens: Ids) -> None:
        """Draw for the next pass, whose tokens these are."""
        known = self._ahead._known
        known[tokens] = 0
        for il, ids in enumerate(self._replay.current() if self.recall else ()):
            if self._ahead._layers[il].row == ffi.NULL:
                continue
            layer, chosen = self._cache.layers[il], np.unique(ids)
            right = chosen[layer.table[chosen] < 0]
            absent = np.setdiff1d(np.flatnonzero(layer.table < 0), right)
            right = right[self._rng.random(len(right)) < self.recall]
            n_wrong = self._rng.poisson(len(right) * (1 / self.precision - 1))
            score = np.array([layer.policy.score[e] for e in absent]) + 1e-9
            odds, n_wrong = score / max(score.sum(), 1e-9), min(n_wrong, len(absent))
            wrong = (
                self._rng.choice(absent, n_wrong, replace=False, p=odds) if n_wrong else right[:0]
            )
            drawn = self._rng.permutation(np.array([*right, *wrong], np.int64))
            for at, expert in enumerate(drawn[: known.shape[2] * len(tokens)]):
                known[tokens[at % len(tokens)], il, at // len(tokens)] = expert + 1


def begin(engine: Engine, trace: Ids, case: Case) -> None:
    """Have the engine replay a trace from its start, for passes of this case."""
    runner: Any = engine.runner
    replay = runner.replay
    engine.device.synchronize()
    if replay.n_rows != case.n_rows:
        runner.graphs.clear()  # they have the replay's rows
    replay._recorded, replay._step, replay.n_rows = trace, 0, case.n_rows
    replay.steps = advances(case.n_tokens)
    replay._sender.put(replay._block.tensors["ids"], replay.current())
    engine.device.synchronize()


def run(engine: Engine, drawn: Drawn, n_rows: int, n: int, seed: int) -> tuple[float, list[int]]:
    """Return the seconds of n passes, and the argmax of each."""
    ids = np.random.default_rng(seed).integers(0, engine.hparams.n_vocab, (n, n_rows))
    seconds, found = 0.0, []
    engine.reset()
    for at, rows in enumerate(ids.astype(np.int32)):
        if at and at * n_rows % 512 == 0:
            engine.reset()
        drawn.prepare(rows)
        start = time.perf_counter()
        argmax = engine.forward(rows, greedy=True).argmax
        seconds += time.perf_counter() - start
        found.append(-1 if argmax is None else int(argmax[-1]))
    return seconds, found


def measure(args: argparse.Namespace) -> None:
    """Print a line of JSON for each case and way."""
    shape, _ = router_of(args.model)
    n_all, n_sent = shape.n_layer * shape.n_expert, [0]
    real = AheadFetch.send

    def send(self: AheadFetch) -> int:
        n_sent[0] += len(self.sent)
        return real(self)

    AheadFetch.send = send  # type: ignore[method-assign]
    traces = {name: find_trace(name, shape, 2048, 0).ids.astype(np.int32) for name in args.trace}
    for share in args.share:
        config = EngineConfig(
            n_ctx=1024, device=args.device, profile="none", pin_layers=0, miss="stream",
            host_pin="all", cache_slots=round(share / 100 * n_all),
        )  # fmt: skip
        engine = Engine.load(args.model, config, routing=next(iter(traces.values())))
        drawn = Drawn(engine)
        for (name, trace), (case, text) in itertools.product(
            traces.items(), zip(CASES, TEXT[share])
        ):
            ways = {"none": (0.0, 1.0), "text": text, "0.8 and 0.8": (0.8, 0.8), "all": (1.0, 1.0)}
            times: dict[str, list[float]] = {way: [] for way in ways}
            counts, n = {}, max(args.tokens // (1 if case.n_rows == 1 else 3), 8)
            for sample in range(args.samples + 1):
                texts = []
                for way in ways if sample % 2 else reversed(ways):
                    begin(engine, trace, case)
                    drawn.recall, drawn.precision = ways[way]
                    run(engine, drawn, case.n_rows, n // 2, 100 + sample)
                    before, sent = engine.expert_stats(), n_sent[0]
                    seconds, text_of = run(engine, drawn, case.n_rows, n, sample)
                    after = engine.expert_stats()
                    texts.append(text_of)
                    times[way] += [seconds / n] if sample else []
                    if before and after:
                        missing = int(after.since(before).cache.missing.sum())
                        counts[way] = missing / n, (n_sent[0] - sent) / n
                if any(one != texts[0] for one in texts):
                    raise bench.BenchError("a way has other results than the others")
            base = statistics.median(times["none"])
            for way in ways:
                ms = 1e3 * statistics.median(times[way])
                line = {
                    "share": share, "trace": name, "kind": case.kind, "rows": case.n_rows,
                    "way": way, "ms": ms, "tps": 1e3 * case.n_tokens / ms, "ratio": 1e3 * base / ms,
                    "missing": counts[way][0], "sent": counts[way][1],
                }  # fmt: skip
                print(json.dumps(line), flush=True)
                if args.out:
                    with args.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
        engine.close()


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.bench_parser(__doc__, samples=2)
    p.add_argument("--share", type=int, nargs="+", default=[25, 60, 10], choices=TEXT,
                   help="percent of the experts that have slots")  # fmt: skip
    p.add_argument("--trace", nargs="+", default=["sticky"], help="sticky, flat, recorded")
    p.add_argument("--tokens", type=bench.positive, default=96, help="passes of one row")
    return p


if __name__ == "__main__":
    sys.exit(bench.main(parser(), measure))
