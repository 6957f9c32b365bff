"""scripts/check_drafts.py: a tenth of what docs/drafting.md says it found for the shipped model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.shipped import ROOT, TINY_DFLASH, merged_tiny

# Of all sources: texts as long as documented, and short ones of each shape with experts missing.
TENTHS = {
    "long": ("--prompts", "2", "--tokens", "1000"),
    "grid": ("--prompts", "3", "--tokens", "20", "--share", "60", "25",
             "--shape", "chain", "rows6", "ddtree", "best"),
}  # fmt: skip
SOURCES = ("lookup", "mtp", "dflash")


@pytest.mark.parametrize("part", TENTHS)
def test_greedy_text_of_each_source_is_that_without_drafts(tmp_path: Path, part: str) -> None:
    command = [sys.executable, ROOT / "scripts" / "check_drafts.py", merged_tiny(tmp_path),
               "--draft", TINY_DFLASH, "--threads", "1", "--spec", *SOURCES]  # fmt: skip
    done = subprocess.run(
        [*command, *TENTHS[part]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines()[2:]]
    assert {row[0].strip("| ") for row in rows} == set(SOURCES)
    assert len(rows) == (3 if part == "long" else 24)
    # look-up drafts what is likely to be right, which is little in the first 20 tokens
    least = {"lookup": 1.0 if part == "grid" else 1.1}
    slow = [row for row in rows if float(row[5]) <= least.get(row[0].strip("| "), 1.1)]
    assert slow == [], "tokens a step"
