"""scripts/bench_kernels.py times all it lists; on the CPU the figures mean nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_kernels.py"


def test_every_pair_is_timed() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--device", "cpu", "--repeat", "1"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    title, *rows = done.stdout.splitlines()
    assert title.endswith("median of 1 runs, us")
    assert [len(re.findall(r"\d+\.\d", row)) for row in rows] == [2, 2, 2, 3]
