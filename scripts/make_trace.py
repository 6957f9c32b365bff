#!/usr/bin/env python3
"""Write a generated routing trace: expert ids with the statistics of a real model's router.

Presets: sticky keeps choosing the same few experts; flat spreads its choices more; recorded has
the layers of the shipped model at any size, which spread theirs most. Prints the statistics and the
sha256 of the ids; `moegraph simulate` reads the file.

    scripts/make_trace.py routing.trace                        the 35B-A3B shape, 2048 tokens
    scripts/make_trace.py flat.trace --preset flat             more even routing
    scripts/make_trace.py other.trace --prompt 1               another prompt of the same model
    scripts/make_trace.py t --layers 12 --experts 32 --used 4  another shape
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench

from moegraph.placement.generator import PRESETS, generate_trace
from moegraph.placement.identity import RouterShape
from moegraph.placement.trace import trace_stats, write_trace


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.Parser(description=__doc__)
    p.add_argument("path", help="file to write")
    p.add_argument("--preset", choices=PRESETS, default="sticky")
    p.add_argument("--tokens", type=bench.positive, default=2048)
    p.add_argument("--layers", type=int, default=40)
    p.add_argument("--experts", type=int, default=256)
    p.add_argument("--used", type=int, default=8, help="experts of a layer that a token uses")
    p.add_argument("--seed", type=int, default=0, help="seed of the imaginary model")
    p.add_argument("--prompt", type=int, default=0, help="seed of the prompt that it reads")
    return p


def write(args: argparse.Namespace) -> None:
    """Generate, write, and print the statistics."""
    fields = {"n_layer": args.layers, "n_expert": args.experts, "n_expert_used": args.used}
    shape = RouterShape.from_fields({**fields, "model": ""})
    if shape is None or args.seed < 0 or args.prompt < 0:
        raise bench.BenchError("sizes must be at least 1, and --used at most --experts")
    trace = generate_trace(shape, args.tokens, args.seed, args.prompt, PRESETS[args.preset])
    trace = replace(trace, source=f"{trace.source}, preset {args.preset}")
    write_trace(args.path, trace)
    print(trace_stats(trace).line())
    print(f"sha256 {trace.sha256}")


if __name__ == "__main__":
    sys.exit(bench.main(parser(), write))
