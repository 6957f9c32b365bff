"""Figures that the parts of scripts/measure_card show, from their raw lines, with bars beside them.

A bar is the least that this project wants of a figure, a goal what it would like.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from _bench import Line

# Lines by the name of the part.
Lines = Mapping[str, Sequence[Line]]


@dataclass(frozen=True)
class Figure:
    """One figure. less: whether less is better. of: what stands behind the ratio."""

    name: str
    value: float
    bar: float | None = None
    goal: float | None = None
    unit: str = "x"
    less: bool = False
    of: str = ""

    def reaches(self, limit: float | None) -> bool:
        """Return whether the figure is as good as a limit."""
        if limit is None:
            return False
        return self.value <= limit if self.less else self.value >= limit

    @property
    def verdict(self) -> str:
        """Return goal, met or missed; "" without a bar."""
        if self.bar is None:
            return ""
        return "goal" if self.reaches(self.goal) else "met" if self.reaches(self.bar) else "missed"


Shows = Callable[[Lines, str], Iterable[Figure]]


def mid(found: Iterable[float]) -> float | None:
    """Return the median; None of nothing."""
    values = list(found)
    return statistics.median(values) if values else None


def samples(lines: Iterable[Line], **wanted: object) -> float | None:
    """Return the median of counted samples whose fields are as wanted."""
    return mid(
        line["value"] for line in lines
        if line.get("kind") == "sample" and line["at"]
        and all(line[name] == value for name, value in wanted.items())
    )  # fmt: skip


def ratio(
    name: str, ours: float | None, theirs: float | None, bar: float | None = None,
    goal: float | None = None, less: bool = False,
) -> Iterator[Figure]:  # fmt: skip
    """Yield how many times theirs ours is, if both are known."""
    if ours is not None and theirs:
        of = f"{ours:.4g} / {theirs:.4g}"
        yield Figure(name, ours / theirs, bar, goal, less=less, of=of)


def tests(lines: Lines, part: str) -> Iterator[Figure]:
    """Tests that failed, and how many there were."""
    for row in lines[part]:
        bad = row["failures"] + row["errors"]
        of = f"{row['tests'] - bad - row['skipped']} passed, {row['skipped']} skipped"
        yield Figure("tests that failed", bad, 0, 0, unit="", less=True, of=of)


# By share of the experts: what drafts must bring for code and structured text.
_DRAFT_BARS = {"100": (1.5, 2.2), "60": (1.3, 1.8), "25": (1.15, 1.4)}


def drafts(lines: Lines, part: str) -> Iterator[Figure]:
    """Drafted decoding over plain decoding: auto, and the best of fixed lengths."""
    rows = [row for row in lines[part] if "way" in row]
    off = [row["tps"] for row in rows if row["way"] == "off"]
    plain = statistics.mean(off) if off else None
    bars = _DRAFT_BARS.get(part.rpartition("-")[2], (None, None))
    idle = mid(row["tps"] for row in rows if row["way"] == "loaded, off")
    yield from ratio("drafters loaded, none used", idle, plain, 0.97, 0.985)
    for kind in dict.fromkeys(row["kind"] for row in rows if row["kind"]):
        mine = [row for row in rows if row["kind"] == kind and row["way"] != "loaded, off"]
        speeds = {row["way"]: row["at_rates"] for row in mine}
        auto, is_hopeless = speeds.pop("auto", None), kind == "hopeless"
        limits = (0.97, 0.99) if is_hopeless else bars
        yield from ratio(f"{kind}: auto over plain", auto, plain, *limits)
        for source in dict.fromkeys(way.split()[0] for way in speeds):
            way = max((w for w in speeds if w.startswith(source)), key=speeds.__getitem__)
            yield from ratio(f"{kind}: {way} over plain", speeds[way], plain)
        if speeds and not is_hopeless:
            way = max(speeds, key=speeds.__getitem__)
            yield from ratio(f"{kind}: auto over {way}", auto, speeds[way], 0.97, 1.0)


# By kind of text: what look-up must bring over plain decoding.
_LOOKUP_BARS = {
    "edit": (1.3, 2.0),
    "list": (1.3, 2.0),
    "mixed": (1.0, 1.3),
    "hopeless": (0.98, 1.0),
}


def lookup(lines: Lines, part: str) -> Iterator[Figure]:
    """Look-up over plain decoding of the same text."""
    by = {(row["kind"], row["way"]): row for row in lines[part]}
    for (kind, way), row in by.items():
        plain = by.get((kind, "off"))
        if plain and way != "off":
            shown = f"{kind}, {row['foretold']:.0%} foretold: {way} over plain"
            if row["draft_steps"]:
                shown += (
                    f" ({row['tokens_a_step']:g} tokens of {row['mean_rows']:g} rows, "
                    f"{row['draft_steps']} of {row['draft_steps'] + row['plain_steps']} steps)"
                )
            yield from ratio(shown, row["tps"], plain["tps"], *_LOOKUP_BARS.get(kind, (None, None)))


def measured(rows: Iterable[Line], unit: str = "") -> Iterable[tuple[str, str]]:
    """Return the settings and tests of samples, each pair once; unit: only those in it."""
    chosen = (row for row in rows if row.get("kind") == "sample" and unit in ("", row["unit"]))
    return dict.fromkeys((row["setting"], row["test"]) for row in chosen)


def _served(
    rows: Sequence[Line], server: str, what: str, field: str, **wanted: object
) -> float | None:
    """Return the median of a field of a server's lines."""
    return mid(
        row[field] for row in rows
        if row["server"] == server and row["what"] == what and field in row
        and all(row[name] == value for name, value in wanted.items())
    )  # fmt: skip


# Eight clients, and 16 or more, over llama-server: with all experts, and with some on the host.
_CLIENT_BARS = {"server-all": (1.8, 2.2), "server-60": (3.0, 4.0)}


def server(lines: Lines, part: str) -> Iterator[Figure]:
    """Many clients beside llama-server; the wait beside a long prompt; a second turn."""
    rows = lines[part]
    for n in sorted({row["clients"] for row in rows if row["what"] == "clients"}):
        mine = _served(rows, "moegraph", "clients", "tokens_per_s", clients=n)
        theirs = _served(rows, "llama-server", "clients", "tokens_per_s", clients=n)
        bars = _CLIENT_BARS.get(part, (None, None)) if n == 8 else (None, None)
        yield from ratio(f"{n} clients: tok/s over llama-server", mine, theirs, *bars)
        if mine is not None and theirs is None:
            yield Figure(f"{n} clients", mine, unit=" tok/s", of="llama-server: none")
    wait = _served(rows, "moegraph", "long prompt", "p99_over_usual")
    if wait is not None:
        name = "p99 between tokens beside a long prompt, over the usual"
        yield Figure(name, wait, 2.0, 1.6, less=True)
    for what, field, bars in (
        ("long prompt", "first_s", (None, None)), ("second turn", "second_turn_s", (1.0, 0.5)),
        ("chat beside a prompt", "short_first_s", (None, None)),
    ):  # fmt: skip
        mine, theirs = (_served(rows, who, what, field) for who in ("moegraph", "llama-server"))
        name = f"{what}: time to the first token over llama-server's"
        yield from ratio(name, mine, theirs, bars[0], bars[1], less=True)
    mine, theirs = (
        _served(rows, who, "memory", "device_gib") for who in ("moegraph", "llama-server")
    )
    yield from ratio("peak of device memory over llama-server's", mine, theirs, less=True)


def run_rows(lines: Lines, part: str) -> Iterator[Figure]:
    """Generations through sampler and text over the loop of `moegraph bench`."""
    rows = lines[part]
    loop = mid(row["avg_ts"] for row in rows if row["test"].startswith("tg"))
    for row in rows:
        if row["test"].startswith("run"):
            yield from ratio(row["test"], row["avg_ts"], loop, 0.97, 1.0)


def before(lines: Lines, part: str) -> Iterator[Figure]:
    """Each test of this tree over the older one."""
    times = set(measured(lines[part], "ms"))
    for setting, test in measured(lines[part]):
        old, new = (
            samples(lines[part], setting=setting, test=test, system=name)
            for name in ("before", "after")
        )
        if (setting, test) in times:
            old, new = new, old
        yield from ratio(f"{setting}, {test}: after over before", new, old, 0.98, 1.0)


# Bars beside llama-bench: part, pattern of the test, what follows the name of our system.
_UPSTREAM_BARS = (
    ("whole", ".*", "", (1.6, None)), ("whole", ".*", "argmax", (2.3, 3.0)),
    ("residency-none", "tg.*", "sticky", (1.5, 2.0)), ("prompts", "pp8192", "", (4.0, 4.5)),
    ("depth", "pp512 @.*", "", (1.2, 1.6)), ("depth", "pp8192", "", (1.0, 1.15)),
    ("depth", "tg.*", "", (1.85, 2.2)),
)  # fmt: skip


def upstream(lines: Lines, part: str) -> Iterator[Figure]:
    """Each test over llama-bench, both at the -ub that is best for them."""
    best: dict[tuple[str, str, str], float] = {}
    rows = [row for row in lines[part] if row.get("kind") == "sample" and row["at"]]
    for setting, test, system in dict.fromkeys(
        (x["setting"], x["test"], x["system"]) for x in rows
    ):
        speed = samples(rows, setting=setting, test=test, system=system)
        place = setting.rpartition("ub ")[0].strip(" ,") or "all experts"
        if speed is not None and "sweep" not in setting:
            key = place, test, system
            best[key] = max(speed, best.get(key, 0.0))
    for (place, test, system), speed in best.items():
        if system == "upstream":
            continue
        way = system.partition(", ")[2]
        bars = next(
            (
                bars
                for name, pattern, ours, bars in _UPSTREAM_BARS
                if (name, ours) == (part, way) and re.fullmatch(pattern, test)
            ),
            (None, None),
        )
        name = ", ".join(filter(None, (test, place, way)))
        yield from ratio(
            f"{name}: over llama-bench", speed, best.get((place, test, "upstream")), *bars
        )


def sequences(lines: Lines, part: str) -> Iterator[Figure]:
    """Sequences that decode together over llama-batched-bench."""
    theirs = {row["pl"]: row["speed_tg"] for row in lines[part] if "speed_tg" in row}
    ours = {
        (setting, test): samples(lines[part], setting=setting, test=test)
        for setting, test in measured(lines[part])
    }
    for (setting, test), speed in ours.items():
        n = int(test.partition(" ")[2])
        if setting == "60 %":
            bar = 4.7 if n <= 8 else 4.0
            name = f"{n} sequences at 60 %: over llama-batched-bench"
            yield from ratio(name, speed, theirs.get(n), bar, 6.0)
    eight, most = ours.get(("0 %", "seqs 8")), ours.get(("0 %", "seqs 32"))
    yield from ratio("no expert resident: 32 sequences over 8", most, eight, 1.5, 2.0)


# Passes of 8 and 16 rows over llama-bench's.
_ROW_BARS = {"25 %": (4.5, 6.0), "60 %": (6.0, 8.0)}


def rows_alone(lines: Lines, part: str) -> Iterator[Figure]:
    """Decoding by share of the experts, and passes of a few rows over llama-bench's."""
    rows = [row for row in lines[part] if row.get("kind") == "sample"]
    theirs: dict[tuple[int, int], float] = {}  # ms, with the number of threads that is best
    for row in lines[part]:
        if row.get("n_prompt"):
            key = row["n_cpu_moe"], row["n_prompt"]
            theirs[key] = min(theirs.get(key, 1e9), row["n_prompt"] / row["avg_ts"] * 1e3)
    shares = dict(zip(("whole", "60 %", "25 %"), sorted({ncmoe for ncmoe, _ in theirs})))
    whole = samples(rows, setting="whole", unit="tok/s")
    for setting in ("60 %", "25 %", "0 %"):
        bars = (0.90, 0.97) if setting == "60 %" else (None, None)
        speed = samples(rows, setting=setting, unit="tok/s")
        yield from ratio(f"decode at {setting}: over all experts", speed, whole, *bars)
    for setting, test in measured(rows, "ms"):
        n = int(test.partition(" ")[2])
        bars = _ROW_BARS.get(setting, (None, None)) if n in (8, 16) else (None, None)
        mine = samples(rows, setting=setting, test=test)
        yield from ratio(f"{n} rows at {setting}: speed over llama-bench's",
                         theirs.get((shares.get(setting, -1), n)), mine, *bars)  # fmt: skip


def first(lines: Lines, part: str) -> Iterator[Figure]:
    """From the start of a process to its first text, over llama-completion's time."""
    rows = [row for row in lines[part] if "system" in row and "seconds" in row]
    keys = dict.fromkeys((row["n_prompt"], row["system"]) for row in rows)
    by = {
        key: mid(r["seconds"] for r in rows if (r["n_prompt"], r["system"]) == key) for key in keys
    }
    for n in dict.fromkeys(n for n, _ in by):
        ours, theirs = by.get((n, "moegraph")), by.get((n, "upstream"))
        name = f"first text, prompt of {n}: time over llama-completion's"
        yield from ratio(name, ours, theirs, 1.3, 1.0, less=True)
    for row in lines[part]:
        if "load_ms" in row:
            of = ", ".join(f"{at} {row[at + '_ms']:.0f}" for at in ("process", "load", "prefill"))
            name = f"moegraph's first token, prompt of {row['n_prompt']}"
            yield Figure(name, row["avg_ns"] / 1e6, unit=" ms", of=of)
