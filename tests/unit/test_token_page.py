"""Names in pages exist; on the page that follows a token, each stop is named once on a way."""

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


def test_a_name_without_a_file_is_in_a_file_of_the_page() -> None:
    page = (ROOT / "docs/token.md").read_text(encoding="utf-8")
    files = {ROOT / "moegraph" / file for file, _ in STOP.findall(page)}
    known = set().union(*map(names_of, files))
    methods = re.findall(r"`([A-Z]\w*\.\w+)`", page)
    assert len(methods) > 20 and [name for name in methods if name not in known] == []


def test_a_way_names_each_stop_once() -> None:
    """Where a way comes back to a function, the page names it without its file, and says why."""
    page = (ROOT / "docs/token.md").read_text(encoding="utf-8")
    for way in page.split("\n## ")[1:]:
        stops = STOP.findall(way)
        assert len(stops) > 2 and sorted(set(stops)) == sorted(stops), way.splitlines()[0]


def members_of(package: Path) -> dict[str, set[str]]:
    """Return what each class of a package defines itself: methods, and attributes of any kind."""
    found: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            names = found.setdefault(node.name, set())
            for x in ast.walk(node):
                if isinstance(x, ast.FunctionDef):
                    names.add(x.name)
                elif isinstance(x, ast.Attribute | ast.Name) and isinstance(x.ctx, ast.Store):
                    names.add(x.attr if isinstance(x, ast.Attribute) else x.id)
    return found


def test_members_that_pages_name_exist() -> None:
    members = members_of(ROOT / "moegraph")
    named = 0
    for page in sorted((ROOT / "docs").glob("*.md")):
        for name, member in re.findall(r"`([A-Z]\w+)\.(\w+)`", page.read_text(encoding="utf-8")):
            assert member in members.get(name, ()), f"{page.name}: {name}.{member}"
            named += 1
    assert named > 60
