"""One opener process for the whole folder (see opener.py), whose helper modules are importable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Open = Callable[[Path], dict[str, Any]]
_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE))


@pytest.fixture(scope="session")
def open_in_child() -> Iterator[Open]:
    """Yield a function that opens a file in a limited child and returns how that ended."""
    path = os.pathsep.join(p for p in sys.path if p)
    with subprocess.Popen(
        [sys.executable, str(_HERE / "opener.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    ) as server:
        ask, answers = server.stdin, server.stdout
        assert ask is not None and answers is not None

        def run(target: Path) -> dict[str, Any]:
            ask.write(json.dumps(str(target)) + "\n")
            ask.flush()
            answer = answers.readline()
            assert answer, f"the opener ended with {server.wait(30)}"
            result: dict[str, Any] = json.loads(answer)
            return result

        yield run
