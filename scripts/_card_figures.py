"""Figures that the parts of scripts/measure_card show, from their raw lines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from _bench import Line

# Lines by the name of the part.
Lines = Mapping[str, Sequence[Line]]


@dataclass(frozen=True)
class Figure:
    """One figure. of: what stands behind the ratio."""

    name: str
    value: float
    unit: str = "x"
    of: str = ""

    @property
    def shown(self) -> str:
        """Return the value as a table has it."""
        return (f"{self.value:.2f}" if self.unit == "x" else f"{self.value:.4g}") + self.unit


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


def ratio(name: str, ours: float | None, theirs: float | None) -> Iterator[Figure]:
    """Yield how many times theirs ours is, if both are known."""
    if ours is not None and theirs:
        yield Figure(name, ours / theirs, of=f"{ours:.4g} / {theirs:.4g}")


def tests(lines: Lines, part: str) -> Iterator[Figure]:
    """Tests that failed, and how many there were."""
    for row in lines[part]:
        bad = row["failures"] + row["errors"]
        of = f"{row['tests'] - bad - row['skipped']} passed, {row['skipped']} skipped"
        yield Figure("tests that failed", bad, unit="", of=of)


def drafts(lines: Lines, part: str) -> Iterator[Figure]:
    """Drafted decoding over plain decoding: auto, and the best of fixed lengths."""
    rows = [row for row in lines[part] if "way" in row]
    off = [row["tps"] for row in rows if row["way"] == "off"]
    plain = statistics.mean(off) if off else None
    idle = mid(row["tps"] for row in rows if row["way"] == "loaded, off")
    yield from ratio("drafters loaded, none used", idle, plain)
    for kind in dict.fromkeys(row["kind"] for row in rows if row["kind"]):
        mine = [row for row in rows if row["kind"] == kind and row["way"] != "loaded, off"]
        speeds = {row["way"]: row["at_rates"] for row in mine}
        auto = speeds.pop("auto", None)
        yield from ratio(f"{kind}: auto over plain", auto, plain)
        for source in dict.fromkeys(way.split()[0] for way in speeds):
            way = max((w for w in speeds if w.startswith(source)), key=speeds.__getitem__)
            yield from ratio(f"{kind}: {way} over plain", speeds[way], plain)
        if speeds and kind != "hopeless":
            way = max(speeds, key=speeds.__getitem__)
            yield from ratio(f"{kind}: auto over {way}", auto, speeds[way])


def drafts_clients(lines: Lines, part: str) -> Iterator[Figure]:
    """Several clients with each drafter over the same without."""
    rows = lines[part]
    off = {(row["clients"], row["kind"]): row["tps"] for row in rows if row["way"] == "off"}
    for row in rows:
        if row["way"] != "off":
            n, kind = row["clients"], row["kind"]
            of = row["drafts"]["tokens_per_step"]
            name = f"{n} clients, {kind}: {row['way']} over none ({of:.2f} tokens a step)"
            yield from ratio(name, row["tps"], off.get((n, kind)))


def tiers(lines: Lines, part: str) -> Iterator[Figure]:
    """Experts in three tiers: speed, its share of the disk's bound, what was swapped."""
    for row in (row for row in lines[part] if row.get("kind") == "tiers"):
        of = f"{row['file_bytes_a_token'] / 1e6:.3g} MB a token"
        yield Figure(f"decoding, {row['limit']}", row["tps"], unit=" tok/s", of=of)
        disk = max(row["disk_bytes_per_s"]) / 1e9
        yield Figure("of the disk's bound", row["of_bound"], of=f"{disk:.3g} GB/s")
        swapped = row["swapped_bytes"]
        if swapped is not None:
            yield Figure("swapped", swapped / 1e6, unit=" MB")


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
            yield from ratio(shown, row["tps"], plain["tps"])


def measured(rows: Iterable[Line], unit: str = "") -> Iterable[tuple[str, str]]:
    """Return the settings and tests of samples, each pair once; unit: only those in it."""
    chosen = (row for row in rows if row.get("kind") == "sample" and unit in ("", row["unit"]))
    return dict.fromkeys((row["setting"], row["test"]) for row in chosen)


def server(lines: Lines, part: str) -> Iterator[Figure]:
    """Many clients beside llama-server; the wait beside a long prompt; a second turn."""
    rows = lines[part]

    def both(what: str, field: str, **wanted: object) -> tuple[float | None, float | None]:
        mine, theirs = (
            mid(
                row[field] for row in rows
                if (row["server"], row["what"]) == (who, what) and field in row
                and all(row[name] == value for name, value in wanted.items())
            )
            for who in ("moegraph", "llama-server")
        )  # fmt: skip
        return mine, theirs

    for n in sorted({row["clients"] for row in rows if row["what"] == "clients"}):
        mine, theirs = both("clients", "tokens_per_s", clients=n)
        yield from ratio(f"{n} clients: tok/s over llama-server", mine, theirs)
        if mine is not None and theirs is None:
            yield Figure(f"{n} clients", mine, unit=" tok/s", of="llama-server: none")
    wait, _ = both("long prompt", "p99_over_usual")
    if wait is not None:
        yield Figure("p99 between tokens beside a long prompt, over the usual", wait)
    for what, field in (
        ("long prompt", "first_s"),
        ("second turn", "second_turn_s"),
        ("chat beside a prompt", "short_first_s"),
    ):
        name = f"{what}: time to the first token over llama-server's"
        yield from ratio(name, *both(what, field))
    yield from ratio("peak of device memory over llama-server's", *both("memory", "device_gib"))


def mixed(lines: Lines, part: str) -> Iterator[Figure]:
    """Clients that ask again and again: tokens a second over another server's, and waits."""
    rows = [row for row in lines[part] if "p99_over_p50" in row]

    def of(what: str, server: str, field: str) -> float | None:
        return mid(row[field] for row in rows if (row["what"], row["server"]) == (what, server))

    servers = dict.fromkeys(row["server"] for row in rows)
    for what in dict.fromkeys(row["what"] for row in rows):
        speed = of(what, "moegraph", "tokens_per_s")
        for other in servers:
            if other != "moegraph":
                name = f"{what}: tok/s over {other}"
                yield from ratio(name, speed, of(what, other, "tokens_per_s"))
        for server in servers:
            for field, shown in (("between", "between tokens"), ("first", "first token")):
                name = f"{what}, {server}: {shown}, ms, p99 over p50"
                each = (of(what, server, f"{field}_{share}_ms") for share in ("p99", "p50"))
                yield from ratio(name, *each)


def run_rows(lines: Lines, part: str) -> Iterator[Figure]:
    """Generations through sampler and text over the loop of `moegraph bench`."""
    rows = lines[part]
    loop = mid(row["avg_ts"] for row in rows if row["test"].startswith("tg"))
    for row in rows:
        if row["test"].startswith("run"):
            yield from ratio(row["test"], row["avg_ts"], loop)


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
        yield from ratio(f"{setting}, {test}: after over before", new, old)


def upstream(lines: Lines, part: str) -> Iterator[Figure]:
    """Each test over llama-bench, or over ways of the rival; all at the -ub best for them."""
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
    ours = {key for key in best if key[2].startswith(("moegraph", "whole"))}
    for (place, test, system), speed in best.items():
        for other in (key for key in best if key[:2] == (place, test) and key not in ours):
            if ", -lm" in other[2]:
                continue  # the slower of two ways to load
            if (place, test, system) in ours:
                name = ", ".join(filter(None, (test, place, system.partition(", ")[2])))
                what = "llama-bench" if other[2] == "upstream" else other[2]
                yield from ratio(f"{name}: over {what}", speed, best[other])


def sequences(lines: Lines, part: str) -> Iterator[Figure]:
    """Sequences that decode together over llama-batched-bench."""
    theirs: dict[int, list[float]] = {}
    for row in lines[part]:
        if "speed_tg" in row:
            theirs.setdefault(row["pl"], []).append(row["speed_tg"])
    ours = {
        (setting, test): samples(lines[part], setting=setting, test=test)
        for setting, test in measured(lines[part])
    }
    for (setting, test), speed in ours.items():
        n = int(test.partition(" ")[2])
        if setting != "0 %" and n in theirs:  # of several times, the first does not count
            name = f"{n} sequences at {setting}: over llama-batched-bench"
            yield from ratio(name, speed, mid(theirs[n][1:] or theirs[n]))
    eight, most = ours.get(("0 %", "seqs 8")), ours.get(("0 %", "seqs 32"))
    yield from ratio("no expert resident: 32 sequences over 8", most, eight)


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
        speed = samples(rows, setting=setting, unit="tok/s")
        yield from ratio(f"decode at {setting}: over all experts", speed, whole)
    for setting, test in measured(rows, "ms"):
        n = int(test.partition(" ")[2])
        mine = samples(rows, setting=setting, test=test)
        yield from ratio(f"{n} rows at {setting}: speed over llama-bench's",
                         theirs.get((shares.get(setting, -1), n)), mine)  # fmt: skip


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
        yield from ratio(name, ours, theirs)
    for row in lines[part]:
        if "load_ms" in row:
            of = ", ".join(f"{at} {row[at + '_ms']:.0f}" for at in ("process", "load", "prefill"))
            name = f"moegraph's first token, prompt of {row['n_prompt']}"
            yield Figure(name, row["avg_ns"] / 1e6, unit=" ms", of=of)
