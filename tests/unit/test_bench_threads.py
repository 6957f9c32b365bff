"""scripts/bench_threads.py: its arguments, what it would run, and its table. Nothing is timed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "bench_threads.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("bench_threads", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def model(tmp_path: Path) -> str:
    """Return a file that stands for a model."""
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


def test_help_says_how_to_limit_the_cores() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True
    )
    assert "taskset -c 0,1" in done.stdout and "--llama-bench" in done.stdout


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--busy", "-1"), "--busy"), (("--threads", "0"), "below 1"),
        (("--llama-env", "X"), "NAME=VALUE"), (("--gen", "many"), "invalid"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(
    script: ModuleType, wrong: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        script.parser().parse_args(["m", *wrong])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_both_get_the_same_test_and_threads(script: ModuleType, tmp_path: Path) -> None:
    args = script.parser().parse_args([
        model(tmp_path), "--threads", "1", "3", "--gen", "7", "--llama-bench", "up/llama-bench",
        "--llama-args", "-ngl 0", "--llama-env", "CUDA_VISIBLE_DEVICES=",
    ])  # fmt: skip
    found = script.ways(args)
    assert [f"{way.system} {way.name}" for way in found] == [
        "moegraph default", "moegraph -t 1 --poll 50", "moegraph -t 3 --poll 50",
        "moegraph -t 3 --poll 0", "upstream -t 1", "upstream -t 3", "upstream -t 3 active",
        "upstream -t 3 passive",
    ]  # fmt: skip
    for way in found:
        assert way.command[way.command.index("-n") + 1] == "7"
    assert "-t" not in found[0].command
    last = found[-1]
    assert last.command[-4:] == ("-ngl", "0", "-t", "3")
    assert (last.env["CUDA_VISIBLE_DEVICES"], last.env["OMP_WAIT_POLICY"]) == ("", "passive")
    assert last.env["LD_LIBRARY_PATH"].startswith("up")


def test_busy_cores_end_with_the_block(script: ModuleType) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Spy(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, command: list[str]) -> None:
            super().__init__(command)
            started.append(self)

    script.subprocess.Popen, before = Spy, subprocess.Popen
    try:
        with pytest.raises(RuntimeError), script.busy_cores(1):
            assert started[0].poll() is None
            raise RuntimeError
    finally:
        script.subprocess.Popen = before
    assert started[0].poll() is not None


def test_a_table_compares_medians_with_the_best_of_upstream(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    speeds = {"default": 95.0, "-t 1": 50.0, "-t 2 active": 100.0}
    monkeypatch.setattr(script, "run", lambda way: ([speeds.get(way.name, 10.0)] * 2, "2 poll 50"))
    bench, out = tmp_path / "llama-bench", tmp_path / "rows.jsonl"
    bench.touch()
    monkeypatch.setattr(sys, "argv", [
        "bench_threads.py", model(tmp_path), "--busy", "0", "--threads", "1", "2",
        "--llama-bench", str(bench), "--out", str(out),
    ])  # fmt: skip
    assert script.main() == 0
    assert "| 0 | moegraph | default | 95.0 | 95.0 .. 95.0 | 2 poll 50 | 0.950 |" in (
        capsys.readouterr().out
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert max(row["ratio"] for row in rows) == 1.0


def test_a_missing_judge_is_one_line(script: ModuleType, monkeypatch, capsys, tmp_path) -> None:
    wanted = [model(tmp_path), "--llama-bench", "/nowhere/llama-bench"]
    monkeypatch.setattr(sys, "argv", ["bench_threads.py", *wanted])
    assert script.main() == 2
    assert capsys.readouterr().err == "bench_threads.py: /nowhere/llama-bench: no such file\n"
