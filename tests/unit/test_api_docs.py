"""docs/api.md says what the docstrings say, of everything that is public."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import moegraph
from moegraph import errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "api.md"


def test_the_page_is_up_to_date() -> None:
    script = ROOT / "scripts" / "gen_api_docs.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_listed_with_its_meaning() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    names = [f"moegraph.{name}" for name in moegraph.__all__ if name != "__version__"]
    for name in names:
        at = lines.index(f"### {name}")
        assert len(lines[at + 2]) > 10, f"{name} has no docstring"
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.MoegraphError):
            assert any(line.startswith(f"| `{name}` |") for line in lines), name


def test_no_row_is_without_a_meaning() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    assert len(rows) > 60
    assert [row for row in rows if not row.strip("|").rpartition("|")[2].strip()] == []
