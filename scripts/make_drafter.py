#!/usr/bin/env python3
"""Write a synthetic DFlash or DSpark drafter of a published shape; a seed fixes every byte."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from modelgen.drafter import FORMATS, PRESETS, write_drafter


def main() -> int:
    """Run the command line and return the exit code."""
    p = argparse.ArgumentParser(prog="make_drafter.py", description=__doc__)
    p.add_argument("output", type=Path, help="the .gguf or .safetensors file to write")
    p.add_argument("--preset", choices=PRESETS, default="35b-current")
    p.add_argument("--format", choices=FORMATS, default="dflash")
    p.add_argument("--type", choices=("BF16", "F16", "F32", "Q8_0"), default="BF16")
    p.add_argument("--seed", type=int, default=0, help="another seed gives other weights")
    args = p.parse_args()
    try:
        write_drafter(args.output, PRESETS[args.preset], args.format, args.type, args.seed)
    except OSError as e:
        print(f"make_drafter.py: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
