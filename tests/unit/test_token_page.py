"""The page that follows a token names files and functions; all of them must exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STOP = re.compile(r"`([\w/]+\.py)`\s+`([\w.]+)`")


def names_of(path: Path) -> set[str]:
    """Return the functions and classes of a file, methods as Class.method."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{x.name}" for x in node.body if isinstance(x, ast.FunctionDef)}
    return found


def test_every_stop_exists() -> None:
    stops = STOP.findall((ROOT / "docs/token.md").read_text(encoding="utf-8"))
    assert len(stops) > 20
    for file, name in stops:
        assert name in names_of(ROOT / "moegraph" / file), f"{file} has no {name}"
