"""scripts/measure_card on the CPU: a small model, two quick parts, what it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = Path(__file__).resolve().parents[2] / "scripts" / "measure_card"


def measure(
    work: Path, *args: object, code: int = 0, **options: str
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "MEASURE_CARD_WORK": str(work / "card"), **options}
    done = subprocess.run(
        [sys.executable, str(MEASURE), *map(str, args)], cwd="/", env=env, check=False,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.long
def test_parts_run_once_and_their_figures_are_in_the_table(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "no model; run" in measure(tmp_path, "run", code=1).stderr
    measure(tmp_path, "model", "--preset", "mini")
    done = measure(tmp_path, "run", "lookup", "run", "--out", out)
    assert "| lookup | list, " in done.stdout and "% foretold: lookup over plain" in done.stdout
    assert "| run | run8 temperature 0.0 top_k 0 |" in done.stdout
    assert "mini.gguf" in done.stdout and "| tests | tests/cuda, many at a time |" in done.stdout
    assert {path.name for path in out.iterdir()} == {"results.jsonl", "log.txt", "table.md"}
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [(x["part"], x["state"]) for x in lines if "state" in x] == [
        ("run", "done"), ("lookup", "done"),
    ]  # fmt: skip
    assert str(tmp_path) not in lines[0]["card"].values(), "what is shown has no paths"
    again = measure(tmp_path, "run", "lookup", "run", "--out", out)
    assert "lookup: about" not in again.stderr, "both are done"
    table = measure(tmp_path, "table", out).stdout
    assert [row for row in table.splitlines() if row.startswith(("| lookup", "| run"))] == [
        row for row in again.stdout.splitlines() if row.startswith(("| lookup", "| run"))
    ]


def test_what_is_not_there_is_named_in_one_line(tmp_path: Path) -> None:
    said = measure(tmp_path, "run", "nothing", "--out", tmp_path / "out", code=1).stderr
    assert said.startswith("moegraph: no part nothing; there are page, targets, before, whole")
    pack = tmp_path / "none"
    assert f"{pack}: no such pack" in measure(tmp_path, "prepare", "--unpack", pack, code=1).stderr
