"""CUDA kernels on the CPU: indices, barriers, exchanges between lanes, sums (tests/emulated)."""

from __future__ import annotations

import re
import subprocess

import pytest
from helpers import emulated

REASON = emulated.missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

# What the emulator says about a kernel with this error.
FAULTS = {
    "barrier of some threads": "threads wait for others that do not come to the same place",
    "lane outside of its mask": "a mask 000000ff that leaves out its own lane 8",
    "reads behind memory": "reads or writes outside of all memory",
    "copy not aligned": "a copy of 16 bytes is not aligned",
    "too much shared memory": "51200 bytes of shared memory, the limit is 49152",
}
# What is NaN of 64 results.
NAN = {
    "none": 0,
    "no barrier, first to last": 32,
    "copies without a wait": 64,
}


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(emulated.build(program)), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)


@pytest.mark.long
@pytest.mark.parametrize("program", sorted({*emulated.PROGRAMS} - {"faults"}))
def test_kernels_compute_what_they_should(program: str) -> None:
    done = run(program)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert re.fullmatch(r"all [1-9]\d+ checks of .*: 0 failed\n", done.stdout)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_of_a_kernel_is_reported(fault: str) -> None:
    done = run("faults", fault)
    assert done.returncode == 3
    assert FAULTS[fault] in done.stderr


@pytest.mark.parametrize("fault", NAN)
def test_what_nobody_has_written_is_nan(fault: str) -> None:
    done = run("faults", fault)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{NAN[fault]} of 64 are NaN\n"
