#!/usr/bin/env python3
"""Check that as many drafted tokens are accepted as by llama.cpp's own server on the same files.

Continues pieces of this repository greedily on the CPU, in both programs, with chains of the same
length. Where the texts are equal, the sums of accepted tokens are compared. The exit status is 1 if
they differ by more than --limit, if no text is equal, or if nothing was accepted.

Example:
    scripts/check_accepted.py build/llama-server tiny-with-mtp.gguf --spec mtp --draft-max 3
    scripts/check_accepted.py build/llama-server moegraph/models/tiny.gguf --spec dflash \\
        --draft moegraph/models/tiny-dflash.gguf --draft-max 4
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
from bench_server import free_port, served, with_libraries
from check_drafts import prompts_of

from moegraph.arch.draftfile import open_drafter
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.sampling import SamplingParams

# The tokens of a text, tokens drafted, and tokens accepted.
Result = tuple[list[int], int, int]


def parser() -> Any:
    """Return the command line."""
    p = bench.Parser(__doc__)
    p.add_argument("server", type=bench.existing, help="llama-server")
    p.add_argument("model", type=bench.existing, help="a GGUF file")
    p.add_argument("--spec", required=True, choices=("mtp", "dflash"))
    p.add_argument("--draft", type=bench.existing, help="a DFlash or DSpark file")
    p.add_argument("--draft-max", type=bench.positive, default=3)
    p.add_argument("--prompts", type=bench.positive, default=8)
    p.add_argument("--prompt-tokens", type=bench.positive, default=100)
    p.add_argument("--tokens", type=bench.positive, default=100)
    p.add_argument("--limit", type=float, default=0.05, help="largest difference, a share")
    return p


def run_ours(args: Any) -> tuple[list[list[int]], list[Result]]:
    """Return the prompts, and what this program drafts after each."""
    config = EngineConfig(
        device="cpu", n_threads=1, n_ctx=args.prompt_tokens + args.tokens + 64, profile="none",
        spec=args.spec, draft_max=args.draft_max, draft=str(args.draft or ""),
    )  # fmt: skip
    found: list[Result] = []
    with Engine.load(args.model, config) as engine:
        prompts = prompts_of(engine, args.prompts, args.prompt_tokens)
        for ids in prompts:
            before = engine.spec_stats()
            events = engine.generate(
                ids, SamplingParams(temperature=0), args.tokens, text=False, ignore_eos=True
            )
            tokens = [event.token for event in events if event.token is not None]
            stats = engine.spec_stats()
            assert stats is not None and before is not None
            more = stats.since(before)
            found.append((tokens, more.drafted, more.accepted))
    return prompts, found


def call_of(args: Any, port: int) -> list[str]:
    """Return the server's command."""
    kind = args.spec
    if args.draft:
        file = open_drafter(args.draft)
        kind = file.hparams.name
        file.close()
    n_ctx = args.prompt_tokens + args.tokens + 64
    call = [args.server, "-m", args.model, "-c", n_ctx, "-t", 1, "-np", 1, "--port", port,
            "--spec-type", f"draft-{kind}", "--spec-draft-n-max", args.draft_max]  # fmt: skip
    call += ["-md", args.draft] if args.draft else []
    return [str(word) for word in call]


def run_theirs(args: Any, prompts: Sequence[Sequence[int]]) -> list[Result]:
    """Return what the server drafts after each prompt."""
    found: list[Result] = []
    port = free_port()
    with served(call_of(args, port), port, with_libraries(args.server)):
        for ids in prompts:
            body = {
                "prompt": list(map(int, ids)), "n_predict": args.tokens, "temperature": 0,
                "samplers": ["temperature"], "cache_prompt": False, "ignore_eos": True,
                "return_tokens": True,
            }  # fmt: skip
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )  # fmt: skip
            with urllib.request.urlopen(request, timeout=600) as answer:
                body = json.load(answer)
            times = body["timings"]
            # it names no drafts where it made none
            drafted, accepted = times.get("draft_n", 0), times.get("draft_n_accepted", 0)
            found.append((body["tokens"], drafted, accepted))
    return found


def main() -> int:
    """Compare, and print a table."""
    args = parser().parse_args()
    prompts, ours = run_ours(args)
    try:
        theirs = run_theirs(args, prompts)
    except (RuntimeError, OSError) as error:  # it does not come up, or says no
        raise SystemExit(f"check_accepted.py: {error}") from None
    return report(ours, theirs, args.limit)


def report(ours: Sequence[Result], theirs: Sequence[Result], limit: float) -> int:
    """Print the table; return the exit status."""
    equal = [(a, b) for a, b in zip(ours, theirs) if a[0] == b[0]]
    print("| | drafted | accepted |\n|---|---|---|")
    for name, side in (("moegraph", 0), ("llama.cpp", 1)):
        drafted, accepted = (pair[side][1] for pair in equal), (pair[side][2] for pair in equal)
        print(f"| {name} | {sum(drafted)} | {sum(accepted)} |")
    print(f"\n{len(equal)} of {len(ours)} texts are equal; the table is of these.")
    sums = [sum(pair[side][2] for pair in equal) for side in (0, 1)]
    return 0 if all(sums) and abs(sums[0] - sums[1]) <= limit * max(sums) else 1


if __name__ == "__main__":
    raise SystemExit(main())
