"""scripts/check_kernels: what it runs, and what it says if something is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("mul_mat_id", "few_rows", "moe_down", "deltanet")


def run(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "check_kernels"), *map(str, arguments)]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, **env}
    )


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of programs; one fails."""
    for name in OURS:
        code = int(name == "few_rows")
        write_program(tmp_path / name, f"echo FAIL a case; echo all 3 checks: $*; exit {code}")
    write_program(tmp_path / "test-backend-ops", "echo 5/5 tests passed; echo $* >&2")
    return tmp_path


def test_each_program_has_a_line_and_one_that_fails_counts(folder: Path) -> None:
    done = run(folder, "--device", "GPU7", "--every", "4", "--ops", "MUL_MAT")
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and lines.count("  FAIL a case") == len(OURS)
    words = {line.split()[0]: line for line in lines[-5:]}
    assert list(words) == [*OURS, "MUL_MAT"]
    for name in OURS:
        assert (" FAILED " in words[name]) == (name == "few_rows")
        assert "all 3 checks: --device GPU7 --every 4" in words[name]
    assert "5/5 tests passed" in words["MUL_MAT"]
    assert "-o MUL_MAT -b GPU7" in (folder / "logs" / "MUL_MAT.log").read_text()


@pytest.mark.parametrize(
    "gone, given, said",
    [
        ("deltanet", (), "deltanet; --compile makes it"),
        ("test-backend-ops", (), "test-backend-ops; llama.cpp's CMake makes it"),
        ("", ("--compile", "--headers", "/nowhere"), "no /nowhere/moegraph.h; scripts/build"),
    ],
)
def test_what_is_missing_is_one_line(
    folder: Path, gone: str, given: tuple[str, ...], said: str
) -> None:
    (folder / (gone or "deltanet")).unlink()
    done = run(folder, *given)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and last.startswith("check_kernels: error: no ") and said in last
    assert not (folder / "logs").exists()


def test_programs_are_compiled_with_the_headers_of_the_build(tmp_path: Path) -> None:
    compiler, calls = tmp_path / "compiler", tmp_path / "calls"
    write_program(compiler, f"echo $* >> {calls}")
    headers = ROOT / "native" / "ggml" / "include"
    done = run(tmp_path, "--compile", "--headers", headers, CXX=str(compiler))
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in calls.read_text().splitlines()]
    assert [Path(words[2]).stem for words in found] == list(OURS)
    assert all(f"-I{headers}" in words for words in found)
    calls.unlink()
    done = run(tmp_path, "--compile", CXX=str(compiler))
    said = done.stderr if done.returncode else calls.read_text()  # there may be no build here
    assert str(ROOT / "build" / "llama.cpp" / "ggml" / "include") in said
