"""scripts/load_server.py: many clients at once, and no answer is lost or mixed with another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

ROOT = Path(__file__).resolve().parents[2]
# CI has some seconds of it; MOEGRAPH_LOAD_S asks for more.
SECONDS = os.environ.get("MOEGRAPH_LOAD_S", "10")


@pytest.mark.parametrize("mode", ["reference", "default"])
def test_no_answer_is_lost_or_mixed(mode: str) -> None:
    argv = ["tiny", "--device", "cpu", "-np", "5", "-c", "2048", "--clients", "12",
            "--requests", "10", "--seconds", SECONDS]  # fmt: skip
    if mode == "reference":
        argv.append("--reference")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "load_server.py", *argv, "--", "-t", "2"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=float(SECONDS) + 600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert json.loads(found["wrong"]) == []
    assert json.loads(found["requests"])["equal"] > 3
