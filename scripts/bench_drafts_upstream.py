#!/usr/bin/env python3
"""Measure drafting with acceptance by a script, beside llama-server's drafting on the same files.

llama-server accepts drafts by a script too (--spec-synth-rates), with the same rates by position as
scripts/bench_drafts.py. So passes and drafters of both sides cost what they cost, and equally many
tokens are right. What is accepted becomes llama-server's text, though, while ours stays the model's
own. Both sides are loaded and give texts in turn, one client, greedy; the first text of each does
not count. Which drafts are right is random on both sides: ours is what it would be if exactly the
stated rates had come true, and so is what stands beside llama-server's speed ("at rates").

Example:
    scripts/bench_drafts_upstream.py model.gguf --draft dflash.gguf \\
        --llama-server bin/llama-server --share 100 60 25 --ncmoe 0 16 30
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
import bench_drafts as drafts
from bench_server import free_port, served

from moegraph.config import EngineConfig
from moegraph.engine import Engine

# Drafted tokens of llama-server, by source: as many as rates are known for, and its usual ones.
LENGTHS = {"mtp": 3, "dflash": 7}
# The least time for another way, in seconds.
_LEAST_S = 10.0


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("model", type=bench.existing, help="a GGUF file with an MTP block")
    p.add_argument("--draft", type=bench.existing, help="a DFlash file")
    p.add_argument("--llama-server", type=bench.existing, required=True)
    p.add_argument("--theirs", default="-ngl 99 -fa on", metavar="OPTIONS", help="of llama-server")
    p.add_argument("--share", type=bench.share, nargs="+", default=[100.0], metavar="PERCENT")
    p.add_argument("--ncmoe", type=int, nargs="+", default=[0], help="for each --share")
    p.add_argument("--kind", nargs="+", default=["code", "structured"], choices=drafts.RATES)
    p.add_argument("--source", nargs="+", default=[*LENGTHS], choices=LENGTHS)
    p.add_argument("--tokens", type=bench.positive, default=256)
    p.add_argument("--depth", type=bench.positive, default=256, help="tokens of the prompt")
    p.add_argument("--samples", type=bench.positive, default=5)
    p.add_argument("--device", default="auto")
    p.add_argument("--threads", type=bench.positive)
    p.add_argument("--time-limit", type=float, default=0.0, metavar="SECONDS")
    p.add_argument("--out", type=Path, help="append rows here, as JSON lines")
    return p


def expected(rates: Sequence[float]) -> float:
    """Return the tokens of a step in which each position is accepted so often."""
    return 1.0 + sum(rates)


def command(args: argparse.Namespace, ncmoe: int, port: int, source: str, kind: str) -> list[str]:
    """Return the command of a llama-server; source: "" for one that does not draft."""
    n_ctx = args.depth + args.tokens + 64
    call = [args.llama_server, "-m", args.model, "--port", port, "-np", 1, "-c", n_ctx]
    call += [*args.theirs.split(), *(["-ncmoe", ncmoe] if ncmoe else [])]
    call += ["-t", args.threads] if args.threads else []
    if source:
        rates = drafts.RATES[kind][source][: LENGTHS[source]]
        call += ["--spec-type", f"draft-{source}", "--spec-draft-n-max", len(rates)]
        call += ["--spec-synth-rates", ",".join(map(str, rates))]
        call += ["-md", args.draft] if source == "dflash" else []
    return [str(word) for word in call]


def their_text(port: int, ids: drafts.Ids, n: int, seed: int) -> dict[str, float]:
    """Return tokens a second of a text of llama-server, and its tokens a step."""
    body = {
        "prompt": ids.tolist(), "n_predict": n, "temperature": 0, "seed": seed,
        "samplers": ["temperature"], "cache_prompt": False, "ignore_eos": True,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request(
        "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    report = json.loads(answer.read())
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"llama-server: {answer.status} {report}")
    times = report["timings"]
    n_tokens = times["predicted_n"] - 1  # the prompt's pass gives the first one
    n_steps = n_tokens - times.get("draft_n_accepted", 0)
    return {"tps": times["predicted_per_second"], "per_step": n_tokens / n_steps}


def compare(
    engine: Engine, args: argparse.Namespace, ncmoe: int, source: str, kind: str, ours: str
) -> dict[str, Any]:
    """Return both sides' samples of a way.

    ours: how our side drafts, which is set up already. source: "" if llama-server does not draft.
    """
    port, found = free_port(), []
    ids = drafts.prompt(engine, args)
    folder = str(args.llama_server.parent)
    path = os.pathsep.join(filter(None, [folder, os.environ.get("LD_LIBRARY_PATH")]))
    call = command(args, ncmoe, port, source, kind)
    with served(call, port, {**os.environ, "LD_LIBRARY_PATH": path}):
        for at in range(args.samples + 1):
            theirs = their_text(port, ids, args.tokens, at)
            tps, luck = drafts.text_and_luck(engine, args)
            found.append({"ours": tps, "luck": luck, **theirs})
    counted = found[1:]
    row: dict[str, Any] = {
        "way": ours, "theirs": source, "kind": kind, "ncmoe": ncmoe,
        "ours_tps": statistics.median(one["ours"] / one["luck"] for one in counted),
        "theirs_tps": statistics.median(one["tps"] for one in counted), "samples": found,
    }  # fmt: skip
    if source:
        exact = expected(drafts.RATES[kind][source][: LENGTHS[source]])
        row["theirs_at_rates"] = statistics.median(
            one["tps"] * exact / one["per_step"] for one in counted
        )
    return row


def ways(args: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Yield source and kind of llama-server, and how our side drafts at the same time."""
    yield "", "", "off"
    for kind in args.kind:
        for source in args.source:
            if source == "mtp" or args.draft:
                yield source, kind, source


def measure(args: argparse.Namespace, share: float, ncmoe: int, end: float) -> Iterator[Any]:
    """Yield the rows of a share of the experts, until the time is up.

    Raises:
        RuntimeError: llama-server does not come up without drafts.
    """
    config = EngineConfig(
        vram="auto", device=args.device, profile="none", n_draft=15, n_threads=args.threads,
        n_ctx=args.depth + args.tokens + 64,
    )  # fmt: skip
    config = drafts.with_share(config, args.model, share)
    draft = str(args.draft or "")
    spec = "auto" if len(args.source) > 1 else args.source[0]
    with Engine.load(args.model, drafts.drafting(config, spec, draft)) as engine:
        assert engine.speculation is not None
        drafters = list(engine.speculation.drafters.values())
        drafts.use(engine, drafters, replace(config, spec="off"))
        text = drafts.one_text(engine, args)[1]
        for source, kind, ours in ways(args):
            if time.monotonic() > end - _LEAST_S:
                print(f"no time for {share:g} % {ours} {kind}", flush=True)
                continue
            if source:
                mine = drafts.drafting(config, source, draft if source == "dflash" else "",
                                       LENGTHS[source])  # fmt: skip
                drafts.use(engine, drafters, mine, kind, text)
            try:
                yield {"share": share, **compare(engine, args, ncmoe, source, kind, ours)}
            except RuntimeError as error:  # the server does not come up, or says no
                if not source:
                    raise  # what it does without drafts is what all else is compared with
                print(f"{share:g} % {ours} {kind}: {error}", file=sys.stderr, flush=True)


def show(row: dict[str, Any], plain: dict[str, Any]) -> str:
    """Return a line of the table. plain: the row without drafts."""
    theirs = row.get("theirs_at_rates", row["theirs_tps"])
    return (
        f"| {row['share']:g} % | {row['kind'] or '-'} | {row['way']} | {row['ours_tps']:.1f} | "
        f"{row['ours_tps'] / plain['ours_tps']:.2f}x | {row['theirs_tps']:.1f} | {theirs:.1f} | "
        f"{theirs / plain['theirs_tps']:.2f}x | {row['ours_tps'] / theirs:.2f}x |"
    )


def main() -> int:
    """Measure all shares and print a table."""
    args = parser().parse_args()
    if len(args.ncmoe) != len(args.share):
        parser().error("--share and --ncmoe need as many values")
    end = time.monotonic() + (args.time_limit or float("inf"))
    print("| experts | text | drafts | ours, tok/s | over plain | llama-server, tok/s | at rates |"
          " over plain | ours over theirs |\n" + "|---" * 9 + "|", flush=True)  # fmt: skip
    for share, ncmoe in zip(args.share, args.ncmoe):
        try:
            table(args, measure(args, share, ncmoe, end))
        except RuntimeError as error:
            print(f"bench_drafts_upstream.py: {error}", file=sys.stderr)
            return 1
    return 0


def table(args: argparse.Namespace, rows: Iterator[dict[str, Any]]) -> None:
    """Print rows; the first is without drafts."""
    plain: dict[str, Any] = {}
    for row in rows:
        plain = plain or row
        print(show(row, plain), flush=True)
        bench.append_line(args.out, row)


if __name__ == "__main__":
    sys.exit(main())
