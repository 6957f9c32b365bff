"""What scripts/test builds: for which device, and whether unpatched llama.cpp too."""

from __future__ import annotations

import json
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
    steps: list[list[str | Path]] = []
    monkeypatch.setattr(_tools, "DEVICE_OPTIONS", tmp_path / "options")
    monkeypatch.setattr(_venv, "make_venv", lambda: None)
    monkeypatch.setattr(_venv, "run_step", lambda what, command, env=None: steps.append(command))
    monkeypatch.setattr(_venv, "VENV", tmp_path)
    (tmp_path / _venv.STAMP).write_text("")
    if kept is not None:
        _tools.remember_device(kept)
        assert json.loads((tmp_path / "options").read_text()) == kept
    _venv.prepare(given)
    assert [str(word) for word in steps[0][2:]] == wanted


def test_a_damaged_note_of_the_device_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tools, "DEVICE_OPTIONS", tmp_path / "options")
    (tmp_path / "options").write_text("7")
    assert _tools.built_device() == []
