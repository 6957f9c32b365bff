#!/usr/bin/env python3
"""Measure --spec auto with several requests at a time, with drafts that are right by a script.

Each client continues a prompt of its own, greedily. What it gets is its text from then on: with
drafts and without, these tokens are drawn, whatever the results say. Else texts would soon part,
because passes of other rows are rounded differently and random weights have many near ties. A draft
has the next tokens of the text up to one that is wrong, as often as scripts/bench_drafts.py says
for the kind of text. All passes and drafts cost what they cost.

    scripts/bench_drafts_clients.py 35b.gguf --clients 1 2 4 8 16
    scripts/bench_drafts_clients.py 35b.gguf --draft dflash.gguf --share 60 --kind structured
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
import bench_drafts as drafts
import numpy as np
from bench_service import Client, rate

from moegraph import Engine, EngineConfig, SamplingParams
from moegraph.draft.drafter import Draft, Drafter, Race, as_joint
from moegraph.draft.rejection import Odds
from moegraph.engine.drafters import first_widths, open_speculation
from moegraph.engine.service import Service
from moegraph.engine.warmup import time_verify
from moegraph.errors import InternalError
from moegraph.loop.answer import Answer
from moegraph.loop.answers import Answers
from moegraph.runner import Output

# Tokens by which prompts are told apart.
_NAMED = 8
GREEDY = SamplingParams(temperature=0.0)


def name_of(text: Sequence[int]) -> tuple[int, ...]:
    """Return what tells a client's text from others."""
    return tuple(text[:_NAMED])


class OfClient(drafts.Scripted):
    """A drafter whose drafts are right by a script, for sequences that continue known texts."""

    def __init__(
        self, drafter: Drafter, kind: str, texts: Sequence[Sequence[int]],
        held_by: Callable[[int], Sequence[int]],
    ) -> None:  # fmt: skip
        """texts: prompt and answer of each client. held_by: what a sequence holds."""
        super().__init__(drafter, kind, texts[0], lambda: 0)
        self._by_prompt = {name_of(text): np.asarray(text, np.int32) for text in texts}
        self._held_by = held_by

    def draft(self, slot: int, anchor: int, n: int, n_top: int, race: Race | None = None) -> Draft:
        """Return a draft of as many tokens as the drafter makes."""
        self._turn_to(slot)
        return super().draft(slot, anchor, n, n_top, race)

    def draft_all(self, anchors: Mapping[int, int], n: int, n_top: int) -> list[Draft]:
        """Return drafts of as many tokens as the drafter makes, of several sequences."""
        joint, found = as_joint(self._drafter), list[Draft]()
        for slot, draft in zip(anchors, joint.draft_all(anchors, n, n_top) if joint else ()):
            self._turn_to(slot)
            found.append(self.scripted(draft))
        return found

    def _turn_to(self, slot: int) -> None:
        held = self._held_by(slot)
        self._text, self._held = self._by_prompt[name_of(held)], lambda: len(held)


@contextmanager
def forced(texts: Sequence[Sequence[int]]) -> Iterator[None]:
    """Have every service draw the tokens of these texts, prompts first, after their prompts."""
    by_prompt = {name_of(text): text for text in texts}

    def pick(
        self: Answers, answer: Answer, output: Output, row: int,
        node: int = 0, offered: Odds | None = None,
    ) -> int:  # fmt: skip
        answer.drawing.pick(output, row, node, offered)  # for its time
        text = by_prompt[name_of(answer.ids.tolist())]
        token = int(text[len(answer.ids) + answer.sequence.n_generated])
        answer.drawing.take(token)
        answer.drew(token)
        return token

    real = Answers.pick
    Answers.pick = pick  # type: ignore[method-assign]
    try:
        yield
    finally:
        Answers.pick = real  # type: ignore[method-assign]


def serve(engine: Engine, prompts: Sequence[list[int]], n_tokens: int) -> list[Client]:
    """Return clients of a new service that have got their answers."""
    service = Service(engine)
    service.start()
    try:
        clients = [Client(service, prompt, n_tokens) for prompt in prompts]
        return [client.wait() for client in clients]
    finally:
        service.close()


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("model", type=bench.model_path, help="a GGUF file with an MTP block")
    p.add_argument("--draft", default="", help="a DFlash file instead of the MTP block")
    p.add_argument("--clients", type=bench.positive, nargs="+", default=[1, 2, 4, 8])
    p.add_argument("--kind", default="code", choices=drafts.RATES)
    p.add_argument("--share", type=bench.share, default=100.0, metavar="PERCENT")
    p.add_argument("--tokens", type=bench.positive, default=192)
    p.add_argument("--depth", type=bench.positive, default=64, help="tokens of the prompts")
    p.add_argument("--samples", type=bench.positive, default=3)
    p.add_argument("--device", default="auto")
    p.add_argument("--threads", type=bench.positive)
    p.add_argument("--out", type=Path, help="append rows here, as JSON lines")
    return p


def settings(args: argparse.Namespace) -> EngineConfig:
    """Return the settings of the engine."""
    n_seq, each = max(args.clients), args.depth + args.tokens + 64
    config = EngineConfig(
        device=args.device, profile="none", n_draft=31, n_threads=args.threads, n_seq=n_seq,
        n_ctx=each * n_seq, spec="dflash" if args.draft else "mtp", draft=args.draft,
    )  # fmt: skip
    return drafts.with_share(config, args.model, args.share)


def measure(engine: Engine, config: EngineConfig, args: argparse.Namespace, n: int) -> Any:
    """Return the row of a number of clients; services with drafts and without take turns.

    The first one of each does not count, because graphs are built in it.

    Raises:
        BenchError: as in `rate`.
    """
    assert engine.speculation is not None
    own, drafters = engine.speculation, list(engine.speculation.drafters.values())
    rng = np.random.default_rng(n)
    prompts = rng.integers(0, engine.hparams.n_vocab, (n, args.depth)).tolist()
    try:
        engine.speculation = None
        answers = [client.tokens for client in serve(engine, prompts, args.tokens)]
        texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers)]
        told: list[Any] = [
            OfClient(d, args.kind, texts, engine.passes.held)
            for d in drafters
            if d.name != "lookup"
        ]
        engine.reset(0)  # what comes next computes over this sequence
        times = time_verify(
            engine.runner, first_widths(config, engine.runner), engine.threads.begin
        )
        timed = replace(config, spec="auto")
        scripted = open_speculation(told, timed, engine.runner, times)
        assert scripted is not None
        rates: dict[str, list[float]] = {"plain": [], "auto": []}
        for at, (name, found) in itertools.product(range(args.samples + 1), rates.items()):
            engine.speculation = scripted if name == "auto" else None
            with forced(texts):
                clients = serve(engine, prompts, args.tokens)
            if [client.tokens for client in clients] != answers:
                raise InternalError("a client got another text than was drawn for it")
            if at:
                found.append(rate(clients))
    finally:
        engine.speculation = own
    report = scripted.controller.stats.report()
    return {"clients": n, "kind": args.kind, "share": args.share, **rates, "drafts": report}


def compare(args: argparse.Namespace) -> None:
    """Measure each number of clients; print a table."""
    config = settings(args)
    print("| clients | plain, tok/s | auto, tok/s | over plain | tokens a step | drafted |\n"
          + "|---" * 6 + "|", flush=True)  # fmt: skip
    with Engine.load(args.model, config) as engine:
        for n in args.clients:
            row = measure(engine, config, args, n)
            plain, ours = (float(np.median(row[name])) for name in ("plain", "auto"))
            made = row["drafts"]
            print(f"| {n} | {plain:.1f} | {ours:.1f} | {ours / plain:.2f}x | "
                  f"{made['tokens_per_step']:.2f} | {made['chosen']} |", flush=True)  # fmt: skip
            bench.append_line(args.out, row)


def main() -> int:
    """Run the command line and return the exit code."""
    args = parser().parse_args()
    return bench.guarded("bench_drafts_clients.py", lambda: compare(args))


if __name__ == "__main__":
    sys.exit(main())
