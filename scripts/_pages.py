"""Writes a generated file, or says whether it is up to date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def write_or_check(about: str | None, path: Path, make: Callable[[], str]) -> int:
    """Write what `make` returns; with --check, only compare it. Return the exit code.

    about: what the script is for, in its help.
    """
    p = argparse.ArgumentParser(description=about)
    p.add_argument("--check", action="store_true", help="write nothing; fail if it would change")
    is_check = p.parse_args().check
    text = make()
    if not is_check:
        path.write_text(text, encoding="utf-8")
        return 0
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return 0
    print(f"{path.name} is not up to date; run scripts/{p.prog}", file=sys.stderr)
    return 1
