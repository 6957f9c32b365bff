#!/usr/bin/env python3
"""Measure how many tokens a step gives with drafts of different shapes, and what a step costs.

Texts are greedy, on the CPU. A chain has the drafter's likeliest tokens. "leaves" has others beside
them where the drafter is least sure, "ddtree" the likeliest paths if each depth held by itself.
"tree" is what a DSpark drafter builds from what it knows of each token: the others know only what
follows the likeliest ones. Rows do not count the last token of the text, which each pass has.
Times are of the processor (CPU time of the process), without those of prompts; "none" drafts
nothing. So shapes can be compared at equal rows and at equal cost.

    scripts/bench_shapes.py tiny dspark.gguf --rows 3 5 7 11 --prompts 10
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Collection
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench

from moegraph.config import EngineConfig
from moegraph.draft.drafter import Draft
from moegraph.draft.plan import PLAIN, Plan, Shape, Step
from moegraph.draft.stats import SpecStats
from moegraph.draft.tree import DDTree, TreeDrafter, best_leaves
from moegraph.draft.watch import Watched
from moegraph.engine import Engine
from moegraph.engine.speculation import Speculation

ROOT = Path(__file__).resolve().parents[1]
SHAPES = ("chain", "leaves", "ddtree", "tree")
MOST_ROWS = 31


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("model", type=bench.model_path, help="a GGUF file, or a shipped model's name")
    p.add_argument("draft", help="a DFlash or DSpark file")
    p.add_argument("--rows", type=bench.positive, nargs="+", default=[3, 5, 7, 11])
    p.add_argument("--prompts", type=bench.positive, default=6)
    p.add_argument("--prompt-tokens", type=bench.positive, default=48)
    p.add_argument("--tokens", type=bench.positive, default=128)
    p.add_argument("--threads", type=bench.positive, default=1)
    return p


class Fixed:
    """A controller (`engine.speculation.Controller`) of steps of one shape and size."""

    def __init__(self, name: str, shape: str, n_rows: int, max_draft: int) -> None:
        self._name, self._shape, self._n_rows = name, shape, n_rows
        self._n_draft = n_rows if shape == "chain" else max_draft
        self.stats = SpecStats()
        self.n_steps = self.n_tokens = 0

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the rows of passes."""
        return (1 + self._n_rows,)

    def begin(self) -> None:
        """Begin another text."""

    def choose(self, n_left: int, without: Collection[str] = ()) -> Plan:
        """Return what the next step drafts."""
        if self._name in without:
            return PLAIN
        if self._shape == "tree":
            return Plan(self._name, self._n_draft, n_nodes=self._n_rows)
        tree = DDTree(self._n_rows, chain_seed=False) if self._shape == "ddtree" else None
        return Plan(self._name, self._n_draft, 1 if self._shape == "chain" else 8, tree)

    def choose_for(self, n_seqs: int, n_left: int, without: Collection[str] = ()) -> Plan:
        """Return what one of several sequences drafts."""
        return self.choose(n_left, without)

    def observe_shared(self, n_seqs: int, n_tokens: int, seconds: float, n_rows: int) -> None:
        """Learn nothing: there is one sequence."""

    def observe_watched(self, watched: Watched) -> None:
        """Learn nothing: every draft is verified."""

    def shape(self, plan: Plan, draft: Draft) -> Shape:
        """Return which tokens of a draft get a row."""
        if self._shape == "chain" or draft.log_p is None:
            return Shape(min(draft.n_depth, self._n_rows))
        return Shape(*best_leaves(draft.log_p, self._n_rows))

    def observe(self, step: Step) -> None:
        """Count a step that drafted."""
        if step.source:
            self.n_steps += 1
            self.n_tokens += step.n_tokens


def prompts_of(engine: Engine, n: int, n_tokens: int) -> list[list[int]]:
    """Return beginnings of this repository's files."""
    files = sorted(ROOT.glob("moegraph/*/*.py"))
    texts = [path.read_text(encoding="utf-8")[: 12 * n_tokens] for path in files]
    ids = [one for one in map(engine.tokenizer.encode, texts) if len(one) >= n_tokens]
    return [one[:n_tokens] for one in ids[:: max(1, len(ids) // n)][:n]]


def rate_of(
    engine: Engine, shape: str, n_rows: int, prompts: list[list[int]], n: int
) -> tuple[float, float]:
    """Return the tokens of a step and the tokens of a second; shape: "" drafts nothing."""
    [drafter] = engine._loaded.drafters
    fixed = Fixed(drafter.name, shape, n_rows, drafter.max_draft)
    n_vocab = engine.hparams.n_vocab
    engine.speculation = Speculation([drafter], fixed, n_vocab, MOST_ROWS + 1) if shape else None
    seconds = 0.0
    for ids in prompts:
        events = engine.generate(ids, None, n, text=False, ignore_eos=True, reuse=False)
        next(events)  # the prompt and the first token
        start = time.process_time()
        for _ in events:
            pass
        seconds += time.process_time() - start
    return fixed.n_tokens / max(1, fixed.n_steps), (n - 1) * len(prompts) / seconds


def main() -> int:
    """Measure, and print a table."""
    args = parser().parse_args()
    config = EngineConfig(
        device="cpu", n_threads=args.threads, n_ctx=args.prompt_tokens + args.tokens + 64,
        spec="dflash", draft=args.draft, n_draft=MOST_ROWS, profile="none",
    )  # fmt: skip
    with Engine.load(args.model, config) as engine:
        shapes = [
            shape
            for shape in SHAPES
            if shape != "tree" or isinstance(engine._loaded.drafters[0], TreeDrafter)
        ]
        prompts = prompts_of(engine, args.prompts, args.prompt_tokens)
        _, plain = rate_of(engine, "", 0, prompts, args.tokens)
        print(f"tokens a step, tokens a second; none: {plain:.0f} tokens a second")
        print(f"| rows | {' | '.join(shapes)} |")
        print("|---" * (len(shapes) + 1) + "|")
        for n_rows in args.rows:
            found = [rate_of(engine, shape, n_rows, prompts, args.tokens) for shape in shapes]
            cells = [f"{rate:.2f}, {speed:.0f}" for rate, speed in found]
            print(f"| {n_rows} | {' | '.join(cells)} |", flush=True)
    return 0 if np.isfinite(found).all() else 1


if __name__ == "__main__":
    sys.exit(bench.guarded("bench_shapes.py", main))
