"""From the start of a process to its first token."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from moegraph.cli.report import process_age


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
