#!/usr/bin/env python3
"""Measure drafting with acceptance by a script: no drafts, fixed drafts, and --spec auto.

Weights may be random: every draft and every pass costs what it costs, and the script says how many
drafted tokens are right, by what was measured of trained drafters for kinds of text. The text is
the model's own without drafts, whatever drafts it, so that all ways need the same experts. For each
limit of device memory, one engine has all drafters, and each way writes a text in turn. Before and
after it, the speed without drafts is measured with an engine that has no drafter; the mean is what
all else is compared with.

Example:
    scripts/bench_drafts.py model.gguf --draft dflash.gguf --vram auto 14 7.7
"""

from __future__ import annotations

import argparse
import itertools
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
from moegraph.draft.drafter import Draft, Drafter, Race
from moegraph.draft.plan import Plan, Shape, Step
from moegraph.draft.stats import SpecStats
from moegraph.engine import Engine
from moegraph.engine.drafters import first_widths, open_speculation
from moegraph.engine.warmup import time_verify
from moegraph.passes.speculation import Controller, Speculation
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
        """Return a draft of as many tokens as the drafter makes."""
        return self.scripted(self._drafter.draft(slot, anchor, n, n_top, race))

    def scripted(self, draft: Draft) -> Draft:
        """Return a draft with the tokens of the script."""
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

    luck: the tokens that its steps gave over those that they give on average. n_text: tokens at
    which texts end.
    """

    def __init__(self, controller: Controller, drafters: Sequence[Drafter]) -> None:
        self._controller = controller
        self._scripted = {one.name: one for one in drafters if isinstance(one, Scripted)}
        self._source = ""
        self._given, self._expected = 0, 0.0
        self.n_text = sys.maxsize

    @property
    def luck(self) -> float:
        return self._given / self._expected if self._given else 1.0

    def begin(self) -> None:
        self._given, self._expected = 0, 0.0
        self._controller.begin()

    def choose(self, n_left: int, without: Collection[str] = ()) -> Plan:
        plan = self._controller.choose(n_left, without)
        self._source = plan.source or self._source
        return plan

    def choose_for(self, n_seqs: int, n_left: int, without: Collection[str] = ()) -> Plan:
        return self._controller.choose_for(n_seqs, n_left, without)

    def observe_shared(self, n_seqs: int, n_tokens: int, seconds: float, n_rows: int) -> None:
        self._controller.observe_shared(n_seqs, n_tokens, seconds, n_rows)

    def shape(self, plan: Plan, draft: Draft) -> Shape:
        return self._controller.shape(plan, draft)

    def observe(self, step: Step) -> None:
        self._controller.observe(step)
        drafter = self._scripted.get(step.source)
        n_spine = min(step.n_spine, self.n_text - self._given - 2)  # the prompt gave a token
        self._given += step.n_tokens
        self._expected += 1.0 + (drafter.expected(n_spine) if drafter else 0.0)

    @property
    def stats(self) -> SpecStats:
        """What was drafted so far."""
        return self._controller.stats

    def accept(self, n_spine: int) -> int:
        """Return how many tokens of a spine are accepted."""
        drafter = self._scripted.get(self._source)
        return min(drafter.n_right, n_spine) if drafter else 0


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("model", type=bench.model_path, help="a GGUF file, or a shipped model's name")
    p.add_argument("--draft", default="", help="a DFlash or DSpark file")
    p.add_argument("--vram", nargs="+", default=["auto"], help="limits of device memory, in GiB")
    p.add_argument(
        "--share", type=float, nargs="+", default=[100],
        help="percent of the experts that have slots, one after the other, whatever drafts",
    )  # fmt: skip
    p.add_argument("--kind", nargs="+", default=list(RATES), choices=RATES)
    for name, lengths in LENGTHS.items():
        p.add_argument(
            f"--{name}", nargs="*", type=bench.positive, default=lengths,
            help="lengths of drafts that are fixed; none: only auto drafts so",
        )  # fmt: skip
    p.add_argument("--tokens", type=bench.positive, default=192)
    p.add_argument("--depth", type=bench.positive, default=256, help="tokens of the prompt")
    p.add_argument("--repeat", type=bench.positive, default=3)
    p.add_argument("--device", default="auto")
    p.add_argument("--out", type=Path, metavar="FILE", help="append rows here, as JSON lines")
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


def row(
    found: Sequence[float], lucks: Sequence[float], drafts: dict[str, Any] | None, **about: Any
) -> dict[str, Any]:
    """Return the row of a way.

    found: tokens a second of its texts; the first may build graphs. lucks: see `ByPlan`; at_rates
    is what the speed would be without.
    """
    at_rates = [tps / luck for tps, luck in zip(found, lucks)]
    return {
        **about, "tps": statistics.median(found[1:]), "at_rates": statistics.median(at_rates[1:]),
        "first": found[0], "first_at_rates": at_rates[0], "samples": found[1:], "drafts": drafts,
    }  # fmt: skip


def measure(vram: str, share: float, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of one limit of memory. share: percent of the experts that have slots."""
    config = EngineConfig(
        vram=vram, device=args.device, profile="none", n_ctx=args.depth + args.tokens + 64,
        n_draft=15,
    )  # fmt: skip
    config = with_share(config, args.model, share)
    off, text = without_drafters(config, args)
    yield {"vram": vram, **off}
    with Engine.load(args.model, drafting(config, "auto", args.draft)) as engine:
        drafters = list(engine.speculation.drafters.values()) if engine.speculation else []
        if {one.name for one in drafters} <= {"lookup"}:
            print(f"{vram} GiB: by the plan, no drafter pays here", file=sys.stderr)
            return
        for kind in args.kind:
            ways = {"loaded, off": use(engine, drafters, replace(config, spec="off"))}
            for source in ("dflash", "mtp"):
                names = (source, "dspark") if source == "dflash" else (source,)
                mine = [one for one in drafters if one.name in names]
                for n in getattr(args, source) if mine else ():
                    settings = drafting(config, source, args.draft, n)
                    ways[f"{source} {n}"] = use(engine, mine, settings, kind, text)
            settings = drafting(config, "auto", args.draft)
            ways["auto"] = use(engine, drafters, settings, kind, text)
            yield from ({"vram": vram, **one} for one in in_turn(engine, ways, args, kind))
    yield {"vram": vram, **without_drafters(config, args)[0]}


def prompt(engine: Engine, args: argparse.Namespace) -> Ids:
    """Return the prompt of all texts."""
    n_vocab = engine.hparams.n_vocab
    ids: Ids = np.random.default_rng(1).integers(0, n_vocab, args.depth, dtype=np.int32)
    return ids


def without_drafters(
    config: EngineConfig, args: argparse.Namespace
) -> tuple[dict[str, Any], list[int]]:
    """Return the row of an engine that has no drafter, and a text with its prompt."""
    with Engine.load(args.model, config) as engine:
        ids = prompt(engine, args)
        found = [write(engine, ids, args.tokens) for _ in range(args.repeat + 1)]
        speeds = [tps for tps, _ in found]
        about = row(speeds, [1.0] * len(found), None, slots=slots(engine), kind="", way="off")
        return about, [*ids.tolist(), *found[-1][1]]


def in_turn(
    engine: Engine, ways: Mapping[str, Speculation], args: argparse.Namespace, kind: str
) -> list[dict[str, Any]]:
    """Return a row of each way; in each round, each writes a text."""
    controllers = {way: one.controller for way, one in ways.items()}
    before = {way: controller.stats for way, controller in controllers.items()}
    found: dict[str, list[float]] = {way: [] for way in ways}
    lucks: dict[str, list[float]] = {way: [] for way in ways}
    for _, way in turns(list(ways), args.repeat + 1):
        engine.speculation = ways[way]
        controller = controllers[way]
        assert isinstance(controller, ByPlan)
        controller.n_text = args.tokens
        found[way].append(write(engine, prompt(engine, args), args.tokens)[0])
        lucks[way].append(controller.luck)
    return [
        row(
            found[way], lucks[way], controller.stats.since(before[way]).report(),
            slots=slots(engine), kind=kind, way=way,
        )
        for way, controller in controllers.items()
    ]  # fmt: skip


def drafting(config: EngineConfig, spec: str, draft: str, n: int = 0) -> EngineConfig:
    """Return settings that draft n tokens with a source; 0: as many as it likes."""
    return replace(config, spec=spec, draft=draft, draft_max=n or None)


def with_share(config: EngineConfig, model: Path, percent: float) -> EngineConfig:
    """Return settings in which so many of the experts have slots, spread over all layers."""
    if percent == 100:
        return config
    file = open_model(model)
    hp = file.hparams
    file.close()
    n_slots = int(percent / 100 * hp.n_layer * hp.n_expert)
    return replace(config, pin_layers=0, cache_slots=n_slots)


def use(
    engine: Engine, drafters: Sequence[Drafter], config: EngineConfig, kind: str = "",
    text: Sequence[int] = (),
) -> Speculation:  # fmt: skip
    """Have an engine draft by other settings, with the acceptance of a kind of text.

    text: the prompt and the answer, of which the drafts are right or wrong. Return what drafts.
    """
    engine.reset(0)  # what comes next computes over this sequence
    widths = first_widths(config, engine.runner)
    times = time_verify(engine.runner, widths, engine.threads.begin)
    if kind:
        told = [one for one in drafters if one.name != "lookup"]
        drafters = [Scripted(one, kind, text, lambda: len(engine.held(0))) for one in told]
    speculation = open_speculation(drafters, config, engine.runner, times)
    assert speculation is not None
    speculation.controller = by_plan = ByPlan(speculation.controller, drafters)
    speculation.accept = by_plan.accept
    engine.speculation = speculation
    return speculation


def slots(engine: Engine) -> float:
    """Return the share of the experts that have slots."""
    return round(engine.plan.resident_share, 3)


def compare(args: argparse.Namespace) -> None:
    """Measure all limits and print a table."""
    for vram, share in itertools.product(args.vram, args.share):
        rows = []
        for one in measure(vram, share, args):
            rows.append(one)
            bench.append_line(args.out, one)
        off = statistics.mean(one["tps"] for one in rows if one["way"] == "off")
        experts = f"{rows[0]['slots']:.0%} of the experts"
        print(f"{vram} GiB, {experts}: {off:.1f} tok/s without drafts; others at the rates")
        for one in [one for one in rows if one["way"] != "off"]:
            drafts = one["drafts"]
            print(
                f"  {one['kind']:10} {one['way']:12} {one['at_rates']:7.1f} tok/s"
                f" {one['at_rates'] / off:5.3f}x  first {one['first_at_rates'] / off:.2f}x"
                f"  slots {one['slots']:.0%}"
                f"  {drafts['tokens_per_step']:.2f} a step, "
                f"ms {drafts['drafter_ms']:.2f} {drafts['verify_ms']:.2f} {drafts['commit_ms']:.2f}"
                f"  {drafts['plain_steps']} plain",
                flush=True,
            )


def main() -> int:
    """Run the command line and return the exit code."""
    args = parser().parse_args()
    return bench.guarded("bench_drafts.py", lambda: compare(args))


if __name__ == "__main__":
    sys.exit(main())
