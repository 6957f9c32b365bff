"""scripts/load_server.py: many clients at once, and no answer is lost or mixed with another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.patience import PATIENCE_S

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from load_server import Said

# A minute of it in reference mode, where every answer must be that of the request alone; with one
# thread, as another process runs tests meanwhile. MOEGRAPH_LOAD_S asks for other times. What grows
# while graphs are built is no leak, and a busy machine may build most of them late.
SECONDS = os.environ.get("MOEGRAPH_LOAD_S")


@pytest.mark.parametrize(
    ("mode", "seconds", "n_clients", "n_slots"), [("reference", 60, 32, 8), ("default", 10, 12, 5)]
)
def test_no_answer_is_lost_or_mixed(mode: str, seconds: int, n_clients: int, n_slots: int) -> None:
    argv = ["tiny", "--device", "cpu", "-np", str(n_slots), "-c", "2048", "--clients",
            str(n_clients), "--requests", "10", "--seconds", SECONDS or str(seconds)]  # fmt: skip
    if not SECONDS:
        argv += ["--grows", "128" if mode == "reference" else "200"]
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


@pytest.mark.parametrize("n_lines", [1, 20_000])
def test_a_server_that_says_much_is_not_stopped_by_it(n_lines: int) -> None:
    code = "import sys; print('served at http://x', 'line\\n' * int(sys.argv[1]), sep='\\n', "
    command = [sys.executable, "-c", code + "file=sys.stderr)", str(n_lines)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said = Said(server)
    assert said.address() == "http://x"
    assert server.wait(PATIENCE_S) == 0 and said.rest().count("line") == n_lines


def test_a_server_that_does_not_start_has_no_address(capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said = Said(server)
    assert said.address() == "" and server.wait(PATIENCE_S) == 1 and said.rest() == ""
    assert "no such model" in capfd.readouterr().err
