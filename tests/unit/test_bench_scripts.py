"""The bench scripts: their command lines, raw lines, tables and traces.

Runs from end to end are in tests/native/test_bench_runs.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))

import _bench
import _bench_worker
import bench_tables
import profile_token

from moegraph.placement.generator import PRESETS, RoutingModel, generate_trace
from moegraph.placement.identity import RouterShape

FAKE = str(ROOT / "tests" / "helpers" / "fake_llama_bench.py")
BIG = RouterShape(40, 256, 8)
SCRIPT_FILES = sorted(p for p in SCRIPTS.iterdir() if p.is_file() and p.name[0] != "_")


# Runs scripts one after another, each as its own call would: most of a call is importing.
SEVERAL = """
import contextlib, io, json, runpy, sys
calls, found = json.load(sys.stdin), []
sys.path[0] = calls["folder"]
for script, *args in calls["calls"]:
    sys.argv, code = [f"{calls['folder']}/{script}", *args], 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(
        io.StringIO()
    ) as err:
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            code = end.code
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
    found.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""


def run(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / script), *args], capture_output=True, text=True, check=False
    )


def run_several(calls: Sequence[Sequence[str]]) -> list[tuple[int, str, str]]:
    """Return status, output and errors of calls of scripts, made by one process."""
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL], capture_output=True, text=True, check=True,
        input=json.dumps({"folder": str(SCRIPTS), "calls": calls}),
    )  # fmt: skip
    return [(code or 0, out, errors) for code, out, errors in json.loads(done.stdout)]


def test_a_script_has_help_that_begins_with_its_purpose() -> None:
    found = run_several([[path.name, "--help"] for path in SCRIPT_FILES])
    for path, (code, out, errors) in zip(SCRIPT_FILES, found, strict=True):
        assert code == 0, (path, errors)
        purpose = path.read_text().split('"""')[1].splitlines()[0]
        assert purpose.split(".")[0] in " ".join(out.split()), path


@pytest.mark.parametrize("path", SCRIPT_FILES, ids=lambda path: path.name)
def test_a_script_can_be_called_by_its_name(path: Path) -> None:
    assert path.read_text().startswith("#!/usr/bin/env python3\n")
    assert os.access(path, os.X_OK)


def test_every_script_is_named_on_a_page() -> None:
    folders = (ROOT, ROOT / "docs", ROOT / "docs" / "benchmarks", ROOT / "patches")
    pages = "".join(page.read_text() for folder in folders for page in folder.glob("*.md"))
    assert len(SCRIPT_FILES) > 20
    assert [path.name for path in SCRIPT_FILES if f"scripts/{path.name}" not in pages] == []


WRONG: list[tuple[str, list[str], str]] = [
    ("bench_trees.py", ["tiny"], "required: SYSTEM"),
    ("bench_trees.py", ["nowhere", "a=."], "nowhere does not exist"),
    ("bench_trees.py", ["tiny", "a"], "'a' is not NAME=FOLDER"),
    ("bench_trees.py", ["tiny", "a=/nowhere"], "of a folder that exists"),
    ("bench_trees.py", ["tiny", "a=/tmp,X"], "is not NAME=FOLDER[,VAR=VALUE"),
    ("bench_trees.py", ["tiny", f"a={ROOT}", f"a={ROOT}"], "two systems have one name"),
    ("bench_trees.py", ["tiny", f"a={ROOT / 'docs'}"], "has no folder moegraph"),
    ("bench_trees.py", ["tiny", f"a={ROOT}", "--settings", "101"], "'101' is not a percentage"),
    ("bench_trees.py", ["tiny", f"a={ROOT}", "--samples", "0"], "not a whole number of 1 or more"),
    ("bench_upstream.py", ["tiny"], "required: --llama-bench"),
    ("bench_upstream.py", ["tiny", "--llama-bench", "/nowhere"], "/nowhere does not exist"),
    ("bench_upstream.py", ["tiny", "--llama-bench", FAKE, "--device", "cpu", "--ncmoe", "1",
                           "--traces", "none"], "none: cannot read the trace"),
    ("bench_tables.py", ["--take", "/nowhere"], "/nowhere does not exist"),
    ("bench_tables.py", ["--take", str(ROOT / "docs"), "--raw", "/dev/null"], "has no results of"),
    ("bench_drafts.py", ["tiny", "--device", "cpu", "--vram", "much"], "vram is 'much'"),
    ("profile_token.py", ["tiny", "--ncu", "/nowhere"], "there is no /nowhere"),
    ("profile_host.py", ["tiny", "--tokens", "0"], "not a whole number of 1 or more"),
    ("profile_host.py", ["tiny", "--share", "60"], "--share is for --prompt"),
    ("make_trace.py", ["t", "--preset", "round"], "invalid choice: 'round'"),
    ("make_trace.py", ["t", "--used", "300"], "--used at most --experts"),
]  # fmt: skip


def test_a_wrong_argument_is_named_in_one_line() -> None:
    found = run_several([(script, *args) for script, args, _ in WRONG])
    for (script, args, said), (code, out, errors) in zip(WRONG, found, strict=True):
        assert (code, out) == (2, ""), (script, args, errors)
        assert said in errors and errors.count("\n") == 1, (script, args, errors)
        assert errors.startswith(f"{script}: ")


def sample(system: str, at: int, value: float, **more: object) -> _bench.Line:
    return {
        "kind": "sample", "run": "r", "setting": "ub 1", "test": "tg8", "system": system, "at": at,
        "value": value, "unit": "tok/s", **more,
    }  # fmt: skip


def test_arguments_are_published_without_folders() -> None:
    given = ["a=/home/me/tree,X=1", "--out", "../x/rows.jsonl", ".", "/a/b/m.gguf", "8192"]
    assert _bench.plain_paths(given) == ["a=tree,X=1", "--out", "rows.jsonl", ".", "m.gguf", "8192"]


def test_the_pages_say_what_the_raw_lines_say() -> None:
    pages = [page for pages in bench_tables.RUNS.values() for page in pages]
    assert all(bench_tables.marked(page.read_text()) for page in pages)
    assert all(raw.is_file() for raw in bench_tables.RUNS)
    done = run("bench_tables.py", "--check")
    assert done.returncode == 0, done.stderr


MEASURED = {
    "commit": "a" * 40, "patchset": "b" * 16, "model": "35b.gguf", "model_bytes": 24e9,
    "machine": {"gpu": ["A card"], "n_cpus": 16, "cpu": "A CPU", "host_bytes": 2**37},
}  # fmt: skip


def measured(folder: Path, *cards: dict[str, object]) -> Path:
    """Write the results of parts `whole` and `server-all`, as measure_card keeps them."""
    decoded = {"setting": "ub 512", "test": "tg128"}
    lines = [
        *(sample("upstream", at, 200.0, **decoded) for at in range(3)),
        *(sample("whole", at, tps, **decoded) for at, tps in enumerate((1.0, 390.0, 410.0))),
        {"kind": "load", "run": "r", "setting": "ub 512", "system": "whole", "seconds": 2.0},
        *({"kind": "memory", "run": "r", "setting": "ub 512", "system": system,
           "device_driver_bytes": n << 30} for system, n in (("upstream", 21), ("whole", 20))),
    ]  # fmt: skip
    speeds = (("moegraph", 1, 9.0), ("moegraph", 8, 900.0), ("llama-server", 8, 300.0))
    died = "/home/me/llama-server: no answer; the server ended with exit code 134: a / b"
    served: list[dict[str, object]] = [
        {"server": "llama-server", "what": "clients", "clients": 16, "error": died}
    ]
    served += [
        {"server": who, "what": "clients", "clients": n, "tokens_per_s": tps}
        for who, n, tps in speeds
    ]  # fmt: skip
    folder.mkdir()
    ends = {"state": "done", "seconds": 1.0, "why": ""}
    rows: list[dict[str, object]] = [{"card": card, "t": 1.8e9} for card in cards]
    for name, found in (("whole", lines), ("server-all", served), ("depth", served)):
        about = {"part": name, "run": 1}
        rows += [{**about, "line": line} for line in found] + [{**about, **ends}]
    (folder / "results.jsonl").write_text("".join(map(_bench.json_line, rows)))
    return folder


PAGE = """Words.
<!-- table: about whole rows -->
<!-- end -->
<!-- table: readme whole server-all -->
old
<!-- end -->
"""


def test_a_page_shows_one_run(tmp_path: Path) -> None:
    page, raw = tmp_path / "page.md", tmp_path / "card.jsonl"
    page.write_text(PAGE)
    given = ["--pages", str(page), "--raw", str(raw)]
    folder = measured(tmp_path / "out", MEASURED)
    assert run("bench_tables.py", *given, "--take", str(folder)).returncode == 0
    text = page.read_text()
    assert "| decoding, everything on the GPU | 200 (21.0 GiB) | 400 (20.0 GiB) | 2.0x |" in text
    assert "| 8 clients of the server, everything on the GPU | 300 | 900 | 3.0x |" in text
    assert "at commit `aaaaaaaaaaaa` (patch set `bbbbbbbbbbbbbbbb`), beside llama.cpp" in text
    assert "old" not in text
    assert "Not measured in this run: rows." in " ".join(text.split())
    assert "depth" not in raw.read_text(), "no page names it"
    assert (
        '"llama-server: no answer; the server ended with exit code 134: a / b"' in raw.read_text()
    )
    assert run("bench_tables.py", *given, "--check").returncode == 0
    page.write_text(text.replace("400", "500"))
    done = run("bench_tables.py", *given, "--check")
    assert done.returncode == 1 and "page.md: not what the raw lines say" in done.stderr


def test_a_page_shows_no_two_commits(tmp_path: Path) -> None:
    folder = measured(tmp_path / "out", MEASURED, {**MEASURED, "commit": "c" * 40})
    with pytest.raises(_bench.BenchError, match="has results of several commits"):
        bench_tables.take(folder, tmp_path / "card.jsonl", ["whole"])
    assert not (tmp_path / "card.jsonl").exists()


def test_a_page_names_the_rival_and_shows_its_better_way(tmp_path: Path) -> None:
    place, memory = {"setting": "ncmoe 16, ub 512"}, {"kind": "memory", "run": "r"}
    speeds = {
        "b11549 -ncmoe": (95.0, 699.0), "b11549 cache": (129.0, 600.0), "moegraph": (387.0, 6990.0),
    }  # fmt: skip
    lines = [
        sample(system, 1, value, **place, test=test)
        for system, both in speeds.items() for test, value in zip(("tg128", "pp512"), both)
    ]  # fmt: skip
    for at, system in enumerate(speeds):
        lines.append({**memory, **place, "system": system, "device_peak_bytes": (14 + at) << 30})
    load = {"kind": "load", "run": "r", "system": "moegraph", "share": 0.59, "ncmoe": 16}
    found = bench_tables.Run(MEASURED, "", {"rival-60": [*lines, {**load, **place}]})
    shown = bench_tables.readme(found, ["rival-60"])
    cells = "| 129 (15.0 GiB) | 387 (16.0 GiB) | 3.0x |"
    assert f"| decoding, 59% of the experts, own routing, beside b11549 cache {cells}" in shown
    assert "own routing, beside b11549 -ncmoe | 699 | 6,990 | 10.0x |" in shown
    beside = "beside llama.cpp 0c1e57098 and b11549 without"
    assert beside in " ".join(bench_tables.about(found, []).split())


class Reader:
    """Notes the ids that it reads, as an engine."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.device = self

    def reset(self) -> None: ...
    def synchronize(self) -> None: ...
    def expert_stats(self) -> None: ...

    def prefill(self, ids: Sequence[int], greedy: bool = False) -> None:
        self.ids += map(int, ids)

    forward = prefill


def test_a_turn_reads_the_ids_of_llama_batched_bench() -> None:
    """Noted from its calls of rand(), modulo 1,000, after the 16 of its warm-up."""
    side, reader = _bench_worker.Side(), Reader()
    side.engine, side.n_vocab = reader, 1000
    for at in (1, 0):
        side.turn(at, 2, 1)
    assert reader.ids == [736, 211, 368, 540, 426, 172]


def test_the_preset_of_the_published_tables_gives_the_same_ids() -> None:
    trace = generate_trace(BIG, 64 + 5 * 128)
    assert trace.sha256.startswith("c349334d5f4c1403") and PRESETS["sticky"] == RoutingModel()


def test_the_kernels_of_tokens_are_counted() -> None:
    metric = "gpu__time_duration.sum"
    parts = ["void sum<(int)4, (bool)1>(args)", "void topk_moe_cuda<(int)256>(float *, int)"]
    attn = ["moegraph_attn_kernel(moegraph_attn_args)"]
    names = [*parts, *parts, *attn, *parts, "head(float const *)"] * 2
    lines = ["==PROF== Connected", '"ID","Kernel Name","Grid Size","Metric Name","Metric Value"']
    lines += [f'"{i}","{x}","({len(x)}, 1, 1)","{metric}","1,500"' for i, x in enumerate(names)]
    launches = profile_token.parse(lines)
    assert launches[0] == ("sum<4, 1>", "31,1,1", 1.5)
    rows = {row[0]: row[2:] for row in profile_token.by_kernel(launches, 2)}
    assert rows["topk_moe_cuda<256>"] == ["3", "1.50", "4.5", "37.5%"]
    assert rows["head"][0] == "1" and rows["all"] == ["8", "1.50", "12.0", "100.0%"]
    assert profile_token.by_layer(launches, 2) == [
        ["another mixer", "1", "2 (2 .. 2)", "3.0 (3.0 .. 3.0)"],
        ["attention", "1", "3 (3 .. 3)", "4.5 (4.5 .. 4.5)"],
        ["around the head", "0.5", "3 (3 .. 3)", "4.5 (4.5 .. 4.5)"],
    ]
