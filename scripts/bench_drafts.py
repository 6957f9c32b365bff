#!/usr/bin/env python3
"""Measure drafting with acceptance by a script: no drafts, fixed drafts, and --spec auto.

Weights may be random: every draft and every pass costs what it costs, and the script says how many
drafted tokens are right, by what was measured of trained drafters for kinds of text. The text is
the model's own without drafts, whatever drafts it, so that all ways need the same experts. For each
limit of device memory, the speed without drafts is measured with an engine that has no drafter.
Rows go to stdout as JSON lines with --json.

Example:
    scripts/bench_drafts.py model.gguf --draft dflash.gguf --vram auto 14 7.7
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
import numpy as np
import numpy.typing as npt

from moegraph.config import EngineConfig
from moegraph.draft.drafter import Draft, Drafter, Race
from moegraph.draft.plan import Plan, Shape, Step
from moegraph.draft.scripted import ScriptedAccept
from moegraph.draft.stats import SpecStats
from moegraph.draft.watch import Watched
from moegraph.engine import Engine
from moegraph.engine.drafters import first_widths, open_speculation
from moegraph.engine.speculation import Controller
from moegraph.engine.warmup import time_verify
from moegraph.modelfile import open_model
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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def draft(self, slot: int, anchor: int, n: int, n_top: int, race: Race | None = None) -> Draft:
        """Return a draft of as many tokens as the drafter makes."""
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
    """A controller that notes which drafter the last plan names, because each has its script."""

    def __init__(self, controller: Controller, drafters: Sequence[Drafter]) -> None:
        self._controller = controller
        self._scripted = {one.name: one for one in drafters if isinstance(one, Scripted)}
        self._source = ""

    def begin(self) -> None:
        self._controller.begin()

    def choose(self, n_left: int, without: Collection[str] = ()) -> Plan:
        plan = self._controller.choose(n_left, without)
        self._source = plan.source or self._source
        return plan

    def choose_for(self, n_seqs: int, n_left: int, without: Collection[str] = ()) -> Plan:
        return self._controller.choose_for(n_seqs, n_left, without)

    def observe_shared(self, n_seqs: int, n_tokens: int, seconds: float, drafted: bool) -> None:
        self._controller.observe_shared(n_seqs, n_tokens, seconds, drafted)

    def shape(self, plan: Plan, draft: Draft) -> Shape:
        return self._controller.shape(plan, draft)

    def observe(self, step: Step) -> None:
        self._controller.observe(step)

    def observe_watched(self, watched: Watched) -> None:
        self._controller.observe_watched(watched)

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
    p.add_argument("model", help="a GGUF file, or the name of a shipped model")
    p.add_argument("--draft", default="", help="a DFlash or DSpark file")
    p.add_argument("--vram", nargs="+", default=["auto"], help="limits of device memory, in GiB")
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
    p.add_argument(
        "--draft-vocab", type=int, nargs="+", default=[0],
        help="drafts of so many tokens, one after the other; 0: of all; the script accepts as many",
    )  # fmt: skip
    p.add_argument("--json", action="store_true")
    p.add_argument("--out", type=Path, metavar="FILE", help="append rows here, as JSON lines")
    return p


def prompt(engine: Engine, args: argparse.Namespace) -> Ids:
    """Return the prompt of all texts."""
    rng = np.random.default_rng(1)
    ids: Ids = rng.integers(0, engine.hparams.n_vocab, args.depth, dtype=np.int32)
    return ids


def texts(engine: Engine, args: argparse.Namespace) -> tuple[list[float], list[int]]:
    """Return tokens a second of several texts, and the last of them with its prompt.

    The first text may build graphs.
    """
    found, text = [], list[int]()
    for _ in range(args.repeat + 1):
        tps, text = one_text(engine, args)
        found.append(tps)
    return found, text


def one_text(engine: Engine, args: argparse.Namespace) -> tuple[float, list[int]]:
    """Return the tokens a second of a text, and the text with its prompt."""
    ids = prompt(engine, args)
    events = [*engine.generate(
        ids, SamplingParams(temperature=0.0), args.tokens, ignore_eos=True, text=False
    )]  # fmt: skip
    return events[-1].decode_tps, [*ids.tolist(), *(e.token for e in events if e.token is not None)]


def row(engine: Engine, args: argparse.Namespace, **about: Any) -> dict[str, Any]:
    """Measure one way of drafting."""
    before = engine.spec_stats()
    (first, *samples), _ = texts(engine, args)
    after = engine.spec_stats()
    drafts = after.since(before).report() if after and before else None
    tps = statistics.median(samples)
    return {**about, "tps": tps, "first": first, "samples": samples, "drafts": drafts}


class Rows(list[dict[str, Any]]):
    """Rows that are written to a file as they come, if there is one."""

    def __init__(self, out: Path | None) -> None:
        super().__init__()
        self._out = out

    def append(self, one: dict[str, Any]) -> None:
        """Add a row."""
        super().append(one)
        if self._out:
            with self._out.open("a", encoding="utf-8") as file:
                file.write(bench.json_line(one))


def measure(vram: str, n_vocab: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one limit of memory. n_vocab: tokens that drafts are made of; 0: all."""
    config = EngineConfig(
        vram=vram, device=args.device, profile="none", draft_vocab=n_vocab,
        n_ctx=args.depth + args.tokens + 64, n_draft=15,
    )  # fmt: skip
    rows = Rows(args.out)
    with Engine.load(args.model, config) as engine:
        rows.append(row(engine, args, vram=vram, kind="", way="off", slots=slots(engine)))
        _, text = texts(engine, args)
    lengths = {"dflash": args.dflash if args.draft else [], "mtp": args.mtp, "auto": [0]}
    for source in [source for source, ns in lengths.items() if ns]:
        draft = args.draft if source != "mtp" else ""
        with Engine.load(args.model, drafting(config, source, draft)) as engine:
            if engine.speculation is None:
                print(f"{vram} GiB: {source} loads no drafter", file=sys.stderr)
                continue
            drafters = list(engine.speculation.drafters.values())
            more = {"vram": vram, "draft_vocab": n_vocab, "slots": slots(engine)}
            if source == "auto":
                use(engine, drafters, replace(config, spec="off"))
                rows.append(row(engine, args, **more, kind="", way="loaded, off"))
            for kind in args.kind:
                for n in lengths[source]:
                    use(engine, drafters, drafting(config, source, draft, n), kind, text)
                    way = f"{source} {n}" if n else source
                    rows.append(row(engine, args, **more, kind=kind, way=way))
    return rows


def even(row: dict[str, Any], plain_tps: float) -> str:
    """Return how often each token of a fixed draft must be right for the speed without drafts."""
    n, drafts = row["way"].partition(" ")[2], row["drafts"]
    if not n.isdigit():
        return ""
    step_s = drafts["tokens_per_step"] / row["tps"]
    needed = step_s * plain_tps  # tokens of a step that make up for its time
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        rate = (low + high) / 2
        is_enough = sum(rate**depth for depth in range(int(n) + 1)) > needed
        low, high = (low, rate) if is_enough else (rate, high)
    return f"  even at {high:.2f}"


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
) -> None:  # fmt: skip
    """Have an engine draft by other settings, with the acceptance of a kind of text.

    text: the prompt and the answer, of which the drafts are right or wrong.
    """
    engine.reset(0)  # what comes next computes over this sequence
    widths = first_widths(config, engine.runner.device.can.streams)
    times = time_verify(engine.runner, widths)
    if kind:
        told = [one for one in drafters if one.name != "lookup"]
        drafters = [Scripted(one, kind, text, lambda: len(engine.held(0))) for one in told]
    speculation = open_speculation(drafters, config, engine.runner, times)
    assert speculation is not None
    speculation.controller = by_plan = ByPlan(speculation.controller, drafters)
    speculation.accept = by_plan.accept
    engine.speculation = speculation


def slots(engine: Engine) -> float:
    """Return the share of the experts that have slots."""
    return round(engine.plan.resident_share, 3)


def main() -> int:
    """Measure all limits and print a table."""
    args = parser().parse_args()
    for vram, n_vocab in itertools.product(args.vram, args.draft_vocab):
        rows = measure(vram, n_vocab, args)
        if args.json:
            for one in rows:
                print(json.dumps(one), flush=True)
        off = rows[0]["tps"]
        of = f", drafts of {n_vocab} tokens" if n_vocab else ""
        share = f"{rows[0]['slots']:.0%} of the experts"
        print(f"{vram} GiB, {share}{of}: {off:.1f} tok/s without drafts")
        for one in rows[1:]:
            drafts = one["drafts"]
            print(
                f"  {one['kind']:10} {one['way']:12} {one['tps']:7.1f} tok/s"
                f" {one['tps'] / off:5.2f}x  first {one['first'] / off:.2f}x"
                f"  slots {one['slots']:.0%}"
                f"  {drafts['tokens_per_step']:.2f} a step, "
                f"ms {drafts['drafter_ms']:.2f} {drafts['verify_ms']:.2f} {drafts['commit_ms']:.2f}"
                f"  {drafts['plain_steps']} plain{even(one, off)}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
