"""The tables of docs/cli.md that explain what commands print as JSON."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"


def json_tables(command: str) -> list[dict[str, str]]:
    """Return the tables of a command: the meaning of each key."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"\n## moegraph {command}\n")
    _, *tables = rest.partition("\n## ")[0].split("| key | value |\n|---|---|\n")
    found = []
    for table in tables:
        rows = [row.strip("| ").split(" | ", 1) for row in table.partition("\n\n")[0].splitlines()]
        found.append({name.strip("` "): text for keys, text in rows for name in keys.split(", ")})
    return found
