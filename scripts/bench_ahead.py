#!/usr/bin/env python3
"""Measure how many missing experts of a verify pass could be known before it, and what that saves.

Computes a text on the CPU with every expert resident, and notes which experts each token chose and
the output of the last layer. Then it replays verify passes of several widths through the expert
cache, and compares the experts that each pass misses with those that were predicted:

- last pass: what the rows of the last verify pass chose
- same token: what the pass's tokens chose where the text had them last
- features: what each layer's router says of the last layer's output of the rows themselves, which
  is more than a drafter can know of them
- one token: what the last accepted token chose

Of the predicted experts that are not resident, as many are fetched as cross the link while the
drafter runs. "saved" is the time of those that the pass then lacked, less that of evicting others,
which is not counted; so it is an upper bound. No pass is verified wrong: all rows are the text's.

Example:
    scripts/bench_ahead.py tiny --tokens 1200
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
from gguf.quants import dequantize

from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.experts.cache import ExpertCache
from moegraph.experts.cost import choose_ways, machine_costs
from moegraph.experts.machines import MACHINES
from moegraph.experts.policy import POLICIES
from moegraph.experts.residency import Residency
from moegraph.kinds import Kind
from moegraph.placement.simulate import even_slots

ROOT = Path(__file__).resolve().parents[1]
Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
# Sets of experts, one for each layer.
Guess = Sequence[set[int]]
_CHUNK = 64


@dataclass(frozen=True)
class Text:
    """tokens [n]. chosen [n, n_layer, n_expert_used]: experts. ranked: the same, by features."""

    tokens: list[int]
    chosen: Ids
    ranked: Ids


def parser() -> Any:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("model", type=bench.model_path, help="a GGUF file, or a shipped model's name")
    p.add_argument("--tokens", type=bench.positive, default=1200)
    p.add_argument("--rows", type=bench.positive, nargs="+", default=[4, 8], help="of a pass")
    p.add_argument("--accepted", type=bench.positive, default=3, help="tokens that a pass takes")
    p.add_argument("--share", type=bench.share, nargs="+", default=[60, 25], help="slots, %%")
    p.add_argument("--drafter-ms", type=float, default=1.0, help="how long the link is idle")
    p.add_argument("--machine", default="h200", choices=MACHINES)
    return p


def read_text(engine: Engine, n: int) -> Text:
    """Compute code of this repository."""
    files = sorted((ROOT / "moegraph").glob("*/*.py"))[:40]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    tokens = list(engine.tokenizer.encode(text[: 12 * n]))[:n]
    n_layer, n_used = engine.hparams.n_layer, engine.hparams.n_expert_used
    routers = [_router(engine, il) for il in range(n_layer)]
    chosen, ranked = [], []
    for at in range(0, len(tokens), _CHUNK):
        nodes = engine.forward_nodes(np.array(tokens[at : at + _CHUNK], np.int32), at)
        chosen.append(np.stack([nodes["ffn_moe_topk", il] for il in range(n_layer)], axis=1))
        hidden = nodes["l_out", n_layer - 1].astype(np.float64)
        hidden /= np.sqrt((hidden**2).mean(axis=1, keepdims=True) + engine.hparams.f_norm_rms_eps)
        scores = [(hidden * norm) @ matrix.T for norm, matrix in routers]
        ranked.append(np.stack([np.argsort(-s, axis=1)[:, :n_used] for s in scores], axis=1))
    return Text(tokens, np.concatenate(chosen), np.concatenate(ranked).astype(np.int32))


def _router(engine: Engine, il: int) -> tuple[Floats, Floats]:
    """Return the norm and the matrix [n_expert, n_embd] of a layer's router."""
    found = []
    for name in ("post_attention_norm", "ffn_gate_inp"):
        info = engine.file.tensors[f"blk.{il}.{name}.weight"]
        raw = np.empty(info.nbytes, np.uint8)
        engine.file.read(info, raw)
        found.append(dequantize(raw, info.type).reshape(-1, info.ne[0]))
    return found[0][0], found[1]


def _sets(rows: Ids) -> list[set[int]]:
    """Return what rows [n, n_layer, n_expert_used] chose, by layer."""
    return [set(rows[:, il].reshape(-1).tolist()) for il in range(rows.shape[1])]


def _same_token(text: Text, at: int, n_rows: int, seen: dict[int, int]) -> list[set[int]]:
    places = [seen[token] for token in text.tokens[at : at + n_rows] if token in seen]
    return _sets(text.chosen[places])


Predictor = Callable[[Text, int, int, dict[int, int]], Guess]
PREDICTORS: dict[str, Predictor] = {
    "last pass": lambda text, at, n, seen: _sets(text.chosen[at - n : at]),
    "one token": lambda text, at, n, seen: _sets(text.chosen[at - 1 : at]),
    "same token": _same_token,
    "features": lambda text, at, n, seen: _sets(text.ranked[at : at + n]),
}


@dataclass
class Count:
    """Sums over passes: experts missing, predicted and not resident, both, and fetched in time."""

    missing: int = 0
    predicted: int = 0
    right: int = 0
    in_time: float = 0.0


def replay(
    text: Text, residency: Residency, n_rows: int, accepted: int, n_link: float
) -> tuple[int, dict[str, Count]]:
    """Replay verify passes; return their number, and the counts of each predictor.

    n_link: experts that cross the link while the drafter runs.
    """
    counts = {name: Count() for name in PREDICTORS}
    seen: dict[int, int] = {}
    n_passes, begin = 0, len(text.tokens) // 4
    for at in _passes(text, n_rows, accepted):
        guesses = {name: of(text, at, n_rows, seen) for name, of in PREDICTORS.items()}
        layers = residency.begin_pass(Kind.VERIFY, n_rows).mode.fetch_layers
        tables = residency.cache.tables
        absent = [set(np.flatnonzero(row < 0).tolist()) for row in tables]
        residency.begin_fetch(layers)
        missing = []
        for il, ids in enumerate(text.chosen[at : at + n_rows].transpose(1, 0, 2)):
            (residency.fetched if il in layers else residency.routed)(il, ids.reshape(-1))
            missing.append(set(ids.reshape(-1).tolist()) & absent[il])
        residency.end_pass(1.0)
        seen |= {text.tokens[i]: i for i in range(at, at + accepted)}
        if at < begin:
            continue
        n_passes += 1
        for name, guess in guesses.items():
            _add(counts[name], guess, absent, missing, n_link)
    return n_passes, counts


def _passes(text: Text, n_rows: int, accepted: int) -> Iterator[int]:
    yield from range(n_rows, len(text.tokens) - n_rows, min(accepted, n_rows))


def _add(
    count: Count, guess: Guess, absent: Guess, missing: Iterable[set[int]], n_link: float
) -> None:
    n_missing = n_predicted = n_right = 0
    for predicted, away, lacked in zip(guess, absent, missing):
        n_missing += len(lacked)
        n_predicted += len(predicted & away)
        n_right += len(predicted & lacked)
    count.missing += n_missing
    count.predicted += n_predicted
    count.right += n_right
    # of those predicted, as many as there is time for, right or not
    count.in_time += n_right * min(1.0, n_link / max(n_predicted, 1))


def compare(args: argparse.Namespace) -> None:
    """Measure, and print a table."""
    machine = MACHINES[args.machine]
    config = EngineConfig(device="cpu", n_ctx=args.tokens + _CHUNK, profile="none")
    with Engine.load(args.model, config) as engine:
        text, hp = read_text(engine, args.tokens), engine.hparams
    fetch_s = machine.fetch(8) / 8
    print("| rows | slots | missing a pass | predictor | recall | precision | saved, ms a pass |")
    print("|---|---|---|---|---|---|---|")
    for n_rows in args.rows:
        for share in args.share:
            slots = even_slots(hp.n_layer, hp.n_expert, share / 100)
            cache = ExpertCache(hp.n_expert, slots, POLICIES["lfu"](), hp.n_expert_used)
            for layer in cache.layers:
                layer.preload(None, None)
            costs = machine_costs(machine, hp.n_expert_used)
            ways = choose_ways("auto", costs, slots, hp.n_expert_used, hp.n_expert)
            residency = Residency(cache, ways, fetchable=range(hp.n_layer))
            n_link = args.drafter_ms / 1e3 / fetch_s
            n, counts = replay(text, residency, n_rows, args.accepted, n_link)
            for name, c in counts.items():
                print(
                    f"| {n_rows} | {share:g} % | {c.missing / n:.1f} | {name} | "
                    f"{c.right / max(c.missing, 1):.2f} | {c.right / max(c.predicted, 1):.2f} | "
                    f"{1e3 * fetch_s * c.in_time / n:.3f} |",
                    flush=True,
                )


def main() -> int:
    """Run the command line and return the exit code."""
    args = parser().parse_args()
    return bench.guarded("bench_ahead.py", lambda: compare(args))


if __name__ == "__main__":
    sys.exit(main())
