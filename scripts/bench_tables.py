#!/usr/bin/env python3
"""Write the tables of docs/benchmarks.md from the raw lines in docs/benchmarks/.

The page names its tables in comments. The script rewrites the text between two of them:

    <!-- table: decode residency.jsonl -->
    <!-- end -->

Tables: runs, compare, trees, decode, prompts, memory, predictions. Each takes raw files and joins
their lines. If several runs measured the same thing, the last one counts.

    scripts/bench_tables.py             write
    scripts/bench_tables.py --check     exit code 1 if anything would change
    scripts/bench_tables.py --plot docs/residency-curve.svg --raw residency.jsonl
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import _bench as bench

PAGE = bench.ROOT / "docs" / "benchmarks.md"
MARK = re.compile(r"(<!-- table: (\w+)((?: [\w.-]+)+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
Lines = Sequence[bench.Line]
Samples = dict[tuple[str, str, str], list[float]]


def last_samples(lines: Lines) -> Samples:
    """Return samples by (setting, test, system), each from the last run that has any."""
    found: Samples = {}
    for run in dict.fromkeys(line["run"] for line in lines):
        found.update(bench.samples_by_key([x for x in lines if x["run"] == run]))
    return found


def of_kind(lines: Lines, kind: str, system: str = "") -> dict[str, bench.Line]:
    """Return the last line of a kind for each setting."""
    chosen = (x for x in lines if x["kind"] == kind and x.get("system", "") == system)
    return {line["setting"]: line for line in chosen}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def times(values: Sequence[float], base: Sequence[float] | None, unit: str = "tok/s") -> str:
    """Return median and range of how many times better than the base; '-' without a base."""
    if not base:
        return "-"
    ratios = bench.times_better(values, base, unit)
    return f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} .. {max(ratios):.2f})"


def gib(line: bench.Line | None, *names: str) -> str:
    """Return the first of the fields that is present and not 0, in GiB."""
    value = next((line[name] for name in names if line and line.get(name)), 0)
    return f"{value / 2**30:.2f}" if value else "-"


def runs(lines: Lines) -> str:
    """Return the table of runs: machine, time, commit, arguments."""
    rows = []
    for run in (x for x in lines if x["kind"] == "run"):
        mine = [x for x in lines if x["run"] == run["run"]]
        patches = {x["patchset"] for x in mine if x["kind"] == "system" and "patchset" in x}
        upstream = {x["row"].get("build_commit", "") for x in mine if x["kind"] == "upstream"}
        upstream |= {x["commit"] for x in mine if x["kind"] == "system" and "patchset" not in x}
        machine = run["machine"]
        rows.append([
            f"`{run['run']}`", time.strftime("%Y-%m-%d", time.gmtime(run["t"])),
            _commit(run["commit"]), " ".join(f"`{x}`" for x in sorted(patches)),
            " ".join(f"`{x[:7]}`" for x in sorted(upstream)), "; ".join(machine["gpu"]),
            f"{machine['cpu']}, {machine['n_cpus']}", f"`{' '.join(run['argv'])}`",
        ])  # fmt: skip
    head = ["run", "date", "commit", "patch set", "llama.cpp", "GPU, driver, limit", "CPUs",
            "arguments"]  # fmt: skip
    return table(head, rows)


def _commit(text: str) -> str:
    return f"`{text[:12]}`" + (", changed" if text.endswith("-dirty") else "")


def compare(lines: Lines) -> str:
    """Return the table of bench_vs_upstream: for each test upstream, then moegraph's rows."""
    samples = last_samples(lines)
    rows = []
    for (setting, test, system), values in samples.items():
        base = samples.get((setting, test, "upstream"))
        ratio = "" if system == "upstream" else times(values, base)
        rows.append([setting, test, system, bench.spread(values), str(len(values)), ratio])
    rows.sort(key=lambda row: (row[0], row[1]))
    return table(["-ub", "test", "system", "tok/s", "samples", "times upstream"], rows)


def trees(lines: Lines) -> str:
    """Return the table of bench_trees: systems side by side, with ratios to the first."""
    samples = last_samples(lines)
    units = {(x["setting"], x["test"]): x["unit"] for x in lines if x["kind"] == "sample"}
    systems = list(dict.fromkeys(x["system"] for x in lines if x["kind"] == "system"))
    systems += sorted({key[2] for key in samples} - set(systems))
    first, rows = systems[0], []
    for setting, test in dict.fromkeys(key[:2] for key in samples):
        unit = units[setting, test]
        cells = [setting, f"{test}, {unit}"]
        base = samples.get((setting, test, first))
        for system in systems:
            values = samples.get((setting, test, system))
            cells.append(bench.spread(values, 2) if values else "-")
            if system != first:
                cells.append(times(values, base, unit) if values else "-")
        rows.append(cells)
    head = ["experts on the device", "test", first]
    for system in systems[1:]:
        head += [system, f"times {first}"]
    return table(head, rows)


def _budgets(lines: Lines) -> list[str]:
    found = dict.fromkeys(x["setting"] for x in lines if x["kind"] == "load")
    return [setting for setting in found if setting.startswith("ncmoe")]


def _place(lines: Lines, setting: str) -> str:
    load = of_kind(lines, "load", "moegraph")[setting]
    slots = f"{sum(load['n_slots']):,} slots" if load["share"] else "none"
    return f"{load['share']:.0%}, {slots} (`-ncmoe {load['ncmoe']}`)"


def decode(lines: Lines) -> str:
    """Return the table of decode with missing experts: a row for each budget and trace."""
    samples, rows = last_samples(lines), []
    for setting in _budgets(lines):
        keys = [k for k in samples if k[0] == setting and k[1].startswith("tg")]
        memory = {name: of_kind(lines, "memory", name).get(setting)
                  for name in ("upstream", "moegraph")}  # fmt: skip
        devices = [gib(m, "device_driver_bytes", "device_peak_bytes") for m in memory.values()]
        for key in (k for k in keys if k[2].startswith("moegraph") and "argmax" not in k[2]):
            way, values = key[2].removeprefix("moegraph, "), samples[key]
            base = samples.get((*key[:2], "upstream"))
            greedy = samples.get((*key[:2], f"moegraph, argmax, {way}"))
            # the counters of a sampled row include its prompt
            experts = ["-", "-"] if way.startswith("sampled") else _experts(lines, key)
            rows.append([
                _place(lines, setting), way,
                f"{statistics.median(base):.1f} ({devices[0]})" if base else "-",
                f"{bench.spread(values)} ({devices[1]})", times(values, base),
                f"{statistics.median(greedy):.1f}" if greedy else "-", *experts,
            ])  # fmt: skip
    return table(
        ["experts on the device", "routing", "upstream, tok/s (GiB)", "moegraph, tok/s (GiB)",
         "times upstream", "moegraph, argmax only", "hit rate", "misses a token"], rows,
    )  # fmt: skip


def _experts(lines: Lines, key: tuple[str, str, str]) -> list[str]:
    """Return the hit rate and the misses a token of the counted samples."""
    found = [
        x["experts"] for x in lines if x["kind"] == "sample" and x["at"] and x.get("experts")
        and (x["setting"], x["test"], x["system"]) == key
    ]  # fmt: skip
    hits, misses = (sum(x[name] for x in found) for name in ("hits", "misses"))
    steps = sum(x["n_passes"] for x in found)
    if not steps:
        return ["-", "-"]
    return [f"{hits / max(hits + misses, 1):.3f}", f"{misses / steps:.1f}"]


def prompts(lines: Lines) -> str:
    """Return the table of prompts and first tokens with missing experts."""
    samples, rows = last_samples(lines), []
    for setting in _budgets(lines):
        for key in [k for k in samples if k[0] == setting and k[2] == "moegraph"]:
            if not key[1].startswith(("pp", "first")):
                continue
            unit = "s" if key[1].startswith("first") else "tok/s"
            base, digits = samples.get((*key[:2], "upstream")), 2 if unit == "s" else 0
            rows.append([
                _place(lines, setting), setting.rpartition("ub ")[2], f"{key[1]}, {unit}",
                bench.spread(base, digits) if base else "-",
                bench.spread(samples[key], digits), times(samples[key], base, unit),
            ])  # fmt: skip
    return table(
        ["experts on the device", "-ub", "test", "upstream", "moegraph", "times upstream"], rows
    )


def memory(lines: Lines) -> str:
    """Return the table of device and host memory of both sides."""
    rows = []
    for setting in dict.fromkeys(x["setting"] for x in lines if x["kind"] == "memory"):
        for system in dict.fromkeys(x["system"] for x in lines if x["kind"] == "memory"):
            line = of_kind(lines, "memory", system).get(setting)
            if line:
                load = of_kind(lines, "load", system).get(setting)
                rows.append([
                    setting, system, gib(line, "device_driver_bytes", "device_peak_bytes"),
                    gib(line, "VmHWM"), gib(line, "host_pinned_bytes"),
                    f"{load['seconds']:.1f}" if load else "-",
                ])  # fmt: skip
    return table(
        ["setting", "system", "device, GiB", "host, resident at peak, GiB", "host, pinned, GiB",
         "load, s"], rows,
    )  # fmt: skip


def predictions(lines: Lines) -> str:
    """Return the table of bench_predict.py's predictions."""
    rows = [
        [str(x["ncmoe"]), x["trace"], f"{x['share']:.0%}", x["how"], f"{x['measured']:.1f}",
         f"{x['predicted']:.1f}", f"{x['predicted'] / x['measured'] - 1:+.1%}"]
        for x in lines if x["kind"] == "prediction"
    ]  # fmt: skip
    return table(
        ["-ncmoe", "routing", "experts on the device", "times of the machine", "measured, tok/s",
         "predicted", "off by"], rows,
    )  # fmt: skip


TABLES: dict[str, Callable[[Lines], str]] = {
    f.__name__: f for f in (runs, compare, trees, decode, prompts, memory, predictions)
}


def render(page: str, folder: Path) -> str:
    """Return the page with every table rewritten.

    Raises:
        BenchError: a table or a raw file that it names does not exist.
    """

    def write(match: re.Match[str]) -> str:
        start, name, files, _, end = match.groups()
        if name not in TABLES:
            raise bench.BenchError(f"no table {name!r}; there are {', '.join(TABLES)}")
        return f"{start}\n{TABLES[name](read_raw(folder, files.split()))}\n{end}"

    return MARK.sub(write, page)


def read_raw(folder: Path, names: Sequence[str]) -> Lines:
    """Return the lines of raw files.

    Raises:
        BenchError: one does not exist, or has a line that is none.
    """
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise bench.BenchError(f"{folder} has no raw file {missing[0]}")
    return bench.read_lines([folder / name for name in names])


def curve(lines: Lines) -> str:
    """Return a plot (SVG) of decode speed over the share of experts: upstream and each trace."""
    from moegraph.cli.svg import line_chart

    loads = of_kind(lines, "load", "moegraph")
    series: dict[str, list[tuple[float, float]]] = {}
    for (setting, test, system), values in last_samples(lines).items():
        ours = system.startswith("moegraph") and not re.search("argmax|sampled", system)
        if setting in loads and test.startswith("tg") and (ours or system == "upstream"):
            point = round(100 * loads[setting]["share"], 1), statistics.median(values)
            series.setdefault(system, []).append(point)
    label = "experts on the device, % (upstream: same device memory)"
    ordered = {name: sorted(points) for name, points in series.items()}
    return line_chart("Decoding, 35B-A3B shape", label, "tokens per second", ordered)


def main() -> int:
    """Write or check the page, or draw the curve."""
    p = bench.Parser(__doc__)
    p.add_argument("--page", type=bench.existing, default=PAGE)
    p.add_argument("--folder", type=bench.existing, help="of raw files; default: beside the page")
    p.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if the page would change"
    )
    p.add_argument("--plot", type=Path, metavar="FILE", help="draw decode speeds instead (SVG)")
    p.add_argument("--raw", nargs="+", default=["residency.jsonl"], help="raw files of --plot")
    args = p.parse_args()
    changed = False

    def run() -> None:
        nonlocal changed
        folder = args.folder or args.page.with_suffix("")
        if args.plot:
            args.plot.write_text(curve(read_raw(folder, args.raw)), encoding="utf-8")
            return
        before = args.page.read_text(encoding="utf-8")
        after = render(before, folder)
        changed = args.check and after != before
        if not args.check:
            args.page.write_text(after, encoding="utf-8")

    code = bench.guarded("bench_tables.py", run)
    if changed:
        print(f"{args.page.name} does not match the raw lines; run scripts/bench_tables.py",
              file=sys.stderr)  # fmt: skip
    return 1 if changed else code


if __name__ == "__main__":
    sys.exit(main())
