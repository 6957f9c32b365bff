"""How ggml's threads wait for each other: asleep where there are few CPUs, else as libgomp does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LOAD = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
before = dict(os.environ)
import moegraph.ggml.lib
assert dict(os.environ) == before, "child processes would inherit it"
"""


def settings(**given: str) -> dict[str, str]:
    """Load the libraries in a child process on one CPU; return what libgomp says it was set to."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    child = subprocess.run(
        [sys.executable, "-c", LOAD], env={**env, "OMP_DISPLAY_ENV": "verbose", **given},
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    pairs = (line.split("=", 1) for line in child.stderr.splitlines() if "=" in line)
    return {name.split()[-1]: value.strip(" '") for name, value in pairs}


def test_threads_sleep_while_they_wait_on_few_cpus() -> None:
    found = settings()
    if not found:
        pytest.skip("ggml was built without OpenMP")
    assert (found["OMP_WAIT_POLICY"], found["GOMP_SPINCOUNT"]) == ("PASSIVE", "0")


@pytest.mark.parametrize("name, value", [("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "777")])
def test_what_the_user_set_stays(name: str, value: str) -> None:
    found = settings(**{name: value})
    if not found:
        pytest.skip("ggml was built without OpenMP")
    assert found[name] == value
