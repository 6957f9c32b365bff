"""Perplexity and KL divergence: llama-perplexity's file and printed digits."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from helpers.compiled import compile_object
from oracle.client import oracle_folder
from regression.harness import ROOT, Models, held_out_text

SOURCE = ROOT / "build" / "llama.cpp"
SETTINGS = ["-t", "1", "-c", "64"]
OURS = ROOT / "tests" / "oracle" / "perplexity.cpp"  # says why it is linked with so little
PARTS = ("common/common.cpp", "common/log.cpp", "tools/perplexity/perplexity.cpp")
MATCHED = ["-b", "64"]


def sum_in_order() -> None:
    """On one core, llama-perplexity has no other threads, which would add tokens in any order."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """llama-perplexity of the pinned source, with the libraries of unpatched llama.cpp."""
    found = [*(oracle_folder() or Path("none")).glob("**/libllama.so.0")]
    if not found:
        pytest.skip("no unpatched llama.cpp to compare with; scripts/test makes it in .oracle")
    lib, work = found[0].parent, tmp_path_factory.mktemp("program")
    includes = [f"-I{SOURCE / one}" for one in ("common", "include", "ggml/include")]
    sources = [OURS, *(SOURCE / part for part in PARTS)]
    for number, source in enumerate(sources):
        command = ["g++", "-std=c++17", "-O0", *includes, "-c", str(source), "-o", f"{number}.o"]
        compile_object(command, work)
    program = work / "llama-perplexity"
    objects = [f"{number}.o" for number in range(len(sources))]
    libraries = [str(lib / f"lib{one}.so.0") for one in ("llama", "ggml", "ggml-cpu", "ggml-base")]
    # what is not called need not be found; -no-pie: the dynamic linker does not look for it either
    without = ["-no-pie", "-Wl,--unresolved-symbols=ignore-all", "-lpthread"]
    compile_object(["g++", *objects, *libraries, *without, "-o", program.name], work)

    def run(model: Path, *args: object) -> str:
        done = subprocess.run(
            [program, "-m", model, *SETTINGS, *MATCHED, *map(str, args)],
            check=True,
            capture_output=True,
            text=True,
            preexec_fn=sum_in_order,
            env={**os.environ, "LD_LIBRARY_PATH": str(lib), "OMP_WAIT_POLICY": "passive"},
        )
        return done.stdout + done.stderr

    return run


def ours(model: Path, *args: object) -> list[str]:
    from moegraph.cli import main

    command = ["perplexity", model, *SETTINGS, "--device", "cpu", *args]
    done = CliRunner().invoke(main, [str(arg) for arg in command])
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def nine_digits(lines: list[str]) -> list[str]:
    """Return lines with 9 digits of each number; a random model's perplexity is printed with more.

    A few values of the C library's expf are not the nearest ones.
    """
    return [re.sub(r"[\d.]+\d", lambda found: f"{float(found[0]):.9g}", line) for line in lines]


@pytest.mark.parametrize("name", ["tiny", "gemma4"])  # gemma4: begins with BOS, has windows
def test_digits_and_file_are_those_of_llama_perplexity(
    name: str, theirs: Any, models: Models, tmp_path: Path
) -> None:
    text, path = tmp_path / "text", models.path(name)
    text.write_text(held_out_text()[:4000])
    files = [tmp_path / "theirs.kld", tmp_path / "ours.kld"]
    for more in ([], ["--kl-divergence-base"]):
        given = ["-f", text, "--chunks", 5, *more]
        expected = theirs(path, *given, *(files[:1] if more else []))
        found = ours(path, *given, *(files[1:] if more else []))
        assert nine_digits(found) == nine_digits(re.findall(r"\[1\].*|Final.*", expected))
    rows = [np.fromfile(file, dtype=np.uint16).astype(np.int32) for file in files]
    assert len(rows[0]) == len(rows[1]) and (rows[0] != rows[1]).sum() < 5  # of sums' last bits
    given = ["-ctk", "q8_0", "-ctv", "q8_0", "--kl-divergence-base", files[0], "--kl-divergence"]
    expected, found = theirs(path, *given), ours(path, *given)
    expected = expected[expected.index("chunk  ") :].splitlines()
    assert nine_digits(found) == nine_digits(expected[: len(found)]) and len(found) > 40
