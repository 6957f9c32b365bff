#!/usr/bin/env python3
"""Write the tables of README.md and the pages of benchmarks from runs of scripts/measure_card.

The pages name tables, and the parts of the run that each is made of. The script rewrites the text
between two comments:

    <!-- table: decode whole residency-60 residency-25 -->
    <!-- end -->

Tables: about, readme, decode, prompts, memory, figures. The lines of the run are in
docs/benchmarks/card.jsonl, those of a page there in a file of its name; before the first --take
there are none, and nothing is written.

    scripts/bench_tables.py --take build/measured   keep its lines, if it has all parts of a page
    scripts/bench_tables.py                         write
    scripts/bench_tables.py --check                 exit code 1 if anything would change
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench
from _card_parts import PARTS
from _card_results import DONE, Results
from _tools import fetch

DOCS = bench.ROOT / "docs"
# The lines of a run, and the pages that show it.
RUNS = {
    DOCS / "benchmarks" / "card.jsonl": [DOCS / "benchmarks.md"],
    DOCS / "benchmarks" / "longer.jsonl": [DOCS / "benchmarks" / "longer.md"],
    DOCS / "benchmarks" / "h200.jsonl": [DOCS / "benchmarks" / "h200.md"],
    DOCS / "benchmarks" / "targets.jsonl": [DOCS / "benchmarks" / "targets.md"],
    DOCS / "benchmarks" / "rows.jsonl": [DOCS / "benchmarks" / "rows.md"],
    DOCS / "benchmarks" / "rival.jsonl": [
        bench.ROOT / "README.md",
        DOCS / "benchmarks" / "rival.md",
    ],
}
MARK = re.compile(r"(<!-- table: (\w+)((?: [\w-]+)+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
Lines = Sequence[bench.Line]
Samples = dict[tuple[str, str, str], list[float]]


@dataclass(frozen=True)
class Run:
    """What one run measured. card: machine, commit and model. parts: the lines of each by name."""

    card: bench.Line
    day: str
    parts: dict[str, list[bench.Line]]

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read what `take` wrote."""
        about, *rest = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        parts: dict[str, list[bench.Line]] = {}
        for line in rest:
            parts.setdefault(line["part"], []).append(line["line"])
        return cls(about["card"], time.strftime("%Y-%m-%d", time.gmtime(about["t"])), parts)

    def of(self, names: Sequence[str]) -> Iterator[tuple[str, Lines]]:
        """Yield name and lines of those parts that were measured."""
        for name in names:
            if name in self.parts:
                yield name, self.parts[name]


def take(folder: Path, path: Path, names: Sequence[str]) -> None:
    """Keep the lines of these parts of a measured folder in one file."""
    results = Results(folder)
    cards = results.cards()
    if not cards:
        raise bench.BenchError(f"{folder} has no results of measure_card")
    if len({json.dumps(card["card"], sort_keys=True) for card in cards}) > 1:
        raise bench.BenchError(
            f"{folder} has results of several commits, models or machines; a page shows one"
        )
    lines = [cards[0]]
    for name, one in results.outcomes().items():
        if name in names and one.state == DONE:
            for line in one.lines:
                paths = {key: line[key] for key in ("model_filename", "error") if key in line}
                plain = dict(zip(paths, bench.plain_paths([*paths.values()])))
                lines.append({"part": name, "line": {**line, **plain}})
    path.write_text("".join(map(bench.json_line, lines)), encoding="utf-8")


def of_kind(lines: Lines, kind: str, system: str = "") -> dict[str, bench.Line]:
    """Return the last line of a kind for each setting."""
    chosen = (x for x in lines if x.get("kind") == kind and x.get("system", "") == system)
    return {line["setting"]: line for line in chosen}


def times(values: Sequence[float], base: Sequence[float] | None) -> str:
    """Return median and range of how many times better than the base; '-' without a base."""
    if not base:
        return "-"
    ratios = bench.times_better(values, base, "tok/s")
    return f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} .. {max(ratios):.2f})"


def gib(line: bench.Line | None, *names: str) -> str:
    """Return the first of the fields that is present and not 0, in GiB."""
    value = next((line[name] for name in names if line and line.get(name)), 0)
    return f"{value / 2**30:.1f}" if value else "-"


DEVICE = ("device_driver_bytes", "device_peak_bytes")


@dataclass(frozen=True)
class Place:
    """Where the experts are in one setting of a part, and both sides' memory of the device.

    theirs: the way of llama.cpp that decodes quickest; "upstream" is llama-bench's.
    """

    setting: str
    ours: str
    short: str
    where: str
    theirs: str
    theirs_gib: str
    ours_gib: str


def places(run: Run, names: Sequence[str]) -> Iterator[tuple[Place, Samples, Lines]]:
    """Yield each setting that was measured beside llama-bench, with its samples."""
    for name, lines in run.of(names):
        samples = bench.samples_by_key([line for line in lines if "kind" in line])
        ours = "whole" if name.endswith("whole") else "moegraph"
        loads = of_kind(lines, "load", ours)
        for setting, load in loads.items():
            short = where = "everything on the GPU"
            if "share" in load:
                short = f"{load['share']:.0%} of the experts"
                where = f"{short} (`-ncmoe {load['ncmoe']}`)"
            mine = {key: found for key, found in samples.items() if key[0] == setting}
            theirs = best(mine, ours, "tg")
            memory = (of_kind(lines, "memory", side).get(setting) for side in (theirs, ours))
            held = [gib(line, *DEVICE) for line in memory]
            yield Place(setting, ours, short, where, theirs, *held), mine, lines


def best(samples: Samples, ours: str, test: str) -> str:
    """Return which of the other systems has the best median in tests of this beginning."""
    speeds = {
        key[2]: statistics.median(found) for key, found in samples.items()
        if key[1].startswith(test) and not key[2].startswith(ours)
    }  # fmt: skip
    return max(speeds, key=lambda system: speeds[system], default="upstream")


def about(run: Run, names: Sequence[str]) -> str:
    """Return what was measured, with what, and which of the parts were not."""
    card, machine = run.card, run.card["machine"]
    missing = [name for name in names if name not in run.parts]
    note = f" Not measured in this run: {', '.join(missing)}." if missing else ""
    changed = ", with changes" if card["commit"].endswith("-dirty") else ""
    rival = any(name.startswith("rival-") for name in run.parts)
    beside = " and ".join(x["llama_cpp_commit"] for x in (fetch.PIN, fetch.RIVAL)[: 1 + rival])
    text = (
        f"Measured on {run.day} at commit `{card['commit'][:12]}`{changed} (patch set"
        f" `{card['patchset']}`), beside llama.cpp {beside} without patches,"
        f" by one run of `scripts/measure_card`: {'; '.join(machine['gpu'])};"
        f" {machine['n_cpus']} CPUs of {machine['cpu']}; {machine['host_bytes'] / 2**30:.0f} GiB."
        f" The model is {card['model']} ({card['model_bytes'] / 1e9:.1f} GB).{note}"
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def readme(run: Run, names: Sequence[str]) -> str:
    """Return README's table: decoding by routing, prompts, eight clients of a server.

    Rows of the rival name it, and its way. There the file's own router chooses.
    """
    rows: list[list[str]] = []
    routing: list[str] = []
    for place, samples, _ in places(run, names):
        test = next(key[1] for key in samples if key[1].startswith("tg"))
        ways = [key[2] for key in samples if key[1] == test and key[2].startswith(place.ours)]
        ways = [way for way in ways if "argmax" not in way and "sampled" not in way]
        routing = routing if len(ways) < len(routing) else [way.partition(", ")[2] for way in ways]
        sizes = f" ({place.theirs_gib} GiB)", f" ({place.ours_gib} GiB)"
        rows.append(_short(f"decoding, {place.short}", samples, test, ways, sizes))
    for place, samples, _ in places(run, names):
        for test in dict.fromkeys(key[1] for key in samples if key[1].startswith("pp")):
            label = f"prompt of {test[2:]}, {place.short}"
            rows.append(_short(label, samples, test, [place.ours]))
    clients = run.parts.get("server-all", ()) if "server-all" in names else ()
    by: dict[str, list[float]] = {}
    for row in clients:
        if row.get("clients") == 8 and "tokens_per_s" in row:
            by.setdefault(row["server"], []).append(row["tokens_per_s"])
    if len(by) == 2:
        theirs, ours = (statistics.median(by[who]) for who in ("llama-server", "moegraph"))
        label = "8 clients of the server, everything on the GPU"
        rows.append([label, f"{theirs:,.0f}", f"{ours:,.0f}", f"{ours / theirs:.1f}x"])
    mine = f"moegraph, by routing: {' / '.join(routing)}" if len(routing) > 1 else "moegraph"
    return bench.table(["35B-A3B shape, tok/s", "llama.cpp", mine, ""], rows)


def _short(
    label: str, samples: Samples, test: str, ways: Sequence[str], sizes: tuple[str, str] = ("", "")
) -> list[str]:
    """Return a row of medians: theirs, ours by routing, how many times."""
    system = best(samples, ways[0].partition(",")[0], test)
    (base,) = (found for key, found in samples.items() if key[1:] == (test, system))
    label += "" if system == "upstream" else f", own routing, beside {system}"
    ours = [
        statistics.median(found) for way in ways
        for key, found in samples.items() if key[1:] == (test, way)
    ]  # fmt: skip
    theirs = statistics.median(base)
    return [
        label, f"{theirs:,.0f}{sizes[0]}", " / ".join(f"{x:,.0f}" for x in ours) + sizes[1],
        " / ".join(f"{x / theirs:.1f}x" for x in ours),
    ]  # fmt: skip


def decode(run: Run, names: Sequence[str]) -> str:
    """Return the table of decoding: a row for each share of the experts and each routing."""
    rows = []
    for place, samples, lines in places(run, names):
        for key in (k for k in samples if k[1].startswith("tg") and k[2].startswith(place.ours)):
            way, values = key[2].removeprefix(place.ours).removeprefix(", "), samples[key]
            if way.startswith("argmax"):
                continue
            base = samples.get((*key[:2], place.theirs))
            greedy = f"{place.ours}, argmax" + (f", {way}" if way else "")
            argmax = samples.get((*key[:2], greedy)) if not way.startswith("sampled") else None
            # the counters of a sampled row include its prompt
            experts = ["-", "-"] if way.startswith("sampled") else _experts(lines, key)
            rows.append([
                place.where, way or "-",
                f"{statistics.median(base):.1f} ({place.theirs_gib})" if base else "-",
                f"{bench.spread(values)} ({place.ours_gib})", times(values, base),
                f"{statistics.median(argmax):.1f}" if argmax else "-", *experts,
            ])  # fmt: skip
    return bench.table(
        ["on the device", "routing", "llama.cpp, tok/s (GiB)", "moegraph, tok/s (GiB)",
         "times llama.cpp", "argmax only", "hit rate", "misses a token"], rows,
    )  # fmt: skip


def _experts(lines: Lines, key: tuple[str, str, str]) -> list[str]:
    """Return the hit rate and the misses a token of the counted samples."""
    found = [
        x["experts"] for x in lines if x.get("kind") == "sample" and x["at"] and x.get("experts")
        and (x["setting"], x["test"], x["system"]) == key
    ]  # fmt: skip
    hits, misses = (sum(x[name] for x in found) for name in ("hits", "misses"))
    steps = sum(x["n_passes"] for x in found)
    if not steps:
        return ["-", "-"]
    return [f"{hits / max(hits + misses, 1):.3f}", f"{misses / steps:.1f}"]


def prompts(run: Run, names: Sequence[str]) -> str:
    """Return the table of prompts."""
    rows = []
    for place, samples, _ in places(run, names):
        for key in (k for k in samples if k[1].startswith("pp") and k[2] == place.ours):
            base = samples.get((*key[:2], best(samples, place.ours, key[1])))
            rows.append([
                place.where, key[1][2:], place.setting.rpartition("ub ")[2],
                bench.spread(base, 0) if base else "-", bench.spread(samples[key], 0),
                times(samples[key], base),
            ])  # fmt: skip
    return bench.table(
        ["on the device", "prompt", "-ub", "llama.cpp, tok/s", "moegraph, tok/s",
         "times llama.cpp"], rows,
    )  # fmt: skip


def memory(run: Run, names: Sequence[str]) -> str:
    """Return the table of device and host memory of both sides."""
    rows = []
    for place, _, lines in places(run, names):
        for system, label in (("upstream", "llama.cpp"), (place.ours, "moegraph")):
            line = of_kind(lines, "memory", system).get(place.setting)
            load = of_kind(lines, "load", system).get(place.setting)
            rows.append([
                place.where, place.setting.rpartition("ub ")[2], label, gib(line, *DEVICE),
                gib(line, "VmHWM"), gib(line, "host_pinned_bytes"),
                f"{load['seconds']:.1f}" if load else "-",
            ])  # fmt: skip
    return bench.table(
        ["on the device", "-ub", "", "device, GiB", "host, resident at its peak, GiB",
         "host, pinned, GiB", "load, s"], rows,
    )  # fmt: skip


def figures(run: Run, names: Sequence[str]) -> str:
    """Return the figures that parts show, as measure_card's table has them."""
    shows, rows = {part.name: part.shows for part in PARTS}, []
    for name, _ in run.of(names):
        for figure in shows[name](run.parts, name):
            rows.append([figure.name, figure.shown, figure.of])
    return bench.table(["", "", "of"], rows)


TABLES: dict[str, Callable[[Run, Sequence[str]], str]] = {
    f.__name__: f for f in (about, readme, decode, prompts, memory, figures)
}


def marked(page: str) -> list[str]:
    """Return the parts that a page names."""
    found: dict[str, None] = {}
    for _, name, parts, _, _ in MARK.findall(page):
        if name not in TABLES:
            raise bench.BenchError(f"no table {name!r}; there are {', '.join(TABLES)}")
        found.update(dict.fromkeys(parts.split()))
    wrong = [name for name in found if name not in {part.name for part in PARTS}]
    if wrong:
        raise bench.BenchError(f"measure_card has no part {wrong[0]}")
    return [*found]


def render(page: str, run: Run) -> str:
    """Return the page with every table rewritten."""

    def write(match: re.Match[str]) -> str:
        start, name, parts, _, end = match.groups()
        return f"{start}\n{TABLES[name](run, parts.split())}\n{end}"

    return MARK.sub(write, page)


def parser() -> bench.Parser:
    """Return the command line."""
    p = bench.Parser(description=__doc__)
    p.add_argument("--pages", type=bench.existing, nargs="+", default=[], metavar="FILE")
    p.add_argument("--raw", type=Path, metavar="FILE", help="lines of the run that --pages show")
    p.add_argument("--take", type=bench.existing, metavar="FOLDER", help="of measure_card")
    p.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if a page would change"
    )
    return p


def write(args: argparse.Namespace) -> int:
    """Write or check the pages."""
    code, done = 0, set[str]()
    if args.take:
        done = {name for name, one in Results(args.take).outcomes().items() if one.state == DONE}
    for raw, pages in ({args.raw: args.pages} if args.raw else RUNS).items():
        texts = {path: path.read_text(encoding="utf-8") for path in pages}
        names = [name for text in texts.values() for name in marked(text)]
        if args.take and (args.raw or done.issuperset(names)):
            take(args.take, raw, names)
            done.clear()  # a run is shown once
        if not raw.is_file():
            continue
        found = Run.read(raw)
        changed = {path: new for path, old in texts.items() if (new := render(old, found)) != old}
        if args.check and changed:
            print(f"{', '.join(path.name for path in changed)}: not what the raw lines say; run"
                  " scripts/bench_tables.py", file=sys.stderr)  # fmt: skip
            code = 1
            continue
        for path, text in changed.items():
            path.write_text(text, encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(bench.main(parser(), write))
