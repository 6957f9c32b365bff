"""`moegraph trace` and `moegraph plan` on the shipped model, and what simulate makes of a trace."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from helpers.cli_page import json_tables
from helpers.fetching_engines import fetch_layers
from helpers.smallest import smallest

from moegraph.arch import open_model
from moegraph.cli import main
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.experts.machines import MACHINES, find_machine
from moegraph.experts.policy import parse_policy
from moegraph.ggml.free_memory import HostMemory
from moegraph.gguf import resolve_target
from moegraph.placement.footprint import needed_bytes, slot_bytes, token_work
from moegraph.placement.identity import router_shape
from moegraph.placement.planner import Footprint, make_plan
from moegraph.placement.profile import read_profile
from moegraph.placement.simulate import simulate
from moegraph.placement.trace import TraceRecorder, read_trace
from moegraph.units import format_bytes

PROMPT = "def fibonacci(n):\n"
CPU = ("--device", "cpu", "-t", "1", "--temp", "0")


def invoke(*args: object) -> Result:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert "Traceback" not in result.output and "\x1b" not in result.output
    return result


def refused(*args: object, code: int = 2) -> str:
    result = invoke(*args)
    assert result.exit_code == code, result.output
    lines = [line for line in result.stderr.splitlines() if not line.startswith("note: ")]
    assert result.stdout == "" and len(lines) == 1
    return result.stderr


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trace and a profile of one run."""
    folder = tmp_path_factory.mktemp("trace")
    result = invoke(
        "trace", "tiny", "-p", PROMPT, "-n", 20, "-o", folder / "t", "--profile", folder / "p.json",
        "--profile-class", "code", "--json", *CPU,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (folder / "report.json").write_text(result.stdout)
    return folder


def test_a_profile_grows_from_run_to_run(recorded: Path, tmp_path: Path) -> None:
    trace = read_trace(recorded / "t")
    first = read_profile(recorded / "p.json", trace.shape)
    assert first.classes["code"].n_tokens == trace.n_tokens
    assert first.classes["code"].counts.tolist() == trace.counts().tolist()
    path = tmp_path / "p.json"
    path.write_bytes((recorded / "p.json").read_bytes())
    result = invoke("trace", "tiny", "-p", "Once", "-n", 4, "--profile", path, *CPU)
    assert result.exit_code == 0, result.output
    again = read_profile(path, trace.shape)
    assert set(again.classes) == {"code", "default"}
    assert again.classes["code"].counts.tolist() == trace.counts().tolist()


@pytest.mark.parametrize(
    ("policy", "miss", "host_pin", "name"),
    [
        ("lfu", "stream", "all", "tiny"), ("lru", "stream", "none", "tiny"),
        ("lru", "cpu", "all", "tiny"), ("lru", "stream", "all", "tiny-oss"),
    ],
)  # fmt: skip
def test_the_simulator_counts_what_the_engine_counts(
    policy: str, miss: str, host_pin: str, name: str
) -> None:
    """Same slots, same policy: hits and misses of every layer are equal, not alike."""
    settings = {"pin_layers": 1, "cache_slots": 70, "policy": policy, "miss": miss}
    settings |= {"host_pin": host_pin}
    config = EngineConfig(device="cpu", n_threads=1, n_ctx=512, **settings)
    with Engine.load(name, config) as engine:
        recorder = TraceRecorder(router_shape(engine.file))
        engine.runner.observers.append(recorder)
        ids = engine.tokenizer.encode(3 * (PROMPT + "    if n < 2:\n        return n\n"))
        engine.prefill(np.array(ids, dtype=np.int32), greedy=True)
        before = engine.runner.cache.stats
        for token in np.random.default_rng(2).integers(0, 500, 60).astype(np.int32):
            engine.forward(np.array([token]), greedy=True)
        counted = engine.runner.cache.stats.since(before)
        n_slots, residency = engine.runner.cache.n_slots, engine.runner.residency
        assert residency.n_kept > 0
        n_fetching = len(fetch_layers(engine)) / (engine.hparams.n_layer - 1)
    assert n_fetching == ((miss, host_pin) == ("stream", "all"))
    trace = recorder.trace(len(ids), "")
    assert trace.n_tokens == len(ids) + 60
    found = simulate(
        trace, n_slots, parse_policy(policy), MACHINES["h200"], mode=miss,
        is_pinned=host_pin == "all",
    )  # fmt: skip
    for name in ("hits", "misses", "missing"):
        assert getattr(found.stats, name).tolist() == getattr(counted, name).tolist(), name
    assert found.stats.admitted.sum() == counted.admitted.sum() > 0
    assert counted.misses.sum() > 50 and counted.hits.sum() > 500


SMALL = ("-c", "512", "-ub", "64", "--driver-memory", "0")


@pytest.fixture(scope="module")
def need() -> Footprint:
    with open_model(resolve_target("tiny")) as model:
        return needed_bytes(model, EngineConfig(n_ctx=512, n_ubatch=64), 512)


def mib_for(need: Footprint, share: float) -> int:
    """Return a budget in MiB that holds about this share of the experts."""
    return round((need.fixed + need.staging + need.ring + share * need.experts) / 2**20)


def test_a_plan_is_what_the_engine_plans(need: Footprint) -> None:
    budget = mib_for(need, 0.3)
    result = invoke("plan", "tiny", "--vram", f"{budget}MiB", *SMALL, "--json")
    report = json.loads(result.stdout)
    row = report["budgets"][0]
    plan = make_plan(need, budget << 20)
    assert row["plan"]["n_slots_by_layer"] == list(plan.n_slots) and not plan.all_resident
    sizes = row["plan"]["bytes"]
    assert sum(sizes.values()) == budget << 20 and sizes["left_over"] == plan.margin
    assert sizes["slots"] == plan.bytes["slots"] and sizes["driver"] == 0
    assert 0 < row["predicted"]["hit_rate"] < 1
    assert row["predicted"]["decode_tps"] > 0
    assert row["upstream_n_cpu_moe"] >= 1
    absent = sum((32 - n) * size for n, size in zip(plan.n_slots, need.slot_bytes))
    assert [prompt["n_tokens"] for prompt in row["prompts"]] == [512, 2048, 8192]
    for prompt in row["prompts"]:
        assert 0 < prompt["sent_bytes"] <= absent
        assert prompt["seconds"] > 0 and prompt["n_sweeps"] == 1


def test_a_plan_table_has_a_row_for_each_budget(recorded: Path, need: Footprint) -> None:
    result = invoke(
        "plan", "tiny", "--vram", "100MiB", "--vram", f"{mib_for(need, 0.4)}MiB", "--vram", "1",
        *SMALL, "--routing", recorded / "t", "--profile", recorded / "p.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    head, _, table = result.stdout.partition("\n\n")
    assert "moegraph tiny: 8 layers of 32 experts, 4 used" in head and "512 positions" in head
    rows = table.splitlines()[1:4]
    assert rows[0].split() == ["100", "MiB", *"--------"] and "100 %" in rows[2]
    assert " to " in rows[1], "with a profile, layers get different numbers of slots"
    assert len({len(row) for row in rows}) == 1, "columns of numbers end together"
    assert "without its experts needs" in result.stderr
    assert "host memory" not in result.stderr


def test_a_plan_says_that_host_memory_does_not_hold_the_copies(
    monkeypatch: pytest.MonkeyPatch, need: Footprint
) -> None:
    memory = HostMemory(9 << 20, 8 << 20, None)
    monkeypatch.setattr("moegraph.cli.plan.host_memory", lambda: memory)
    mib = mib_for(need, 0.4)
    copies = format_bytes(make_plan(need, mib << 20).host_bytes)
    result = invoke("plan", "tiny", "--vram", "100MiB", "--vram", f"{mib}MiB", *SMALL)
    assert copies in result.stdout
    line = f"6.88 MiB of host memory for copies of experts, not {copies}; reading the rest"
    assert line in result.stderr
    result = invoke("plan", "tiny", "--vram", "100MiB", "--vram", "90MiB", *SMALL)
    assert result.exit_code == 0 and "host memory" not in result.stderr


def test_a_plan_prices_drafters(need: Footprint) -> None:
    given = (*SMALL, "--driver-memory", "0", "--spec", "auto")
    few = smallest(lambda n: not invoke("plan", "tiny", "--vram", f"{n}MiB", *given).exit_code)
    sizes = ("--vram", "100MiB", "--vram", f"{few}MiB", "--vram", "1", "--driver-memory", "0")
    result = invoke("plan", "tiny", *sizes, *SMALL, "--spec", "auto", "--json")
    assert result.exit_code == 0, result.output
    nothing, without, loaded = (row["drafters"] for row in json.loads(result.stdout)["budgets"])
    assert nothing is None
    assert without["loaded"] == [] and without["drafting_speedup"] is None
    (line,) = without["notes"]
    assert "not loaded" in line and line.endswith("--spec dflash loads it")
    assert loaded["loaded"] == ["dspark"] and loaded["notes"] == []
    assert loaded["displaced_experts"] == 0 and loaded["idle_speedup"] == 1.0
    assert loaded["bytes"] > 1 << 20 and loaded["drafting_speedup"] > 1.2
    result = invoke("plan", "tiny", *sizes, *SMALL, "--spec", "auto")
    rows = result.stdout.partition("nothing drafted\n")[2].splitlines()
    assert rows[0].split() == [str(few), "MiB", *"-----"]
    assert rows[1].split()[2] == "dspark" and rows[1].endswith(" 1.000x")
    assert f"{few} MiB: {line}" in result.stderr
    assert "Drafters" not in invoke("plan", "tiny", *sizes, *SMALL).stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the times of this machine and the shipped model."""
    result = invoke("doctor", "--measure", "tiny", "--device", "cpu", "-t", 1)
    assert result.exit_code == 0, result.output
    assert "warning" not in result.stderr, "no setting was the user's"
    path = tmp_path_factory.mktemp("machine") / "mine.json"
    path.write_text(result.stdout)
    return path


def test_a_measured_machine_says_what_it_is(measured: Path) -> None:
    fields, machine = json.loads(measured.read_text()), find_machine(str(measured))
    with open_model(resolve_target("tiny")) as model:
        sizes = slot_bytes(model)
        token = token_work(model)
    assert (machine.n_layer, machine.expert_bytes) == (8, sum(sizes) // 8)
    assert (machine.token_bytes, machine.token_params, machine.token_launches) == token
    assert "measured with moegraph tiny" in machine.about
    assert machine.whole > 0 and machine.host_layer >= 0 and machine.fetch_layer >= 0
    for curve in (machine.stream, machine.cpu, machine.fetch):
        assert 0 < curve(1) <= curve(4)
    assert machine.prompt is not None and 0 < machine.prompt(64) <= machine.prompt(512)
    told = fields["measured"]
    assert "an upload is a copy within host memory" in told["notes"][0]
    assert "link_bytes_per_s" not in told, "there is no link"
    assert told["host_copy_bytes_per_s"] > 1e8 and list(told["cpu_us_by_threads"]) == ["1"]
    # the graphs of this device can fetch, so a miss was timed there, too
    assert [n for n, _ in fields["fetch_us"]] == [1, 4]


def test_plan_and_simulate_predict_with_a_measured_machine(
    measured: Path, recorded: Path, need: Footprint
) -> None:
    whole_us = json.loads(measured.read_text())["whole_us"]
    budgets = ("--vram", f"{mib_for(need, 0.3)}MiB", "--vram", "1")
    result = invoke("plan", "tiny", *budgets, *SMALL, "--machine", measured, "--json")
    half, whole = (row["predicted"] for row in json.loads(result.stdout)["budgets"])
    found = [row["prompts"] for row in json.loads(result.stdout)["budgets"]]
    assert all(prompt["link_s"] > 0 for prompt in found[0])
    assert all(prompt["link_s"] == 0 for prompt in found[1])
    for missing, all_resident in zip(*found):
        assert missing["seconds"] > all_resident["seconds"] > 0
    assert whole["decode_tps"] == pytest.approx(1e6 / whole_us, rel=1e-3)
    assert 0 < half["decode_tps"] < whole["decode_tps"]
    result = invoke("simulate", recorded / "t", "--machine", measured, "--json")
    rows = json.loads(result.stdout)["rows"]
    assert all(row["token_us"] > 0 and row["uploaded_bytes_per_token"] is not None for row in rows)
    assert rows[-1]["token_us"] == pytest.approx(whole_us, rel=1e-3), "all resident"
    # bytes are those of the model that was traced: at most all it chose
    with open_model(resolve_target("tiny")) as model:
        most = 4 * sum(slot_bytes(model))
    assert 0 < rows[0]["uploaded_bytes_per_token"] <= most


def test_json_has_the_keys_that_the_docs_name(recorded: Path) -> None:
    def known(command: str) -> set[str]:
        words = " ".join(
            word for table in json_tables(command) for one in table.items() for word in one
        )
        return set(re.findall(r"[a-z_0-9]+", words))

    plan = json.loads(invoke("plan", "tiny", "--vram", "1", "--json").stdout)
    simulated = json.loads(invoke("simulate", recorded / "t", "--json").stdout)
    row = plan["budgets"][0]
    assert set(plan) | set(row) | set(row["plan"]) <= known("plan")
    rows = set(simulated["rows"][0])
    assert set(simulated) | rows <= known("simulate") and set(row["predicted"]) <= rows
    assert set(json.loads((recorded / "report.json").read_text())) <= known("trace")
    inspected = json.loads(invoke("inspect", "tiny", "--tensors", "--check", "--json").stdout)
    assert set(inspected) <= known("inspect")
    given = ("-p", "x", "-n", 3, "-c", 256, "--cache-slots", 90, "--json", *CPU)
    experts = json.loads(invoke("run", "tiny", *given).stdout)["experts"]
    assert set(experts) <= known("run") and experts["n_passes"] > 0 and experts["hits"] > 0
    assert set(json.loads(invoke("doctor", "--json").stdout)) <= known("doctor")


def test_impossible_plans_are_one_line(tmp_path: Path, recorded: Path, need: Footprint) -> None:
    assert "without its experts needs" in refused("plan", "tiny", "--vram", "0.6", code=4)
    assert "--pin-layers is 99" in refused("plan", "tiny", "--vram", 1, "--pin-layers", 99)
    few = f"{mib_for(need, 0.5)}MiB"
    line = refused("plan", "tiny", "--vram", few, *SMALL, "--pin-layers", 6)
    assert "at most 3 layers fit" in line
    assert "not a size" in refused("plan", "tiny", "--vram", "much")
    other = tmp_path / "other.trace"
    other.write_bytes((recorded / "t").read_bytes()[:-1])
    assert "damaged" in refused("plan", "tiny", "--vram", 1, "--routing", other)


@pytest.mark.parametrize(
    ("args", "say"),
    [(("-p", "x"), "nothing to write"), (("-o", "t"), "with -p or with -f"),
     (("-p", "x", "-f", "y", "-o", "t"), "with -p or with -f"), (("-p", "", "-o", "t"), "is empty"),
     (("-p", "x", "-o", "/nowhere/t"), "no folder /nowhere"), (("-p", "x", "-o", "/"), "a folder"),
     (("-p", "x", "--profile", "/nowhere/p"), "no folder /nowhere"),
     (("-p", "x", "--profile", "/dev/null"), "not a routing profile"),
     (("-p", "x", "-o", "t", "--profile-class", "a b"), "use 1 to 64 letters")],
)  # fmt: skip
def test_wrong_trace_commands_are_refused_before_anything_runs(
    args: tuple[str, ...], say: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert say in refused("trace", "tiny", *args)
    assert list(tmp_path.iterdir()) == []


def test_bench_replays_a_trace_and_says_what_it_is_like(recorded: Path) -> None:
    result = invoke(
        "bench", "tiny", "-p", 0, "-n", 8, "-r", 2, "--routing", recorded / "t", "-o", "json",
        "--pin-layers", 0, "--cache-slots", 64, "--device", "cpu", "-t", 1,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)[0]
    trace = read_trace(recorded / "t")
    assert trace.sha256[:16] in result.stderr
    chosen = row["experts"]["hits"] + row["experts"]["misses"]
    assert chosen == 2 * 8 * trace.shape.n_layer * trace.shape.n_expert_used
    assert "not a routing trace" in refused("bench", "tiny", "--routing", recorded / "p.json")


FEW_SLOTS = ("--pin-layers", 0, "--cache-slots", 64)


def test_a_profile_fills_the_slots_of_a_run(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes((recorded / "p.json").read_bytes())

    def rate(*extra: object) -> float:
        result = invoke("run", "tiny", "-p", PROMPT, "-n", 12, "--json", *FEW_SLOTS, *CPU, *extra)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["experts"]["hit_rate"]

    assert rate("--profile", path) > rate("--profile", "none")
    missing = refused("run", "tiny", "-p", "x", "--profile", tmp_path / "no" / "p.json", *CPU)
    assert "there is no folder" in missing
    missing = refused("bench", "tiny", "--profile", tmp_path / "none.json", "--device", "cpu")
    assert "the profile does not exist, and bench does not create one" in missing


def test_run_and_chat_keep_a_profile_only_where_it_is_asked_for(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.symlink_to(resolve_target("tiny"))
    beside = tmp_path / "m.gguf.routing.json"
    with open_model(model) as opened:
        shape = router_shape(opened)

    def run(*extra: object) -> dict[str, Any]:
        result = invoke("run", model, "-p", PROMPT, "-n", 4, "--json", *CPU, *extra)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    assert run(*FEW_SLOTS)["profile"] is None and not beside.exists()
    assert run("--profile", beside)["profile"] is None, "everything fits"
    report = run("--profile", beside, "--profile-class", "code", *FEW_SLOTS)
    n_tokens = report["n_prompt"] + 4 - 1
    assert report["profile"] == {
        "path": str(beside), "class": "code", "n_tokens": n_tokens, "written": True,
        "why_not": None,
    }  # fmt: skip
    assert run(*FEW_SLOTS)["profile"]["written"], "now it is there"
    assert run("--profile", "none", *FEW_SLOTS)["profile"] is None
    chat = invoke("chat", model, "-p", "hi", "-n", 3, *CPU, *FEW_SLOTS)
    assert chat.exit_code == 0, chat.output
    classes = read_profile(beside, shape).classes
    assert classes["code"].n_tokens == n_tokens < classes["default"].n_tokens
    assert sorted(path.name for path in tmp_path.iterdir()) == [model.name, beside.name]


def test_a_bad_profile_stops_only_a_run_that_asked_for_it(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.symlink_to(resolve_target("tiny"))
    beside = tmp_path / "m.gguf.routing.json"
    beside.write_text('{"format": "somebody else"}')
    asked = ("run", model, "-p", PROMPT, "-n", 4, "--json", "-q", *CPU, *FEW_SLOTS)
    result = invoke(*asked)
    assert result.exit_code == 0, result.output
    assert f"is ignored: {beside}: not a routing profile" in result.stderr
    assert not json.loads(result.stdout)["profile"]["written"]
    assert beside.read_text() == '{"format": "somebody else"}'
    assert "not a routing profile" in refused(*asked, "--profile", beside)
    assert "is ignored" not in invoke(*asked, "--profile", "none").stderr
