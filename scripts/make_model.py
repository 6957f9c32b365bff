#!/usr/bin/env python3
"""Write a synthetic GGUF file of any shape and quant mix; a seed fixes every byte."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from modelgen.build import write_model
from modelgen.presets import PRESETS
from modelgen.shape import shape_options


def parser() -> argparse.ArgumentParser:
    """Return the command line: a preset, changes to it, and the output file."""
    presets = "\n".join(f"  {name:10} {p.about}" for name, p in PRESETS.items())
    p = argparse.ArgumentParser(
        prog="make_model.py",
        description=__doc__,
        epilog=f"presets:\n{presets}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("output", type=Path, help="the .gguf file to write")
    p.add_argument("--preset", choices=PRESETS, default="35b-a3b", help="model to start from")
    p.add_argument("--mix", help="types, for example all=Q8_0,gate_up=Q4_K,down@0-3=Q6_K")
    p.add_argument("--seed", type=int, default=0, help="another seed gives other weights")
    p.add_argument("--splits", type=int, default=1, help="number of files")
    group = p.add_argument_group("hyper-parameters (default: the preset's)")
    for name, default, text in shape_options():
        kind: Any = (lambda text: text == "1") if isinstance(default, bool) else type(default)
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar="X", help=text)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args = parser().parse_args(argv)
    preset = PRESETS[args.preset]
    mix = preset.mix if args.mix is None else args.mix
    given = {name: getattr(args, name) for name, _, _ in shape_options()}
    shape = replace(preset.shape, **{name: x for name, x in given.items() if x is not None})
    start = time.monotonic()
    try:
        paths = write_model(args.output, shape, mix, args.seed, args.splits)
    except (OSError, ValueError) as e:
        print(f"make_model.py: {e}", file=sys.stderr)
        return 2
    seconds = time.monotonic() - start
    size = sum(path.stat().st_size for path in paths)
    print(f"{paths[0]}: {size / 1e9:.3f} GB in {seconds:.1f} s ({size / seconds / 1e9:.2f} GB/s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
