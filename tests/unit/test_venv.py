"""What scripts/test builds: for which device, and whether unpatched llama.cpp too."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import _tools
import _venv


@pytest.mark.parametrize(
    "arguments, needed",
    [
        ([], True),
        (["-k", "deltanet"], True),
        (["tests"], True),
        (["tests/regression/test_matched.py"], True),
        (["tests/cuda"], True),
        (["tests/native", "tests/regression"], True),
        (["tests/native/test_op_attn.py::test_attention_is_that_of_float64"], False),
        (["tests/unit", "tests/fuzz", "-x", "-k", "cost"], False),
    ],
)
def test_only_tests_that_compare_need_unpatched_llama_cpp(
    arguments: list[str], needed: bool
) -> None:
    assert _venv.needs_oracle(arguments) is needed


@pytest.mark.parametrize(
    "given, kept, wanted",
    [
        ([], None, []),
        ([], ["--cuda-arch", "86"], ["--cuda-arch", "86"]),
        (["--cpu"], ["--cuda-arch", "86"], ["--cpu"]),
    ],
)
def test_the_device_of_the_last_build_is_built_for_again(
    given: list[str],
    kept: list[str] | None,
    wanted: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[list[str]] = []
    monkeypatch.setattr(_tools, "DEVICE_OPTIONS", tmp_path / "options")
    monkeypatch.setattr(_venv, "make_venv", lambda: None)
    monkeypatch.setattr(_venv, "run_build", steps.append)
    monkeypatch.setattr(_venv, "run_step", lambda what, command, env=None: None)
    monkeypatch.setattr(_venv, "VENV", tmp_path)
    (tmp_path / _venv.STAMP).write_text("")
    if kept is not None:
        _tools.remember_device(kept)
        assert json.loads((tmp_path / "options").read_text()) == kept
    _venv.prepare(given)
    assert steps == [wanted]


def test_a_disk_that_is_nearly_full_is_refused(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    _tools.check_space(tmp_path, free // 2)
    with pytest.raises(_tools.BuildError, match=r"GB of free space; a build needs [\d.]+ GB$"):
        _tools.check_space(tmp_path, 2 * free + 10**9)
