"""The bench scripts from end to end: the shipped model on the CPU, beside a stand-in llama-bench.

What they measure here means nothing; what they take, note and print is what is tested.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
FAKE = ROOT / "tests" / "helpers" / "fake_llama_bench.py"
sys.path.insert(0, str(SCRIPTS))

import _bench
import bench_rival
import bench_upstream

COMMON = ["--device", "cpu", "--threads", "1"]
SHORT = ["--samples", "2", "--gen", "4"]
PAIR = ["--llama-bench", str(FAKE), *COMMON, *SHORT]


def run(script: str, *args: object, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script; its standard error is quiet or one line when it fails."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), *map(str, args)], cwd="/", check=False,
        capture_output=True, text=True, env={**os.environ, **env}, timeout=120,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def keys(lines: Sequence[dict[str, Any]], **wanted: object) -> set[tuple[str, str, str]]:
    return {
        (x["setting"], x["test"], x["system"]) for x in lines
        if x["kind"] == "sample" and all(x[name] == value for name, value in wanted.items())
    }  # fmt: skip


PROGRAM = """
import json, pathlib, sys
tree, given = pathlib.Path(__file__).parents[1].name, sys.argv
with open(given[given.index("--out") + 1], "w") as out:
    print(json.dumps({"kind": "code", "way": "auto", "tps": 2.0, "at_rates": len(tree)}), file=out)
"""


def test_programs_of_two_trees_take_turns(tmp_path: Path) -> None:
    out, trees = tmp_path / "rows.jsonl", [tmp_path / name for name in ("long", "old")]
    for tree in trees:
        (tree / "scripts").mkdir(parents=True)
        (tree / "scripts" / "bench_drafts.py").write_text(PROGRAM)
    systems = [f"{name}={tree}" for name, tree in zip(("after", "before"), trees)]
    given = ("bench_trees.py", "tiny", *systems, "--samples", 2, "--programs", "drafts")
    run(*given, "--out", out)
    samples = [x for x in lines_of(out) if x["kind"] == "sample"]
    assert [(x["system"], x["at"], x["value"]) for x in samples] == [
        ("after", 1, 4), ("before", 1, 3), ("before", 2, 3), ("after", 2, 4),
    ]  # fmt: skip
    (trees[1] / "scripts" / "bench_drafts.py").write_text("raise SystemExit('no memory')")
    assert run(*given, code=2).stderr.endswith("old: bench_drafts.py: no memory\n")


def test_two_trees_take_turns_and_every_sample_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = run(
        "bench_trees.py", "tiny", f"before={ROOT}", f"after={ROOT},MOEGRAPH_DEBUG=0", *COMMON,
        *SHORT, "--settings", "whole", "50", "--rows", 2, "--prompt", 16, "--repeat", 2,
        "--warm", 2, "--ubatch", 16, "--out", out,
    )  # fmt: skip
    lines = lines_of(out)
    tests = {(s, t) for s in ("whole", "50 %") for t in ("tg4", "rows 2", "pp16")}
    assert keys(lines) == {(*test, system) for test in tests for system in ("before", "after")}
    samples = [x for x in lines if x["kind"] == "sample"]
    for key in sorted(tests):
        mine = [x for x in samples if (x["setting"], x["test"]) == key]
        assert [x["at"] for x in mine] == [0, 0, 1, 1, 2, 2]
        turns = [x["system"] for x in mine]
        assert turns[:2] == turns[4:] == turns[3:1:-1], "the order turns round"
    systems_noted = [x for x in lines if x["kind"] == "system"]
    assert all(len(x["patchset"]) == 16 and x["commit"] for x in systems_noted)
    assert str(ROOT) not in out.read_text(), "raw lines are published, paths are not"
    partial = [x for x in samples if x["setting"] == "50 %" and x["test"] == "tg4"]
    assert {x["experts"]["n_passes"] for x in partial} == {4}
    by_turn = {(x["at"], x["system"]): x["experts"]["misses"] for x in partial}
    for at in (0, 1, 2):
        assert by_turn[at, "before"] == by_turn[at, "after"], "both replay the same routing"
    assert done.stdout.count("\n| ") == 1 + 2 * 3 * 2 and "times before" in done.stdout


def test_llama_bench_that_fails_ends_the_run_in_one_line() -> None:
    failed = run("bench_upstream.py", "tiny", *PAIR, code=2, FAKE_LLAMA_BENCH="fail")
    assert failed.stderr == (
        "bench_upstream.py: fake_llama_bench ended with exit code 1: error: failed to load model\n"
    )


def test_both_sides_run_the_same_tests_with_the_same_ubatch(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    run("bench_upstream.py", "tiny", *PAIR, "--prompt", 24, "--depth", 0, 8, "--ubatch", 16,
        32, "--out", out)  # fmt: skip
    lines = lines_of(out)
    for system in ("upstream", "whole"):
        assert {key[:2] for key in keys(lines, system=system)} == {
            ("ub 16", "pp24"), ("ub 16", "tg4"), ("ub 16", "pp24 @ d8"), ("ub 16", "tg4 @ d8"),
            ("ub 32", "pp24"), ("ub 32", "pp24 @ d8"),
        }  # fmt: skip
    for system in ("whole, argmax", "whole, sampled"):
        assert keys(lines, system=system) == {("ub 16", "tg4", system)}
    assert {x["row"]["n_ubatch"] for x in lines if x["kind"] == "upstream"} == {16, 32}
    assert all(x["row"]["n_threads"] == 1 for x in lines if x["kind"] == "upstream")
    assert lines[0]["kind"] == "run" and lines[0]["commit"]
    memory = [x for x in lines if x["kind"] == "memory"]
    assert all(x["VmHWM"] > 1 << 20 for x in memory) and len(memory) == 4


RESIDENCY = [
    *PAIR, "--warm", 4, "--prompt", 16, "--ubatch", 16,
    "--traces", "sticky", "flat",
]  # fmt: skip


def test_experts_that_do_not_fit(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    run("bench_upstream.py", "tiny", *RESIDENCY, "--ncmoe", 0, 3, 5, "--sweep", 1, 2, "--out", out)
    lines = lines_of(out)
    for n in (0, 3, 5):
        setting = f"ncmoe {n}, ub 16"
        found = {key[1:] for key in keys(lines, setting=setting)}
        decode = ["upstream", "moegraph, sampled, sticky"]
        decode += [f"moegraph, {x}{t}" for x in ("", "argmax, ") for t in ("sticky", "flat")]
        pairs = {("pp16", system) for system in ("upstream", "moegraph")}
        slower = {("tg4", "upstream, -lm none")} if n else set()
        assert found == {("tg4", system) for system in decode} | pairs | slower
    loads = [x for x in lines if x["kind"] == "load"]
    assert [sum(x["n_slots"]) for x in loads] == [256, 160, 96]
    upstream = [x for x in lines if x["kind"] == "upstream"]
    assert {x["row"]["n_threads"] for x in upstream} == {2}, "the quickest of the sweep"
    steps = [x["step"] for x in lines if x["kind"] == "sample" and "step" in x][:12]
    each = 4 + 2 * 3 * 4
    assert steps == [*range(4, each, 4), *range(each + 4, 2 * each, 4)], "traces do not overlap"


@pytest.mark.parametrize("mib, share", [(12, 0.0), (300, None)])
def test_moegraph_gets_the_device_memory_that_llama_bench_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mib: int, share: float | None
) -> None:
    """As --vram; where that is too little even for no expert, with none, and it is said so."""
    used = iter([0])
    monkeypatch.setattr(_bench, "_INTERVAL_S", 0.01)
    monkeypatch.setattr(_bench, "used_device_bytes", lambda: next(used, mib << 20))
    out = tmp_path / "rows.jsonl"
    argv = ["x", "tiny", *map(str, RESIDENCY), "--ncmoe", "4", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    assert _bench.main(bench_upstream.parser(), bench_upstream.compare) == 0
    lines = lines_of(out)
    (load,) = (x for x in lines if x["kind"] == "load")
    refused = [x for x in lines if x["kind"] == "refused"]
    assert load["budget"] == mib << 20
    if share == 0.0:
        assert load["share"] == 0.0 and len(refused) == 1
    else:
        assert load["share"] > 0.0 and not refused


RIVAL = [
    "--batched-bench", str(FAKE), "--device", "cpu", *SHORT, "--prompt", "16", "--ubatch", "16",
]  # fmt: skip


def test_the_rival_without_a_device_has_no_cache(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    for more in ([], ["--sweep", 1, 2, "--ncmoe", 3]):
        run("bench_rival.py", "tiny", *RIVAL, *more, "--out", out)
    lines, tests = lines_of(out), ("pp16", "tg4")
    assert keys(lines, setting="ub 16") == {
        ("ub 16", test, system) for test in tests for system in ("b11549", "whole")
    }
    assert keys(lines, setting="ncmoe 3, ub 16") == {
        ("ncmoe 3, ub 16", test, way) for test in tests
        for way in ("b11549 -ncmoe", "b11549 -ncmoe unmapped", "moegraph")
    }  # fmt: skip
    sides = [x["row"] for x in lines if x["kind"] == "upstream"]
    assert sides[-1]["n_threads"] == 2, "the quickest of the sweep"
    assert [sum(x["n_slots"]) for x in lines if x["kind"] == "load" and "share" in x] == [160]


@pytest.mark.parametrize("over, sizes", [(0.05, ["9", "4"]), (0.01, ["9"])])
def test_the_cache_of_the_rival_takes_the_memory_of_ncmoe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: float, sizes: list[str]
) -> None:
    """A cache with which the peak is more than 2 % off is corrected once, and not kept."""
    calls: list[list[str]] = []
    ncmoe = 100 << 20

    def json_rows(command: list[str]) -> list[dict[str, Any]]:
        calls.append(command)
        cached = "--moe-cache-mib" in command
        row = {"pp": 16, "tg": 4, "speed_pp": 100.0, "speed_tg": 10.0 * len(calls)}
        n_bytes = int(ncmoe * (1 + over)) if cached and len(calls) == 4 else ncmoe
        n_turns = 3 if calls[1:] else 2  # the first call loses its last row
        return [*[row] * n_turns, {"rss_bytes": 1, "device_bytes": n_bytes}]

    monkeypatch.setattr(bench_rival, "json_rows", json_rows)
    out = tmp_path / "rows.jsonl"
    argv = ["x", "tiny", *RIVAL, "--ncmoe", "3", "--theirs=--no-host", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    assert _bench.main(bench_rival.parser(), bench_rival.compare) == 0
    lines = lines_of(out)
    flags = [x["flags"] for x in lines if x["kind"] == "upstream"]
    ways = ["-ncmoe", "3"], ["-ncmoe", "8", "--moe-cache-mib", sizes[-1]]
    unmapped = ["--load-mode", "none"]
    assert flags == [[*way, *more, "--no-host"] for way in ways for more in ([], unmapped)]
    cached = [x[x.index("--moe-cache-mib") + 1] for x in calls[3:]]
    assert cached == [*sizes, sizes[-1]]
    speeds = [x["value"] for x in lines if x.get("system") == "b11549 cache" and "test" in x]
    assert speeds == [100.0, 10.0 * (len(calls) - 1)] * 3, "those of the last size alone"
    (load,) = (x for x in lines if x["kind"] == "load")
    assert load["budget"] == ncmoe and load["share"] > 0.0


def test_the_rival_measures_the_ways_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_bytes, calls = 100 << 20, list[list[str]]()

    def json_rows(command: list[str]) -> list[dict[str, Any]]:
        calls.append(command)
        row = {"pp": 16, "tg": 4, "speed_pp": 100.0, "speed_tg": 10.0}
        return [*[row] * 3, {"rss_bytes": 1, "device_bytes": n_bytes}]

    monkeypatch.setattr(bench_rival, "json_rows", json_rows)
    out = tmp_path / "rows.jsonl"
    argv = ["x", "tiny", *RIVAL, "--ncmoe", "3", "--ways", "cache unmapped", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    assert _bench.main(bench_rival.parser(), bench_rival.compare) == 0
    systems = {system for _, _, system in keys(lines_of(out))}
    assert systems == {"b11549 -ncmoe", "b11549 cache unmapped", "moegraph"}
    assert ["none" in call for call in calls] == [False, True]


def test_a_slow_link_without_a_compiler_is_one_line() -> None:
    none = {"CUDA_HOME": "/nowhere", "CUDACXX": "", "PATH": "/nowhere"}
    done = run("bench_rival.py", "tiny", *RIVAL, "--slow-link", 4, code=1, **none)
    assert "no nvcc" in done.stderr and done.stderr.count("\n") == 1


def test_clients_are_compared_with_drafts_and_without(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    drafter = ROOT / "moegraph" / "models" / "tiny-dflash.gguf"
    run("bench_drafts_clients.py", "tiny", "--device", "cpu", "--draft", drafter, "--clients", 2,
        "--samples", 1, "--tokens", 48, "--out", out)  # fmt: skip
    plain, drafted = lines_of(out)
    assert (plain["way"], plain["drafts"]) == ("off", None) and plain["tps"] > 0
    assert drafted["way"] == "dspark" and drafted["tps"] > 0
    assert drafted["drafts"]["steps"] + drafted["drafts"]["plain_steps"] > 0


def test_bench_drafts_compares_ways_of_drafting(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    drafter = ROOT / "moegraph" / "models" / "tiny-dflash.gguf"
    given = ("--tokens", 24, "--depth", 24, "--repeat", 1, "--kind", "code", "--mtp", "--dflash", 3)
    done = run("bench_drafts.py", "tiny", "--device", "cpu", *given, "--draft", drafter,
               "--out", out)  # fmt: skip
    ways = ["loaded, off", "dflash 3", "auto"]
    rows = {row["way"]: row for row in lines_of(out)}
    assert list(rows) == ["off", *ways] and all(row["at_rates"] > 0 for row in rows.values())
    assert all(way in done.stdout for way in ways)


def test_bench_lookup_writes_the_same_dictated_text_in_every_way(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    given = ("--device", "cpu", "--tokens", 60, "--repeat", 1, "--out", out)
    run("bench_lookup.py", "tiny", *given, "--kind", "edit", "hopeless", "--ways", "off", "lookup")
    rows = {(row["kind"], row["way"]): row for row in lines_of(out)}
    assert list(rows) == [(k, w) for k in ("edit", "hopeless") for w in ("off", "lookup")]
    edit, hopeless = rows["edit", "lookup"], rows["hopeless", "lookup"]
    assert edit["foretold"] > 0.5 and edit["draft_steps"] and edit["accepted"] > 0.3
    assert hopeless["foretold"] == 0.0 and not hopeless["accepted"]


def test_the_hosts_profile_has_the_moments_of_a_step_and_a_prompt() -> None:
    lines = run("profile_host.py", "tiny", "--tokens", 40).stdout.splitlines()
    assert [line for line in lines if " marks" in line] == ["without marks", "with marks"]
    names = ["results taken", "drawn", "pass begun", "inputs sent", "launch called", "launched"]
    places = [lines[-1].index(name) for name in names]
    assert places == sorted(places), "in the order of time"
    prompt = run("profile_host.py", "tiny", "--prompt", 64, "--share", 60, "--repeat", 2).stdout
    n_calls = int(prompt.split(", ")[-1].split()[0])
    assert prompt.startswith("a prompt of 64: ") and n_calls > 8
