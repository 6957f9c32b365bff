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
from moegraph.draft.plan import SpecStats
from moegraph.engine import Engine
from moegraph.loop.answer import Answer
from moegraph.loop.answers import Answers
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
        token = answer[min(len(asked.generated.tokens), len(answer) - 1)]
        asked.append(token, None)
        return token

    Answers.pick = pick  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Answers.pick = kept  # type: ignore[method-assign]


def measure(engine: Engine, config: EngineConfig, kind: str, args: Any) -> Iterator[bench.Line]:
    """Yield a row of each way for a kind of text; in each round, each writes the text."""
    prompt, answer = text_of(kind, args.tokens, engine.hparams.n_vocab)
    ways = {
        way: None if way == "off" else drafting(engine, [LookUp()], replace(config, spec=way))
        for way in args.ways
    }  # fmt: skip
    found: dict[str, list[float]] = {way: [] for way in ways}
    first: dict[str, SpecStats] = {}
    for at, way in turns(list(ways), args.repeat + 1):
        engine.speculation = one = ways[way]
        if at == 1 and one:
            first[way] = one.controller.stats.copy()  # the first text may build graphs
        with dictated(prompt, answer):
            tps, tokens = write(engine, np.array(prompt, dtype=np.int32), len(answer))
        if tokens != answer:
            raise bench.BenchError("the text is not the one that was dictated")
        found[way].append(tps)
    about = {
        "kind": kind, "prompt": len(prompt), "tokens": len(answer),
        "foretold": round(foretold(prompt, answer), 3),
    }  # fmt: skip
    for way, (first_tps, *others) in found.items():
        row: bench.Line = {
            **about, "way": way, "tps": statistics.median(others), "first": first_tps,
        }  # fmt: skip
        if one := ways[way]:
            stats = one.controller.stats.since(first[way])
            row |= {
                "accepted": round(stats.acceptance, 3) if stats.steps else None,
                "mean_rows": round(1 + stats.drafted / stats.steps, 2) if stats.steps else None,
                "tokens_a_step": round(stats.tokens_per_step, 2) if stats.steps else None,
                "plain_steps": stats.plain_steps, "draft_steps": stats.steps,
            }  # fmt: skip
        yield row


def compare(args: argparse.Namespace) -> None:
    """Measure all kinds; print the rows."""
    config = EngineConfig(
        spec="lookup", device=args.device, profile="none", vram=args.vram,
        n_ctx=args.tokens + 4096, n_draft=15,
    )  # fmt: skip
    with Engine.load(args.model, config) as engine:
        for kind in args.kind:
            for row in measure(engine, config, kind, args):
                bench.note(args.out, row)


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.bench_parser(__doc__)
    p.add_argument("--kind", nargs="+", default=list(KINDS), choices=KINDS)
    p.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    p.add_argument("--tokens", type=bench.positive, default=256, help="of an answer")
    p.add_argument("--repeat", type=bench.positive, default=3)
    p.add_argument("--vram", default="auto", help="limit of device memory, in GiB")
    return p


if __name__ == "__main__":
    sys.exit(bench.main(parser(), compare))
