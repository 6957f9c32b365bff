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

import numpy as np
import pytest

from moegraph.arch import open_model
from moegraph.gguf import resolve_target

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
FAKE = ROOT / "tests" / "helpers" / "fake_llama_bench.py"
sys.path.insert(0, str(SCRIPTS))

import _bench_worker
import _llama_bench
import bench_residency

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


def test_sequences_decode_together_and_at_depth(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    given = ("bench_trees.py", "tiny", f"now={ROOT}", *COMMON, *SHORT, "--settings", "whole")
    run(*given, "--seqs", 1, 3, "--out", out)
    run(*given, "--depth", 0, 300, "--rows", "--prompt", "--out", out)
    tests = ("seqs 1", "seqs 3", "tg4", "tg4 @ 300")
    assert keys(lines_of(out)) == {("whole", test, "now") for test in tests}


def test_two_trees_take_turns_and_every_sample_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = run(
        "bench_trees.py", "tiny", f"before={ROOT}", f"after={ROOT},MOEGRAPH_DEBUG=0", *COMMON,
        *SHORT, "--settings", "whole", "50", "--rows", 2, "--prompt", 16, "--repeat", 2,
        "--warm", 2, "--ubatch", 16, "--results", "argmax", "logits", "--out", out,
    )  # fmt: skip
    lines = lines_of(out)
    tests = {(s, t) for s in ("whole", "50 %") for t in ("tg4", "rows 2", "pp16")}
    systems = ("before", "before, logits", "after", "after, logits")
    assert keys(lines) == {(*test, system) for test in tests for system in systems}
    samples = [x for x in lines if x["kind"] == "sample" and x["system"] in ("before", "after")]
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
    assert done.stdout.count("\n| ") == 2 * 3 * 4 and "times before" in done.stdout


def test_tokens_after_prompts_are_those_of_one_trace_in_both_trees(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    run(
        "bench_trees.py", "tiny", f"before={ROOT}", f"after={ROOT}", *COMMON, *SHORT, "--then", 5,
        2, "--settings", "whole", "50", "--prompt", 40, 70, "--warm", 3, "--ubatch", 32,
        "--miss", "stream", "--host-pin", "all", "--out", out,
    )  # fmt: skip
    lines = lines_of(out)
    tests = {(s, f"{n} after pp{m}") for s in ("whole", "50 %") for n in (2, 5) for m in (40, 70)}
    prompts = {(s, f"pp{m}") for s in ("whole", "50 %") for m in (40, 70)}
    both = ("before", "after")
    assert keys(lines) == {(*test, system) for test in tests | prompts for system in both}
    samples = [x for x in lines if x["kind"] == "sample"]
    assert len(samples) == 3 * len(keys(lines))
    samples = [x for x in samples if "after" in x["test"]]
    assert all(x["prompt_s"] > 0 for x in samples)
    by_key = {(x["setting"], x["test"], x["system"], x["at"]): x for x in samples}
    for setting, test in tests:
        for at in (0, 1, 2):
            one, other = (by_key[setting, test, system, at] for system in ("before", "after"))
            if setting == "50 %":
                assert one["experts"]["n_passes"] == 5 and one["experts"]["misses"] > 0
                assert one["experts"]["misses"] == other["experts"]["misses"]
            shorter = by_key[setting, test.replace("5 after", "2 after"), "after", at]
            assert shorter is other or shorter["value"] < other["value"]
    assert len({x["experts"]["misses"] for x in samples if x["setting"] == "50 %"}) > 2


def test_the_cache_counts_the_recorded_choice_of_a_prompt(tmp_path: Path) -> None:
    side, hp = _bench_worker.Ours(), read_hparams()
    shape, rng = (hp.n_layer, hp.n_expert_used), np.random.default_rng(3)
    chosen = rng.permuted(np.tile(np.arange(24, 32), (50, hp.n_layer, 1)), axis=-1)[..., : shape[1]]
    np.save(tmp_path / "read.npy", chosen)
    np.save(tmp_path / "decoded.npy", np.tile(np.arange(20, 20 + shape[1]), (1, hp.n_layer, 1)))
    config = {"device": "cpu", "n_threads": 1, "n_ctx": 256, "n_ubatch": 64, "pin_layers": 0,
              "cache_slots": 10 * hp.n_layer, "miss": "stream", "profile": "none"}  # fmt: skip
    side.load("tiny", config, str(tmp_path / "decoded.npy"))
    try:
        layers = side.engine.runner.cache.partial
        assert len(layers) == hp.n_layer
        for routing in (str(tmp_path / "read.npy"), None):
            found = side.answer(50, 1, [2, 4], routing)
            assert 0 < found["then_seconds"][0] < found["then_seconds"][1] and found["seconds"] > 0
            counted = [{e for e, s in enumerate(layer.policy.score) if s > 0.5} for layer in layers]
            recorded = set(range(20, 20 + shape[1])) | set(range(24, 32))
            assert all(experts == recorded for experts in counted) == (routing is not None)
    finally:
        side.unload()


def read_hparams() -> Any:
    with open_model(resolve_target("tiny")) as model:
        return model.hparams


def test_a_time_limit_keeps_what_is_done(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    for limit in (4, 30):  # a busy machine may need the first one to load the model
        done = run(
            "bench_trees.py", "tiny", f"a={ROOT}", *COMMON, "--settings", "whole", "--rows",
            "--prompt", "--gen", 8, "--samples", 1000000, "--time-limit", limit, "--out", out,
        )  # fmt: skip
        assert f"stopped after {limit} s" in done.stderr
        if keys(lines_of(out)):
            break
    assert keys(lines_of(out)) == {("whole", "tg8", "a")} and "| whole | tg8 | a |" in done.stdout


def test_llama_bench_that_hangs_or_fails_ends_the_run_in_one_line(tmp_path: Path) -> None:
    hung = run("bench_vs_upstream.py", "tiny", *PAIR, "--time-limit", 5, FAKE_LLAMA_BENCH="slow")
    assert hung.stderr == "stopped after 5 s\n" and not hung.stdout
    failed = run("bench_vs_upstream.py", "tiny", *PAIR, code=2, FAKE_LLAMA_BENCH="fail")
    assert failed.stderr == (
        "bench_vs_upstream.py: llama-bench ended with exit code 1: error: failed to load model\n"
    )


def test_both_sides_run_the_same_tests_with_the_same_ubatch(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    run("bench_vs_upstream.py", "tiny", *PAIR, "--prompt", 24, "--depth", 0, 8, "--ubatch", 16,
        32, "--graph-opt", "--commit", "abc", "--out", out)  # fmt: skip
    lines = lines_of(out)
    for system in ("upstream", "whole"):
        assert {key[:2] for key in keys(lines, system=system)} == {
            ("ub 16", "pp24"), ("ub 16", "tg4"), ("ub 16", "pp24 @ d8"), ("ub 16", "tg4 @ d8"),
            ("ub 32", "pp24"), ("ub 32", "pp24 @ d8"),
        }  # fmt: skip
    for system in ("whole, argmax", "whole, sampled"):
        assert keys(lines, system=system) == {("ub 16", "tg4", system)}
    assert keys(lines, system="upstream, GRAPH_OPT") >= {("ub 16", "tg4", "upstream, GRAPH_OPT")}
    assert {x["row"]["n_ubatch"] for x in lines if x["kind"] == "upstream"} == {16, 32}
    assert all(x["row"]["n_threads"] == 1 for x in lines if x["kind"] == "upstream")
    assert lines[0]["kind"] == "run" and lines[0]["commit"] == "abc"
    memory = [x for x in lines if x["kind"] == "memory"]
    assert all(x["VmHWM"] > 1 << 20 for x in memory) and len(memory) == 5


RESIDENCY = [
    *PAIR, "--warm", 4, "--prompt", 16, "--ubatch", 16, "--first-token", 8,
    "--traces", "sticky", "flat",
]  # fmt: skip


def test_experts_that_do_not_fit(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    run("bench_residency.py", "tiny", *RESIDENCY, "--ncmoe", 0, 3, 5, "--sweep", 1, 2, "--out", out)
    lines = lines_of(out)
    for n in (0, 3, 5):
        setting = f"ncmoe {n}, ub 16"
        found = {key[1:] for key in keys(lines, setting=setting)}
        decode = ["upstream", "moegraph, sampled, sticky"]
        decode += [f"moegraph, {x}{t}" for x in ("", "argmax, ") for t in ("sticky", "flat")]
        pairs = {(t, s) for t in ("pp16", "first token") for s in ("upstream", "moegraph")}
        assert found == {("tg4", system) for system in decode} | pairs
    loads = [x for x in lines if x["kind"] == "load"]
    assert [sum(x["n_slots"]) for x in loads] == [256, 160, 96]
    upstream = [x for x in lines if x["kind"] == "upstream"]
    assert {x["row"]["n_threads"] for x in upstream} == {2}, "the quickest of the sweep"
    steps = [x["step"] for x in lines if x["kind"] == "sample" and "step" in x][:12]
    each = 4 + 2 * 3 * 4
    assert steps == [*range(4, each, 4), *range(each + 4, 2 * each, 4)], "traces do not overlap"


@pytest.mark.parametrize("mib, share", [(20, 0.0), (300, None)])
def test_moegraph_gets_the_device_memory_that_llama_bench_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mib: int, share: float | None
) -> None:
    """As --vram; where that is too little even for no expert, with none, and it is said so."""
    used = iter([0])
    monkeypatch.setattr(_llama_bench, "_INTERVAL_S", 0.01)
    monkeypatch.setattr(_llama_bench, "used_device_bytes", lambda: next(used, mib << 20))
    out = tmp_path / "rows.jsonl"
    argv = ["x", "tiny", *map(str, RESIDENCY), "--ncmoe", "4", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    assert bench_residency.main() == 0
    lines = lines_of(out)
    (load,) = (x for x in lines if x["kind"] == "load")
    refused = [x for x in lines if x["kind"] == "refused"]
    assert load["budget"] == mib << 20
    if share == 0.0:
        assert load["share"] == 0.0 and len(refused) == 1
    else:
        assert load["share"] > 0.0 and not refused


def test_turns_of_a_conversation_are_timed_three_ways(tmp_path: Path) -> None:
    out = tmp_path / "turns.jsonl"
    done = run(
        "bench_prefixes.py", "tiny", *COMMON, "--samples", 1, "--turns", 3, "--system", 100,
        "--question", 70, "--answer", 20, "--out", out,
    )  # fmt: skip
    turns = {x["way"]: x["turns"] for x in lines_of(out) if x["kind"] == "turns"}
    n_read = {way: [n for _, n in found] for way, found in turns.items()}
    assert n_read == {"cold": [174, 254, 334], "held": [174, 254, 334], "kept": [174, 84, 84]}
    assert "| 3 |" in done.stdout and "states back" in done.stdout


def test_a_measurement_stops_at_its_time_limit() -> None:
    for script in ("bench_prompts.py", "bench_memory.py"):
        given = ["--vram", "whole"] if script == "bench_memory.py" else []
        done = run(script, "tiny", *COMMON, *given, "--time-limit", "0.000001")
        assert done.stderr == f"{script}: stopped at its time limit\n"


def test_bench_service_keeps_what_a_service_did_beside_a_prompt(tmp_path: Path) -> None:
    out = tmp_path / "rounds.jsonl"
    given = ("--clients", 1, "--beside", 1, "--tokens", 64, "--prompt", 64, "--samples", 1)
    done = run("bench_service.py", "tiny", *COMMON, *given, "--rounds", out)
    assert "64 tokens beside 1: " in done.stdout
    lines = lines_of(out)
    assert len(lines) == 2, "the samples that count, and those before"
    for line in lines:
        inside = [one for one in line["rounds"] if line["begun"] <= one[1] <= line["first"]]
        assert all(begin < end for begin, end, *_ in line["rounds"])
        assert all(line["begun"] <= at <= line["first"] and gap > 0 for at, gap in line["gaps"])
        kinds = {kind for *_, steps in inside for kind, *_ in steps}
        assert kinds >= {"attention", "recurrent"}, "the prompt"
        assert any(n_rows == 1 for _, _, _, n_rows, _ in line["rounds"]), "the request beside it"


def test_bench_drafts_keeps_the_steps_of_its_texts(tmp_path: Path) -> None:
    out, steps = tmp_path / "rows.jsonl", tmp_path / "steps.jsonl"
    drafter = ROOT / "moegraph" / "models" / "tiny-dflash.gguf"
    given = ("--tokens", 24, "--depth", 24, "--repeat", 1, "--kind", "code", "--mtp", "--dflash", 3)
    files = ("--draft", drafter, "--out", out, "--steps", steps)
    done = run("bench_drafts.py", "tiny", "--device", "cpu", *given, *files)
    ways = ["loaded, off", "dflash 3", "auto"]
    rows = {row["way"]: row for row in lines_of(out)}
    assert list(rows) == ["off", *ways] and all(row["at_rates"] > 0 for row in rows.values())
    assert all(way in done.stdout for way in ways)
    lines = lines_of(steps)
    assert sorted((x["way"], x["at"]) for x in lines) == [
        (way, n) for way in sorted(ways) for n in (0, 1)
    ]
    for line in lines:
        at = line["fields"].index("n_tokens")
        n_tokens = [step[at] for step in line["steps"]]
        assert sum(n_tokens) == 23, "the first of 24 tokens came from the prompt"
        assert line["way"] != "loaded, off" or n_tokens == [1] * 23


def test_bench_lookup_writes_the_same_dictated_text_in_every_way(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    given = ("--device", "cpu", "--tokens", 60, "--repeat", 1, "--out", out)
    run("bench_lookup.py", "tiny", *given, "--kind", "edit", "hopeless")
    rows = {(row["kind"], row["way"]): row for row in lines_of(out)}
    assert list(rows) == [(k, w) for k in ("edit", "hopeless") for w in ("off", "lookup", "auto")]
    edit, hopeless = rows["edit", "lookup"], rows["hopeless", "lookup"]
    assert edit["foretold"] > 0.5 and edit["draft_steps"] and edit["accepted"] > 0.3
    assert hopeless["foretold"] == 0.0 and not hopeless["accepted"]
    for row in (edit, hopeless):
        n_tokens = sum(each["steps"] * each["tokens"] for each in row["by_rows"])
        assert n_tokens == pytest.approx(59, abs=0.5), "the first token came from the prompt"


@pytest.mark.parametrize(
    "script, given",
    [("bench_drafts_clients.py", ["--draft", ROOT / "moegraph" / "models" / "tiny-dflash.gguf"]),
     ("bench_service.py", ["--prompt", 64])],
)  # fmt: skip
def test_texts_without_a_measured_part_are_refused_in_one_line(
    script: str, given: Sequence[object]
) -> None:
    few = ("--clients", 1, "--tokens", 1, "--samples", 1)
    done = run(script, "tiny", *COMMON, *few, *given, code=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{script}: texts of 1 tokens are too short") and "--tokens" in line
    assert "tok/s" not in done.stdout.replace(", tok/s", "")


def test_each_pass_of_some_rows_has_ids_of_its_own() -> None:
    class Side(_bench_worker.Side):
        n_vocab, seen = 1000, list[tuple[int, ...]]()

        def forget(self) -> None:
            self.seen.append(())

        def step(self, ids: Any, logits: bool, all_rows: bool = False) -> None:
            self.seen[-1] = tuple(ids.tolist())

    side = Side()
    for seed in (0, 1):
        assert len(side.rows(8, seed, repeat=5)["times"]) == 5
    assert len(set(side.seen)) == 10 and {len(ids) for ids in side.seen} == {8}
