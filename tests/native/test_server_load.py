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
# A minute of it in reference mode, where every answer must be that of the request alone; with one
# thread, as another process runs tests meanwhile. MOEGRAPH_LOAD_S asks for other times.
SECONDS = os.environ.get("MOEGRAPH_LOAD_S")


@pytest.mark.parametrize(
    ("mode", "seconds", "n_clients", "n_slots"), [("reference", 60, 32, 8), ("default", 10, 12, 5)]
)
def test_no_answer_is_lost_or_mixed(mode: str, seconds: int, n_clients: int, n_slots: int) -> None:
    argv = ["tiny", "--device", "cpu", "-np", str(n_slots), "-c", "2048", "--clients",
            str(n_clients), "--requests", "10", "--seconds", SECONDS or str(seconds)]  # fmt: skip
    if mode == "reference":
        argv.append("--reference")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "load_server.py", *argv, "--", "-t", "1"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=float(SECONDS or seconds) + 600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert json.loads(found["wrong"]) == []
    assert json.loads(found["requests"])["equal"] > 3
