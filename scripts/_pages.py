"""Writes a generated file of docs/, or says whether it is up to date."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path


def write_or_check(path: Path, make: Callable[[], str]) -> int:
    """Write what `make` returns; with --check, only compare it. Return the exit code."""
    script = f"scripts/{Path(sys.argv[0]).name}"
    if sys.argv[1:] not in ([], ["--check"]):
        print(f"usage: {script} [--check]", file=sys.stderr)
        return 2
    text = make()
    if not sys.argv[1:]:
        path.write_text(text, encoding="utf-8")
        return 0
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return 0
    print(f"{path.name} is not up to date; run {script}", file=sys.stderr)
    return 1
