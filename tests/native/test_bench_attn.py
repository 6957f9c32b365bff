"""scripts/bench_attn.py times all it lists; on the CPU the figures mean nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_attn.py"


def test_every_shape_is_timed() -> None:
    small = ["--device", "cpu", "--repeat", "1", "--cache", "1", "--heads", "64", "4", "2"]
    shapes = ["--depth", "100", "300", "--rows", "1", "16", "--types", "f16", "q8_0/q4_0"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *small, *shapes], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    title, header, *rows = done.stdout.splitlines()
    assert title.endswith("median of 1 runs, us") and header.startswith("types")
    found = [re.match(r"(\S+)\s+(\d+)\s+(\d+)\s+(\d+)(\s+\d+\.\d+){3} \(", row) for row in rows]
    assert [row and row.groups()[:4] for row in found] == [
        (types, seqs, depth, n_rows)
        for types in ("f16/f16", "q8_0/q4_0")
        for seqs, widths in (("1", ("1", "16")), ("16", ("16",)))
        for depth in ("100", "300")
        for n_rows in widths
    ]
