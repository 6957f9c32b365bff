#!/usr/bin/env python3
"""Measure prompt look-up in texts that repeat themselves, and in texts that do not.

The texts are dictated: each pass computes what it computes, and the token that is drawn is the next
one of the text. So weights may be random, all ways write the same text, and look-up finds, drafts
and is accepted as in an answer that a model wrote so. The ways write in turn in one engine.

Kinds of text: `edit` repeats the lines of its prompt with one word changed in every sixth, `list`
is a JSON list of records, of which the prompt has some, `mixed` is half lines of the prompt and
half new ones, `hopeless` has the same three tokens again and again, but never the same fourth.

Example:
    scripts/bench_lookup.py model.gguf --device cuda:0 --tokens 256
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
import numpy as np
from _repeats import TEXTS, foretold, hopeless
from bench_drafts import drafting, turns, write

from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.draft.lookup import LookUp
from moegraph.draft.plan import Step
from moegraph.engine import Engine
from moegraph.loop.answer import Answer
from moegraph.loop.answers import Answers
from moegraph.passes.speculation import Speculation
from moegraph.text.tokenizer import Tokenizer

WAYS = ("off", "lookup", "auto")
KINDS = (*TEXTS, "hopeless")


def text_of(kind: str, n_tokens: int, n_vocab: int) -> tuple[list[int], list[int]]:
    """Return the ids of a prompt and of an answer of n_tokens, for any vocabulary.

    They are those of the shipped model's tokenizer, spread over the vocabulary.
    """
    rng = random.Random(1)
    with open_model(bench.model_path("tiny")) as file, closing(Tokenizer(file)) as tokenizer:
        spread = max(n_vocab // file.hparams.n_vocab, 1)
        if kind == "hopeless":
            found = hopeless(rng, 600 + n_tokens)
            return [spread * id_ for id_ in found[:600]], [spread * id_ for id_ in found[600:]]
        parts = [tokenizer.encode(part) for part in TEXTS[kind](rng)]
    prompt, answer = ([spread * int(id_) % n_vocab for id_ in part] for part in parts)
    if len(answer) < n_tokens:
        raise bench.BenchError(f"{kind} has {len(answer)} tokens; lower --tokens")
    return prompt, answer[:n_tokens]


@contextmanager
def dictated(prompt: Sequence[int], answer: Sequence[int]) -> Iterator[None]:
    """Have texts go on as an answer does, whatever the model would draw."""
    kept = Answers.pick

    def pick(self: Answers, asked: Answer, *_: Any) -> int:
        token = answer[min(len(asked.sequence.tokens), len(answer) - 1)]
        asked.take(token, None)
        return token

    Answers.pick = pick  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Answers.pick = kept  # type: ignore[method-assign]


def one_text(engine: Engine, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Write an answer; return its tokens a second."""
    with dictated(prompt, answer):
        tps, tokens = write(engine, np.array(prompt, dtype=np.int32), len(answer))
    if tokens != list(answer):
        raise bench.BenchError("the text is not the one that was dictated")
    return tps


def noting(speculation: Speculation) -> list[Step]:
    """Return a list to which the steps that a controller observes are added."""
    steps, observe = list[Step](), speculation.controller.observe

    def noted(step: Step) -> None:
        steps.append(step)
        observe(step)

    speculation.controller.observe = noted  # type: ignore[method-assign]
    return steps


def measure(engine: Engine, config: EngineConfig, kind: str, args: Any) -> list[dict[str, Any]]:
    """Return a row of each way for a kind of text; in each round, each writes the text."""
    prompt, answer = text_of(kind, args.tokens, engine.hparams.n_vocab)
    ways = {
        way: None if way == "off" else drafting(engine, [LookUp()], replace(config, spec=way))
        for way in args.ways
    }  # fmt: skip
    kept = {way: noting(one) for way, one in ways.items() if one}
    found: dict[str, list[float]] = {way: [] for way in ways}
    for at, way in turns(list(ways), args.repeat + 1):
        engine.speculation = ways[way]
        if at == 1 and way in kept:
            kept[way].clear()  # the first text may build graphs
        found[way].append(one_text(engine, prompt, answer))
    about = {
        "kind": kind, "prompt": len(prompt), "tokens": len(answer),
        "foretold": round(foretold(prompt, answer), 3),
    }  # fmt: skip
    return [row(way, found[way], kept.get(way), about) for way in ways]


def row(
    way: str, tps: Sequence[float], kept: list[Step] | None, about: dict[str, Any]
) -> dict[str, Any]:
    """Return the row of a way. tps: of its texts, the first of which does not count."""
    found = {**about, "way": way, "tps": statistics.median(tps[1:]), "first": tps[0]}
    if kept:
        steps = [step for step in kept if step.n_rows > 1]
        drafted, n = sum(step.n_rows - 1 for step in steps), len(steps)
        found |= {
            "accepted": round(sum(step.n_accepted for step in steps) / drafted, 3) if n else None,
            "mean_rows": round(1 + drafted / n, 2) if n else None,
            "tokens_a_step": round(sum(s.n_tokens for s in steps) / n, 2) if n else None,
            "plain_steps": len(kept) - n, "draft_steps": n,
        }  # fmt: skip
    return found


def compare(args: argparse.Namespace) -> None:
    """Measure all kinds and print a table."""
    config = EngineConfig(
        spec="lookup", device=args.device, profile="none", vram=args.vram,
        n_ctx=args.tokens + 4096, n_draft=15,
    )  # fmt: skip
    with Engine.load(args.model, config) as engine:
        for kind in args.kind:
            rows = measure(engine, config, kind, args)
            plain = next((one["tps"] for one in rows if one["way"] == "off"), None)
            for one in rows:
                bench.append_line(args.out, one)
                print(line(one, plain), flush=True)


def line(one: dict[str, Any], plain: float | None) -> str:
    """Return what a row says."""
    over = f" {one['tps'] / plain:5.2f}x" if plain else ""
    text = f"{one['kind']:9} {one['way']:7} {one['tps']:8.1f} tok/s{over} first {one['first']:.1f}"
    if "draft_steps" not in one:
        return f"{text}; {one['foretold']:.0%} of the tokens were foretold"
    return text + (
        f"; {one['accepted']} accepted, {one['mean_rows']} rows and {one['tokens_a_step']} tokens "
        f"a step with a draft, {one['plain_steps']} without"
    )


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("model", type=bench.model_path, help="a GGUF file, or a shipped model's name")
    p.add_argument("--kind", nargs="+", default=list(KINDS), choices=KINDS)
    p.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    p.add_argument("--tokens", type=bench.positive, default=256, help="of an answer")
    p.add_argument("--repeat", type=bench.positive, default=3)
    p.add_argument("--device", default="auto")
    p.add_argument("--vram", default="auto", help="limit of device memory, in GiB")
    p.add_argument("--out", type=Path, metavar="FILE", help="append rows here, as JSON lines")
    return p


def main() -> int:
    """Run the command line and return the exit code."""
    args = parser().parse_args()
    return bench.guarded("bench_lookup.py", lambda: compare(args))


if __name__ == "__main__":
    sys.exit(main())
