"""How long the program takes to begin, in CPU time, and what it does not import for that."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
RUN = tuple("run tiny -p word -n 1 --temp 0 --device cpu -t 1".split())
VERSION = ("--version",)
# Work of another kind, and the CPU seconds that it takes where the limits were set.
OTHER = (
    "import asyncio, doctest, http.server, multiprocessing, sqlite3, unittest.mock, xml.dom.minidom"
)
OTHER_S = 0.10
# Packages of the server, of downloads and of colours.
HEAVY = {"asyncio", "fsspec", "h11", "httpx", "httpx2", "huggingface_hub", "jinja2", "llguidance"}
HEAVY |= {"multiprocessing", "prometheus_client", "pydantic", "pygments", "requests", "rich"}
HEAVY |= {"sqlite3", "starlette", "uvicorn", "yaml"}


def run(*args: str, cache: Path) -> tuple[float, str]:
    """Run Python; return the seconds of user and system, and what it writes to stderr.

    cache: folder of bytecode, which an installation has. The environment may forbid to write it. A
    card is hidden: how long its driver takes to begin is not ours.
    """
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(cache)}
    env["CUDA_VISIBLE_DEVICES"] = ""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, *args]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    total = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return total, done.stderr


@pytest.mark.parametrize(
    "args, limit_s, unwanted",
    [(VERSION, 0.15, HEAVY | {"numpy", "gguf", "llama_cpp", "subprocess"}), (RUN, 0.6, HEAVY)],
    ids=["version", "run-tiny"],
)
def test_the_program_begins_soon(
    tmp_path: Path, args: tuple[str, ...], limit_s: float, unwanted: set[str]
) -> None:
    """The whole process counts, which is more than what comes before its first token.

    On a machine that is slower, or whose processor is shared, other work takes longer too, and
    the limit grows with that.
    """
    command = ["-m", "moegraph", *args]
    _, said = run("-X", "importtime", *command, cache=tmp_path)
    imported = re.findall(r"^import time:.*\| +(\S+)$", said, re.M)
    assert "moegraph" in imported
    assert not {name.partition(".")[0] for name in imported} & unwanted
    run("-c", OTHER, cache=tmp_path)
    pairs = [
        (run(*command, cache=tmp_path)[0], run("-c", OTHER, cache=tmp_path)[0]) for _ in range(5)
    ]
    ours, other = (min(times) for times in zip(*pairs, strict=True))
    assert ours < limit_s * max(1.0, other / OTHER_S), pairs
