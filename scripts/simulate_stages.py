#!/usr/bin/env python3
"""Print what several devices or machines in a row do to the speed of answers, by simulation.

    scripts/simulate_stages.py --token-ms 2.334 --hop-us 30 --hop-us 300

A hop is the time from the end of a stage to the beginning of the next: 50 us or more between two
cards of a machine (two H200), and 100 us or more between machines.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moegraph.placement.pipeline import throughput

# F32 rows of a model of 2,048 dimensions.
_ROW_BYTES = 4 * 2048


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--token-ms", type=float, default=2.334, help="a token on one device")
    parser.add_argument("--hop-us", type=float, action="append")
    parser.add_argument("--stages", type=int, nargs="*", default=[1, 2, 4, 10])
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 8, 32, 128])
    args = parser.parse_args()
    print("| hop | stages | " + " | ".join(f"{n} sequences" for n in args.sequences) + " | MB/s |")
    print("|" + "---|" * (len(args.sequences) + 3))
    for hop_us in args.hop_us or [30.0, 300.0]:
        for n in args.stages:
            cells, rate = [], 0.0
            for n_seq in args.sequences:
                found = throughput([args.token_ms / 1e3 / n] * n, hop_us / 1e6 * (n > 1), n_seq)
                cells.append(f"{found.tokens_per_s:,.0f} ({found.n_groups}, {found.busy:.0%})")
                rate = found.tokens_per_s * _ROW_BYTES / 1e6 if n > 1 else 0.0
            print(f"| {hop_us:g} us | {n} | " + " | ".join(cells) + f" | {rate:.1f} |")


if __name__ == "__main__":
    main()
