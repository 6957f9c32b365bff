#!/usr/bin/env python3
"""Print what cards of 8 to 24 GB hold of models of published shapes: the table of docs/models.md.

The simulator predicts it from the header of a file that scripts/modelgen describes. That file is
sparse: its weights are a hole.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _tools import ROOT
from modelgen.build import contents
from modelgen.gguf_write import write_gguf
from modelgen.presets import PRESETS

CARDS = {8: "rtx4060", 12: "rtx3060", 16: "rtx4060ti", 24: "desktop"}
MODELS = {
    "35b-a3b": "Qwen3.5-35B-A3B", "80b-a3b": "Qwen3-Next-80B-A3B", "30b-a3b": "Qwen3-30B-A3B",
    "glm-4.5-air": "GLM-4.5-Air", "glm-4.7-flash": "GLM-4.7-Flash",
    "gemma-4-26b-a4b": "Gemma-4-26B-A4B", "gpt-oss-20b": "gpt-oss-20b",
}  # fmt: skip


def header(preset: str, folder: Path) -> Path:
    """Write a preset's model without its weights."""
    path, one = folder / f"{preset}.gguf", PRESETS[preset]
    keys, tensors = contents(one.shape, one.mix)
    write_gguf(path, one.shape.arch, keys, [t.entry() for t in tensors.values()])
    return path


def cell(path: Path, size: int) -> tuple[str, int]:
    """Return what a card of so many GB holds, hits and reaches, and the bytes of copies."""
    command = [sys.executable, "-m", "moegraph", "plan", str(path), "--vram", str(size)]
    command += ["--machine", CARDS[size], "--json"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if b"without its experts needs" in found.stderr:
        return "-", 0
    found.check_returncode()
    (budget,) = json.loads(found.stdout)["budgets"]
    plan, predicted = budget["plan"], budget["predicted"]
    hits = f"{predicted['hit_rate']:.2f}".lstrip("0")
    text = f"{plan['resident_share']:.0%} {hits} {predicted['decode_tps']:.0f}"
    return text, int(plan["host_bytes"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("preset", nargs="*", default=list(MODELS), help="default: those of the page")
    with TemporaryDirectory() as folder:
        for preset in p.parse_args(argv).preset:
            path = header(preset, Path(folder))
            texts, copies = zip(*(cell(path, size) for size in CARDS))
            name, host = MODELS.get(preset, preset), f"{max(copies) / 2**30:.1f}"
            print(f"| {' | '.join((name, host, *texts))} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
