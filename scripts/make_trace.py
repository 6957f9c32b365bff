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

import sys
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench

from moegraph.errors import MoegraphError
from moegraph.placement.generator import PRESETS, generate_trace
from moegraph.placement.identity import RouterShape
from moegraph.placement.trace import write_trace
from moegraph.placement.tracestats import trace_stats


def main() -> int:
    """Generate, write, and print the statistics."""
    parser = bench.Parser(__doc__)
    parser.add_argument("path", help="file to write")
    parser.add_argument("--preset", choices=PRESETS, default="sticky")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--used", type=int, default=8, help="experts of a layer that a token uses")
    parser.add_argument("--seed", type=int, default=0, help="seed of the imaginary model")
    parser.add_argument("--prompt", type=int, default=0, help="seed of the prompt that it reads")
    args = parser.parse_args()
    fields = {"n_layer": args.layers, "n_expert": args.experts, "n_expert_used": args.used}
    shape = RouterShape.from_fields({**fields, "model": ""})
    if shape is None or args.tokens < 1 or args.seed < 0 or args.prompt < 0:
        parser.error("sizes must be at least 1, and --used at most --experts")
    trace = generate_trace(shape, args.tokens, args.seed, args.prompt, PRESETS[args.preset])
    trace = replace(trace, source=f"{trace.source}, preset {args.preset}")
    try:
        write_trace(args.path, trace)
    except MoegraphError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(trace_stats(trace).line())
    print(f"sha256 {trace.sha256}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
