"""The results of scripts/measure_card: a folder with JSON lines, and the table made of them.

results.jsonl has one line for what was measured with ({"card": ...}), the lines of each part
({"part": NAME, "run": N, "line": ...}), and one for the end of each run of a part ({"part": NAME,
"run": N, "state": ..., "seconds": ...}): done, cut (by its limit or by the end of the time), or
failed. Of a part that ran several times, the last run that is done counts, else the last.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from _bench import Line, append_line, table
from _card_figures import Figure
from _card_parts import PARTS, Part

DONE, CUT, FAILED = "done", "cut", "failed"


@dataclass
class Outcome:
    """One run of a part."""

    state: str = CUT
    seconds: float = 0.0
    why: str = ""
    lines: list[Line] = field(default_factory=list)


class Results:
    """A folder of results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "results.jsonl"
        self._n_runs = max((line.get("run", 0) for line in take(self._file)), default=0)

    def describe(self, card: Line) -> None:
        """Note what is measured with."""
        append_line(self._file, {"card": card, "t": round(time.time())})

    def begin(self) -> int:
        """Return the number of a new run of a part."""
        self._n_runs += 1
        return self._n_runs

    def raw(self, part: str) -> Path:
        """Return the file to which a part appends its lines while it runs."""
        return self.folder / f"{part}.jsonl"

    def end(self, part: str, run: int, outcome: Outcome, log: str) -> None:
        """Keep a run of a part: its lines, how it ended, and what it printed."""
        about = {"part": part, "run": run}
        for line in take(self.raw(part)):
            append_line(self._file, {**about, "line": line})
        ended = {"state": outcome.state, "seconds": round(outcome.seconds, 1), "why": outcome.why}
        append_line(self._file, {**about, **ended})
        self.raw(part).unlink(missing_ok=True)
        with (self.folder / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"==== {part}: {outcome.state} after {outcome.seconds:.0f} s\n{log}\n")

    def cards(self) -> list[Line]:
        """Return what each run noted: {"card": what was measured with, "t": when it began}."""
        return [line for line in take(self._file) if "card" in line]

    def outcomes(self) -> dict[str, Outcome]:
        """Return the run of each part that counts."""
        runs: dict[tuple[str, int], Outcome] = {}
        for line in take(self._file):
            if "part" not in line:
                continue
            one = runs.setdefault((line["part"], line["run"]), Outcome())
            if "line" in line:
                one.lines.append(line["line"])
            else:
                one.state, one.seconds, one.why = line["state"], line["seconds"], line["why"]
        found: dict[str, Outcome] = {}
        for (name, _), one in sorted(runs.items(), key=lambda item: item[0][1]):
            if name not in found or one.state == DONE or found[name].state != DONE:
                found[name] = one
        for part in PARTS:  # of a machine that went away
            one = found.get(part.name, Outcome())
            if self.raw(part.name).is_file() and one.state != DONE:
                found[part.name] = Outcome(why="it did not end", lines=take(self.raw(part.name)))
        return found


def take(path: Path) -> list[Line]:
    """Return the lines of a part's file; a last one that was cut off is left out."""
    found: list[Line] = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            found.append(line)
    return found


def rows(outcomes: dict[str, Outcome], unable: dict[str, str]) -> Iterator[list[str]]:
    """Yield the rows of the table. unable: why parts cannot run here."""
    lines = {name: one.lines for name, one in outcomes.items()}
    for part in PARTS:
        one = outcomes.get(part.name)
        if one is None:
            why = ": ".join(filter(None, ("not run", unable.get(part.name))))
            yield [part.name, part.about, "", why]
            continue
        figures = _figures(part, lines)
        yield from ([part.name, figure.name, figure.shown, figure.of] for figure in figures)
        if one.state != DONE or not figures:
            why = f"{one.state} after {one.seconds:.0f} s" + (f": {one.why}" if one.why else "")
            yield [part.name, part.about, "", why.replace("|", "/")]


def _figures(part: Part, lines: dict[str, list[Line]]) -> list[Figure]:
    """Return what a part shows; nothing of lines that are not as it writes them."""
    try:
        return list(part.shows(lines, part.name))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        return [Figure(f"its lines are not understood: {type(error).__name__} {error}", 0, unit="")]


def page(results: Results, unable: dict[str, str]) -> str:
    """Return machine and table, to paste into an issue."""
    card = [{"card": {}}, *results.cards()][-1]["card"]
    about = card.get("machine", {})
    size = card.get("model_bytes", 0) / 1e9
    return (
        f"{', '.join(about.get('gpu', ['unknown']))}; {about.get('n_cpus')} CPUs of"
        f" {about.get('cpu')}; {about.get('host_bytes', 0) / 2**30:.0f} GiB.\n"
        f"{card.get('model')} ({size:.1f} GB), commit {str(card.get('commit'))[:12]}, patch set"
        f" {card.get('patchset')}.\n\n"
        + table(["part", "figure", "value", ""], rows(results.outcomes(), unable))
    )
