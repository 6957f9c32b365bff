#!/usr/bin/env python3
"""Measure drafting with acceptance by a script: no drafts, fixed drafts, and --spec auto.

Weights may be random: every draft and every pass costs what it costs, and the script says how many
drafted tokens are right, by what was measured of trained drafters for kinds of text. The text is
the model's own without drafts, whatever drafts it, so that all ways need the same experts. One
engine has all drafters, and each way writes a text in turn. Before and after, the speed without
drafts is measured with an engine that has no drafter; the mean is what all else is compared with.

Example:
    scripts/bench_drafts.py model.gguf --draft dflash.gguf --vram 14
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
import numpy as np
import numpy.typing as npt

from moegraph.arch import open_model
from moegraph.bench.scripted import ScriptedAccept
from moegraph.config import EngineConfig
from moegraph.draft.controller import Controller
from moegraph.draft.drafter import Draft, Drafter, Race
from moegraph.draft.plan import Plan, Step
from moegraph.engine import Engine
from moegraph.engine.drafters import first_widths, open_speculation
from moegraph.engine.warmup import time_verify
from moegraph.passes.speculation import Speculation
from moegraph.sampling import SamplingParams

# How often the token at each position is accepted, by kind of text and drafter: fitted to tokens a
# round that were published for a 35B-A3B with its MTP block (3 tokens) and a DFlash (7 tokens).
RATES = {
    "code": {"mtp": (0.85, 0.72, 0.58), "dflash": (0.80, 0.62, 0.48, 0.38, 0.30, 0.24, 0.19)},
    "structured": {
        "mtp": (0.95, 0.88, 0.80), "dflash": (0.93, 0.84, 0.75, 0.66, 0.57, 0.49, 0.42),
    },
    "story": {"mtp": (0.62, 0.34, 0.19), "dflash": (0.50, 0.20, 0.08, 0.04, 0.02, 0.01, 0.0)},
    "hopeless": {"mtp": (0.25, 0.05, 0.01), "dflash": (0.20, 0.04, 0.01, 0.0)},
}  # fmt: skip
# How far from its place in the text a wrong token is taken.
_ELSEWHERE = 41
LENGTHS = {"mtp": [1, 2, 3, 4, 6], "dflash": [3, 5, 7, 11, 15]}


Ids = npt.NDArray[np.int32]


class Scripted:
    """A drafter that takes the time it takes, and whose drafts are right by a script.

    Of the tokens of a draft, the first wrong one is another one of the text, and the others are
    those of the text. n_right: how many of the last draft are right before the first wrong one.
    """

    def __init__(
        self, drafter: Drafter, kind: str, text: Sequence[int], held: Callable[[], int]
    ) -> None:
        """text: the prompt and the answer. held: returns how many tokens the sequence holds."""
        self._drafter, self._text, self._held = drafter, np.asarray(text, np.int32), held
        self._script = ScriptedAccept(RATES[kind]["mtp" if drafter.name == "mtp" else "dflash"])
        self.n_right = 0
        self.expected = self._script.expected

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def draft(self, slot: int, anchor: int, n: int, n_top: int, race: Race | None = None) -> Draft:
        """Return a draft of as many tokens as the drafter makes, with those of the script."""
        draft = self._drafter.draft(slot, anchor, n, n_top, race)
        tokens, at = draft.tokens.copy(), self._held() + 1
        self.n_right = self._script(draft.n_depth)
        for depth in range(draft.n_depth):
            place = at + depth if depth != self.n_right else at + depth + _ELSEWHERE
            token = self._text[place % len(self._text)]
            tokens[depth, tokens[depth] == token] = tokens[depth, 0]
            tokens[depth, 0] = token
        return replace(draft, tokens=tokens)


class ByPlan:
    """A controller that notes which drafter the last plan names, because each has its script.

    Luck: the tokens that its steps gave over those that they give on average. n_text: tokens at
    which texts end.
    """

    def __init__(self, controller: Controller, drafters: Sequence[Drafter], n_text: int) -> None:
        self._controller, self._n_text = controller, n_text
        self._scripted = {one.name: one for one in drafters if isinstance(one, Scripted)}
        self._source = ""
        self._given, self._expected = 0, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._controller, name)

    def take_luck(self) -> float:
        """Return the luck of a text that has ended; another one begins."""
        luck = self._given / self._expected if self._given else 1.0
        self._given, self._expected = 0, 0.0
        return luck

    def choose(self, n_left: int, without: Collection[str] = ()) -> Plan:
        plan = self._controller.choose(n_left, without)
        self._source = plan.source or self._source
        return plan

    def observe(self, step: Step) -> None:
        self._controller.observe(step)
        drafter = self._scripted.get(step.source)
        n_spine = min(step.n_spine, self._n_text - self._given - 2)  # the prompt gave a token
        self._given += step.n_tokens
        self._expected += 1.0 + (drafter.expected(n_spine) if drafter else 0.0)

    def accept(self, n_spine: int) -> int:
        """Return how many tokens of a spine are accepted."""
        drafter = self._scripted.get(self._source)
        return min(drafter.n_right, n_spine) if drafter else 0


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.bench_parser(__doc__)
    p.add_argument("--draft", default="", help="a DFlash or DSpark file")
    p.add_argument("--vram", default="auto", help="limit of device memory, in GiB")
    p.add_argument("--share", type=float, help="percent of the experts that have slots")
    p.add_argument("--kind", nargs="+", default=list(RATES), choices=RATES)
    for name, lengths in LENGTHS.items():
        p.add_argument(
            f"--{name}", nargs="*", type=bench.positive, default=lengths,
            help="lengths of drafts that are fixed; none: only auto drafts so",
        )  # fmt: skip
    p.add_argument("--tokens", type=bench.positive, default=192)
    p.add_argument("--depth", type=bench.positive, default=256, help="tokens of the prompt")
    p.add_argument("--repeat", type=bench.positive, default=3)
    return p


def write(engine: Engine, ids: Ids, n: int) -> tuple[float, list[int]]:
    """Return the tokens a second of a text of n tokens, and the text."""
    events = [*engine.generate(
        ids, SamplingParams(temperature=0.0), n, ignore_eos=True, text=False
    )]  # fmt: skip
    return events[-1].decode_tps, [event.token for event in events if event.token is not None]


def turns(ways: Sequence[str], n_rounds: int) -> Iterator[tuple[int, str]]:
    """Yield number of the round and way: in each round each has its turn, another one begins."""
    for at in range(n_rounds):
        for i in range(len(ways)):
            yield at, ways[(at + i) % len(ways)]


def row(engine: Engine, found: Sequence[float], lucks: Sequence[float], **about: Any) -> bench.Line:
    """Return the row of a way.

    found: tokens a second of its texts; the first may build graphs. lucks: see `ByPlan`; at_rates
    is what the speed would be without.
    """
    at_rates = [tps / luck for tps, luck in zip(found, lucks)]
    return {
        **about, "slots": round(engine.plan.resident_share, 3),
        "tps": statistics.median(found[1:]), "at_rates": statistics.median(at_rates[1:]),
        "samples": found[1:],
    }  # fmt: skip


def measure(args: argparse.Namespace) -> Iterator[bench.Line]:
    """Yield the row of each way for each kind of text."""
    config = EngineConfig(
        vram=args.vram, device=args.device, profile="none", n_ctx=args.depth + args.tokens + 64,
        n_draft=15,
    )  # fmt: skip
    if args.share is not None:
        with open_model(args.model) as file:
            n_all = file.hparams.n_layer * file.hparams.n_expert
        config = replace(config, pin_layers=0, cache_slots=int(args.share / 100 * n_all))
    off, text = without_drafters(config, args)
    yield off
    config = replace(config, spec="auto", draft=args.draft)
    with Engine.load(args.model, config) as engine:
        drafters = list(engine.speculation.drafters.values()) if engine.speculation else []
        if {one.name for one in drafters} <= {"lookup"}:
            raise bench.BenchError("by the plan, no drafter pays here")
        for kind in args.kind:
            told = [
                Scripted(one, kind, text, lambda: len(engine.held(0)))
                for one in drafters if one.name != "lookup"
            ]  # fmt: skip
            off_config = replace(config, spec="off", draft="")
            ways = {"loaded, off": use(engine, drafters, off_config, args.tokens)}
            for source in LENGTHS:
                names = (source, "dspark") if source == "dflash" else (source,)
                mine = [one for one in told if one.name in names]
                for n in getattr(args, source) if mine else ():
                    fixed = replace(config, spec=source, draft_max=n)
                    ways[f"{source} {n}"] = use(engine, mine, fixed, args.tokens)
            ways["auto"] = use(engine, told, config, args.tokens)
            yield from in_turn(engine, ways, args, kind)
    yield without_drafters(config, args)[0]


def prompt(engine: Engine, args: argparse.Namespace) -> Ids:
    """Return the prompt of all texts."""
    n_vocab = engine.hparams.n_vocab
    ids: Ids = np.random.default_rng(1).integers(0, n_vocab, args.depth, dtype=np.int32)
    return ids


def without_drafters(
    config: EngineConfig, args: argparse.Namespace
) -> tuple[bench.Line, list[int]]:
    """Return the row of an engine that has no drafter, and a text with its prompt."""
    with Engine.load(args.model, replace(config, spec="off", draft="")) as engine:
        ids = prompt(engine, args)
        found = [write(engine, ids, args.tokens) for _ in range(args.repeat + 1)]
        about = row(engine, [tps for tps, _ in found], [1.0] * len(found), kind="", way="off")
        return about, [*ids.tolist(), *found[-1][1]]


def in_turn(
    engine: Engine, ways: Mapping[str, Speculation], args: argparse.Namespace, kind: str
) -> Iterator[bench.Line]:
    """Yield a row of each way; in each round, each writes a text."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    lucks: dict[str, list[float]] = {way: [] for way in ways}
    for _, way in turns(list(ways), args.repeat + 1):
        engine.speculation = ways[way]
        found[way].append(write(engine, prompt(engine, args), args.tokens)[0])
        controller: Any = ways[way].controller
        lucks[way].append(controller.take_luck())
    for way, one in ways.items():
        drafts = one.controller.stats.report()
        yield row(engine, found[way], lucks[way], drafts=drafts, kind=kind, way=way)


def drafting(engine: Engine, drafters: Sequence[Drafter], config: EngineConfig) -> Speculation:
    """Return what drafts by other settings than those with which an engine was loaded."""
    engine.reset(0)  # what comes next computes over this sequence
    widths = first_widths(config, engine.runner)
    times = time_verify(engine.runner, widths, engine.threads.begin)
    speculation = open_speculation(drafters, config, engine.runner, times)
    assert speculation is not None
    return speculation


def use(engine: Engine, drafters: Sequence[Any], config: EngineConfig, n_text: int) -> Speculation:
    """Return what drafts by other settings, with the acceptance of scripted drafters."""
    speculation = drafting(engine, drafters, config)
    by_plan: Any = ByPlan(speculation.controller, drafters, n_text)
    speculation.controller = by_plan
    speculation.accept = by_plan.accept
    return speculation


def compare(args: argparse.Namespace) -> None:
    """Measure and print a table."""
    rows = []
    for one in measure(args):
        rows.append(one)
        bench.append_line(args.out, one)
    off = statistics.mean(one["tps"] for one in rows if one["way"] == "off")
    print(f"{rows[0]['slots']:.0%} of the experts: {off:.1f} tok/s without drafts")
    for one in [one for one in rows if one["way"] != "off"]:
        print(
            f"  {one['kind']:10} {one['way']:12} {one['at_rates']:7.1f} tok/s"
            f" {one['at_rates'] / off:5.3f}x  {one['drafts']['tokens_per_step']:.2f} a step"
        )


if __name__ == "__main__":
    sys.exit(bench.main(parser(), compare))
