"""scripts/lint: what it looks at, and how it ends."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))


@pytest.fixture
def lint(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return scripts/lint as a module that installs nothing."""
    loader = SourceFileLoader("lint", str(ROOT / "scripts" / "lint"))
    spec = importlib.util.spec_from_loader("lint", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    monkeypatch.setattr(module._venv, "add_tools", lambda extra: None)
    monkeypatch.setattr(module.sys, "argv", ["lint"])
    return module


def test_scripts_without_a_suffix_are_looked_at(lint: ModuleType) -> None:
    found = lint.without_suffix()
    assert {"scripts/build", "scripts/lint", "scripts/quickstart", "scripts/test"} <= set(found)
    assert all((ROOT / name).is_file() for name in found)


@pytest.mark.parametrize("bad", ["check", "format", "mypy", None])
def test_one_tool_that_finds_something_fails_it_and_the_others_still_run(
    lint: ModuleType,
    bad: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[list[str]] = []

    def run(call: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(call)
        words = {Path(call[0]).name, call[1]}
        return subprocess.CompletedProcess(call, int(bad in words))

    monkeypatch.setattr(lint.subprocess, "run", run)
    assert lint.main() == (0 if bad is None else 1)
    assert len(calls) == 3 and all("scripts/build" in call for call in calls)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (0 if bad is None else 1)
    assert all(bad in line and "see above" in line for line in lines if bad)
