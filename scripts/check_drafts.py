#!/usr/bin/env python3
"""Check that text with drafts is the text without, in reference mode on the CPU.

Computes each text once without drafts and with every expert resident. Then it drafts the same
texts with each source, in each shape and at each residency. A line of the table says how many of
them are equal, token for token. The exit status is 1 if any is not, or if nothing was drafted.

Example:
    scripts/check_drafts.py tiny --spec lookup mtp --prompts 20 --tokens 1000
    scripts/check_drafts.py tiny --prompts 3 --shape chain rows6 ddtree --share 100 60 25
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench

from moegraph.arch import open_model
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.gguf import resolve_target
from moegraph.sampling import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
SHAPES: dict[str, dict[str, Any]] = {
    "free": {},
    "chain": {"draft_max": 4},
    "rows6": {"budget": 6},
    "ddtree": {"ddtree": True, "ddtree_budget": 22},
    "best": {"ddtree": True, "ddtree_budget": 12, "ddtree_no_chain_seed": True},
}


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("model", help="a GGUF file, or the name of a shipped model")
    p.add_argument("--draft", default="", help="a DFlash or DSpark file, for --spec dflash")
    p.add_argument("--spec", nargs="+", default=["lookup"], choices=("lookup", "mtp", "dflash"))
    p.add_argument("--prompts", type=bench.positive, default=3)
    p.add_argument("--prompt-tokens", type=bench.positive, default=200)
    p.add_argument("--tokens", type=bench.positive, default=200)
    p.add_argument("--shape", nargs="+", default=["free"], choices=SHAPES)
    p.add_argument("--share", type=bench.share, nargs="+", default=[100], help="slots, %%")
    p.add_argument("--temp", type=float, default=0.0, help="0: greedy")
    p.add_argument("--threads", type=int)
    p.add_argument(
        "--default-mode", action="store_true",
        help="not in reference mode: only count how many texts part; the exit status is 0",
    )  # fmt: skip
    return p


def prompts_of(engine: Engine, n: int, n_tokens: int) -> list[list[int]]:
    """Return pieces of this repository's code and documents; exit if none is long enough."""
    files = [*sorted(ROOT.glob("moegraph/*/*.py")), *sorted(ROOT.glob("docs/*.md"))]
    texts = [path.read_text(encoding="utf-8")[: 12 * n_tokens] for path in files]
    ids = [engine.tokenizer.encode(text)[:n_tokens] for text in texts]
    long = [one for one in ids if len(one) == n_tokens]
    if not long:
        raise SystemExit(f"no file here begins with {n_tokens} tokens; lower --prompt-tokens")
    return long[:: max(1, len(long) // n)][:n]


def config_of(args: argparse.Namespace, share: float, n_slots: int, **more: Any) -> EngineConfig:
    """Return the settings of an engine with slots for a share of the experts, in percent."""
    given: dict[str, Any] = {
        "device": "cpu", "cpu_reference": not args.default_mode, "profile": "none",
        "n_ctx": args.prompt_tokens + args.tokens, **more,
    }  # fmt: skip
    if args.threads:
        given["n_threads"] = args.threads
    if share < 100:
        given |= {"pin_layers": 0, "cache_slots": round(share / 100 * n_slots), "miss": "stream"}
    return EngineConfig(**given)


def texts_of(engine: Engine, prompts: list[list[int]], args: argparse.Namespace) -> list[list[int]]:
    """Return the generated ids after each prompt."""
    found = []
    for seed, ids in enumerate(prompts):
        params = SamplingParams(temperature=args.temp, seed=seed)
        events = engine.generate(ids, params, args.tokens, text=False, ignore_eos=True, reuse=False)
        found.append([event.token for event in events if event.token is not None])
    return found


def main() -> int:
    """Compare, and print a table."""
    args = parser().parse_args()
    with open_model(resolve_target(args.model)) as model:
        n_slots = model.hparams.n_layer * model.hparams.n_expert
    with Engine.load(args.model, config_of(args, 100, n_slots)) as engine:
        prompts = prompts_of(engine, args.prompts, args.prompt_tokens)
        plain = texts_of(engine, prompts, args)
    print("| source | shape | share | equal texts | tokens | tokens a step | seconds |")
    print("|---|---|---|---|---|---|---|")
    n_wrong = 0
    for spec in args.spec:
        for shape in args.shape:
            for share in args.share:
                n_wrong += compare(args, spec, shape, share, n_slots, prompts, plain)
    return 1 if n_wrong and not args.default_mode else 0


def compare(
    args: argparse.Namespace, spec: str, shape: str, share: float, n_slots: int,
    prompts: list[list[int]], plain: list[list[int]],
) -> int:  # fmt: skip
    """Draft all texts one way; print a line and return how many texts differ."""
    more = {"spec": spec, "draft": args.draft if spec == "dflash" else "", **SHAPES[shape]}
    begin = time.perf_counter()
    with Engine.load(args.model, config_of(args, share, n_slots, **more)) as engine:
        assert engine.speculation is not None
        drafted = texts_of(engine, prompts, args)
        stats = engine.speculation.controller.stats
        for line in engine.drain_messages():
            print(line, file=sys.stderr)
    n_wrong = wrong(plain, drafted, stats.steps)
    seconds = time.perf_counter() - begin
    rate = (stats.tokens + stats.plain_steps) / max(1, stats.steps + stats.plain_steps)
    print(
        f"| {spec} | {shape} | {share:g} | {len(plain) - n_wrong} of {len(plain)} | "
        f"{sum(map(len, plain))} | {rate:.2f} | {seconds:.0f} |",
        flush=True,
    )
    return n_wrong


def wrong(plain: list[list[int]], drafted: list[list[int]], n_steps: int) -> int:
    """Return how many texts differ: all, if no step drafted anything."""
    return sum(a != b or n_steps == 0 for a, b in zip(plain, drafted, strict=True))


if __name__ == "__main__":
    sys.exit(bench.guarded("check_drafts.py", main))
