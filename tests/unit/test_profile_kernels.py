"""scripts/profile_kernels.py, with a program that takes the place of ncu."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import profile_kernels as script
from _bench import BenchError

HEAD = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
TILES = "void mul_mat_q<(ggml_type)12, 128, false>(const char *, const int *(*)(int), float *)"
CHAIN = "moegraph_long_chain_kernel<128, false>(moegraph_chain_args)"


def line(name: str, value: str, unit: str = "us", metric: str = script._TIME) -> str:
    return f'"0","1","{name}","{metric}","{unit}","{value}"'


def test_times_are_added_up_by_kernel() -> None:
    lines = ["==PROF== Connected", HEAD, line(CHAIN, "2.5"), line(TILES, "1,234.5"),
             line(CHAIN, "500", "ns"), line(CHAIN, "7", metric="other")]  # fmt: skip
    first, second = script.read_times(lines)
    assert (first.name, first.n, first.ms) == (
        "mul_mat_q<(ggml_type)12, 128, false>", 1, pytest.approx(1.2345)
    )  # fmt: skip
    assert (second.name, second.n) == ("moegraph_long_chain_kernel<128, false>", 2)
    assert second.ms == pytest.approx(0.003)
    with pytest.raises(BenchError, match="no kernel"):
        script.read_times(["==PROF== Connected"])


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a program on the path that writes times, or fails if its command has `fail` in it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "ncu"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nlog = sys.argv[sys.argv.index('--log-file') + 1]\n"
        "if 'fail' in ' '.join(sys.argv):\n"
        "    print('==ERROR== no counters', file=open(log, 'w')); sys.exit(9)\n"
        f"open(log, 'w').write({chr(10).join([HEAD, line(CHAIN, '3', 'ms')])!r} + '\\n')\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return program


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["profile_kernels.py", *arguments])
    return script.main()


def test_both_programs_are_profiled_in_turn(
    ncu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    beside = ("--llama-bench", str(ncu), "--prompt", "8", "16", "--out", str(out))
    assert run(monkeypatch, "tiny", *beside) == 0
    rows = [json.loads(text) for text in out.read_text().splitlines()]
    assert [(row["program"], row["n_prompt"], row["ms"]) for row in rows] == [
        ("moegraph", 8, 3.0), ("llama.cpp", 8, 3.0), ("moegraph", 16, 3.0), ("llama.cpp", 16, 3.0),
    ]  # fmt: skip
    assert "llama.cpp, prompt of 16: 3.0 ms in 1 kernels" in capsys.readouterr().out


@pytest.mark.usefixtures("ncu")
def test_a_profiler_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "tiny", "--options=--fail") == 2
    assert capsys.readouterr().err == (
        "profile_kernels.py: ncu ended with 9: ==ERROR== no counters\n"
    )


def test_no_profiler_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(monkeypatch, "tiny") == 2
    assert "ncu is not on the path" in capsys.readouterr().err
