"""From the start of a process to its first token."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from moegraph.cli import report as report_module
from moegraph.cli.report import StartTimes, process_age


def test_the_age_of_a_process_counts_from_its_start() -> None:
    code = (
        "import time; time.sleep(0.2)\n"
        "from moegraph.cli.report import process_age\n"
        "print(process_age())"
    )
    before = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.18 < float(done.stdout) < time.perf_counter() - before + 0.02


@pytest.mark.parametrize("text", [None, "", "1 (a b) c) S 1 2"])
def test_a_system_that_does_not_tell_when_a_process_began(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "stat").write_text(text)
    assert process_age(tmp_path / "stat") is None


def test_no_time_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def slow_age() -> float:
        clock[0] += 0.5  # a busy machine may stop a process anywhere
        return clock[0]

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(report_module, "process_age", slow_age)
    times = StartTimes()
    clock[0] += 1.0
    times.lap("load")
    times.token()
    found = times.report()
    assert found["process_s"] == 0.5 and found["load_s"] == 1.0 and found["first_token_s"] == 2.0
