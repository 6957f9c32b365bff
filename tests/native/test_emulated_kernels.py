"""CUDA kernels on the CPU: indices, barriers, exchanges between lanes, sums (tests/emulated)."""

from __future__ import annotations

import re
import subprocess

import pytest
from helpers import emulated

REASON = emulated.missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

STUCK = "threads wait for others that do not come to the same place"
# What the emulator says about a kernel with this error.
FAULTS = {
    "barrier of some threads": STUCK,
    "two barriers": STUCK,
    "lanes that have ended": STUCK,
    "lane outside of its mask": "a mask 000000ff that leaves out its own lane 8",
    "reads from a lane outside of the mask": "lane 0 reads from lane 8",
    "reads behind memory": "reads or writes outside of all memory",
    "writes before memory": "reads or writes outside of all memory",
    "writes behind shared memory": "writes behind the 256 bytes of shared memory",
    "copy not aligned": "a copy of 16 bytes is not aligned",
    "too much shared memory": "51200 bytes of shared memory, the limit is 49152",
    "static beside all dynamic memory": "256 or more bytes of static shared memory",
}
# What is NaN of 64 results.
NAN = {
    "none": 0,
    "no barrier, first to last": 32,
    "no barrier, last to first": 32,
    "copies without a wait": 64,
}


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(emulated.build(program)), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("program", ["conv", "recurrence", "rows"])
def test_kernels_compute_what_they_should(program: str) -> None:
    done = run(program)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert re.fullmatch(r"all [1-9]\d+ checks of .*: 0 failed\n", done.stdout)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_of_a_kernel_is_reported(fault: str) -> None:
    done = run("faults", fault)
    assert done.returncode == 3
    assert FAULTS[fault] in done.stderr


@pytest.mark.parametrize("fault", ["index beyond an array", "address not aligned"])
def test_what_the_compiler_checks_is_reported(fault: str) -> None:
    if "-fsanitize=alignment,bounds" not in emulated.flags():
        pytest.skip(f"{emulated.compiler()} has no -fsanitize=alignment,bounds")
    done = run("faults", fault)
    assert done.returncode == 3
    assert "an index beyond an array, or an address that is not aligned" in done.stderr


@pytest.mark.parametrize("fault", NAN)
def test_what_nobody_has_written_is_nan(fault: str) -> None:
    done = run("faults", fault)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{NAN[fault]} of 64 are NaN\n"


@pytest.mark.parametrize("name", ["deltanet", "few_rows", "moe_down", "mul_mat_id"])
def test_a_program_that_checks_kernels_on_a_gpu_compiles(name: str) -> None:
    includes = [f"-I{folder / 'include'}" for folder in (emulated.NATIVE, emulated.GGML)]
    source = emulated.ROOT / "tests" / "cuda" / f"{name}.cpp"
    command = [emulated.compiler(), "-std=c++17", "-fsyntax-only", *includes, str(source)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
