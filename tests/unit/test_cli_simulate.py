"""`moegraph simulate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moegraph.experts.machines import MACHINES, machine_fields
from moegraph.ggml import nvml
from moegraph.placement.generator import generate_trace
from moegraph.placement.identity import RouterShape
from moegraph.placement.profile import Profile
from moegraph.placement.trace import Trace, write_trace

if TYPE_CHECKING:
    from conftest import Cli

SHAPE = RouterShape(4, 32, 4, "abc")


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have predictions be for the machine that is taken without a card."""
    monkeypatch.setattr(nvml, "gpu_card", lambda: None)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.trace"
    generated = generate_trace(SHAPE, 80)
    write_trace(path, Trace(SHAPE, generated.ids, 10, "made for a test", (1_900_000,) * 4))
    return path


def test_a_table_of_budgets_and_policies(cli: Cli, trace: Path) -> None:
    result = cli("simulate", trace, "--resident", "25,100", "--policy", "lru", "--skip", 20)
    assert result.exit_code == 0, result.stderr
    header, *rows = result.stdout.splitlines()
    assert header.split()[:4] == ["resident", "slots", "policy", "hit"]
    at = rows.index("")
    rows, (title, _, *prompts) = rows[:at], rows[at + 1 :]
    assert title == "Prompts, estimated" and [row.split()[0] for row in prompts] == ["25", "100"]
    quarter, whole = ([float(s) for s in row.split()[2:]] for row in prompts)
    # a long prompt hides the copies of missing experts behind what it computes
    assert sorted(whole) == whole and all(a >= b for a, b in zip(quarter, whole))
    assert [row.split()[:4] for row in rows] == [["25", "%", "8", "lru"], ["100", "%", "32", "lru"]]
    assert rows[1].split()[4:] == ["1.000", "0.00", "0.00", "-", "0.51", "1943.6"]
    assert "80 tokens, lag-1 overlap" in result.stderr


def test_json_has_everything_by_layer(cli: Cli, trace: Path) -> None:
    result = cli("simulate", trace, "--resident", "0,50", "--policy", "lfu:half_life=9", "--json",
                 "--machine", "h200", "--miss", "stream")  # fmt: skip
    report = json.loads(result.stdout)
    assert report["trace"]["n_tokens"] == 80 and report["trace"]["n_prompt"] == 10
    assert report["trace"]["source"] == "made for a test"
    assert len(report["trace"]["lru_hit_rate_by_quarter"]) == 4
    assert (report["machine"], report["miss"]) == ("h200", "stream")
    cold, half = report["rows"]
    assert cold["hit_rate"] == 0 and cold["missing_per_token"] == 16 and cold["n_tokens"] == 70
    assert cold["n_streamed"] == 70 * 16 and cold["n_cpu_experts"] == 0
    assert (cold["hits"], cold["misses"]) == (0, 70 * 16) and half["evicted"] > 0
    assert (cold["resident_share"], half["resident_share"]) == (0, 0.5)
    assert half["policy"] == "lfu:half_life=9" and len(half["hit_rate_by_layer"]) == 4
    assert 0.5 < half["hit_rate"] < 1 and half["token_us"] < cold["token_us"]
    assert cold["uploaded_bytes_per_token"] == 16 * 1_900_000
    # four layers take a tenth of forty
    floor = MACHINES["h200"].whole * 1e6 / 10
    assert floor < half["token_us"] < 2 * floor


def test_measured_machines_and_profiles_are_read(cli: Cli, trace: Path, tmp_path: Path) -> None:
    machine, profile = tmp_path / "m.json", tmp_path / "p.json"
    fields = machine_fields(MACHINES["desktop"]) | {"whole_us": 100_000, "n_layer": 4}
    machine.write_text(json.dumps(fields))
    known = Profile(SHAPE)
    known.add("a", generate_trace(SHAPE, 80).counts(), 80)
    known.save(profile)
    given = ("simulate", trace, "--resident", 40, "--policy", "lfu:prior_steps=500", "--json",
             "--machine", machine)  # fmt: skip
    cold = json.loads(cli(*given).stdout)["rows"][0]
    warm = json.loads(cli(*given, "--profile", profile, "--profile-class", "a").stdout)["rows"][0]
    assert warm["hit_rate"] > cold["hit_rate"] + 0.02
    assert cold["token_us"] > 100_000


def test_other_experts_take_other_times_and_unknown_ones_none(
    cli: Cli, trace: Path, tmp_path: Path
) -> None:
    given, times = ("--resident", "0", "--policy", "lru"), []
    other = tmp_path / "other.trace"
    for size in (67 << 10, 20 << 20, 0):
        sizes = (size,) * 4 if size else ()
        write_trace(other, Trace(SHAPE, generate_trace(SHAPE, 80).ids, 10, "", sizes))
        row = json.loads(cli("simulate", other, *given, "--json").stdout)["rows"][0]
        assert row["misses"] == 70 * 16
        assert (row["uploaded_bytes_per_token"] is None) == (not size)
        times.append((row["token_us"], row["decode_tps"], len(row["prompts"])))
    (small, *_), (large, *_), unknown = times
    assert unknown == (None, None, 0)
    # latencies of four layers do not shrink; of 16 experts the CPU computes some, 59 GB/s
    assert 4 * 50 < small - 1e5 * MACHINES["desktop"].whole < 4 * 300
    assert 4 * 2 * (20 << 20) / 84e3 < large < 16 * (20 << 20) / 59e3
    result = cli("simulate", other, *given)
    assert result.stdout.splitlines()[1].split()[-2:] == ["-", "-"]
    assert "does not say how large an expert is; give --model or --expert-size" in result.stderr
    row = json.loads(cli("simulate", other, *given, "--expert-size", "1.8MiB", "--json").stdout)
    assert row["rows"][0]["token_us"] > 0 and row["slot_bytes_by_layer"] == [1887436] * 4


@pytest.mark.parametrize(
    ("args", "say"),
    [(("--policy", "mru"), "no policy 'mru'"), (("--resident", "x"), "percentages as 25,60,100"),
     (("--resident", "101"), "percentages of 0 to 100"), (("--skip", "70"), "skip fewer"),
     (("--resident", "nan"), "percentages of 0 to 100"),
     (("--machine", "z80"), "not a built-in machine"),
     (("--profile-class", "a"), "needs --profile"),
     (("--profile", "none.json"), "cannot read the profile"),
     (("--model", "m", "--expert-size", "1"), "give one"),
     (("--expert-size", "big"), "not a size: 'big'")],
)  # fmt: skip
def test_wrong_settings_are_refused_in_one_line(
    cli: Cli, trace: Path, args: tuple[str, ...], say: str
) -> None:
    assert say in cli.refused("simulate", trace, *args)


def test_files_that_are_no_traces_are_refused_in_one_line(cli: Cli, tmp_path: Path) -> None:
    assert "cannot read the trace" in cli.refused("simulate", tmp_path / "none")
    assert "cannot read the trace: Is a directory" in cli.refused("simulate", tmp_path)
    (tmp_path / "x").write_bytes(b"MOETRACE" + bytes(50))
    assert "trace format 0" in cli.refused("simulate", tmp_path / "x")


def test_several_devices(cli: Cli, trace: Path) -> None:
    given = ("simulate", trace, "--resident", "50", "--policy", "lru", "--miss", "stream")
    one = json.loads(cli(*given, "--json").stdout)["rows"][0]
    row = json.loads(cli(*given, "--split", "1,3", "--json").stdout)["rows"][0]
    assert "stages" not in one and [stage["layers"] for stage in row["stages"]] == [[0, 1], [1, 4]]
    assert row["hits"] == one["hits"] and row["misses"] == one["misses"]
    assert row["token_us"] == pytest.approx(one["token_us"] + 50.0, abs=0.1)
    total = sum(stage["token_us"] for stage in row["stages"])
    assert total == pytest.approx(one["token_us"], abs=0.1)
    lone, eight, many = row["sequences"]
    assert (lone["n"], lone["n_groups"]) == (1, 1)
    assert lone["tokens_per_s"] < eight["tokens_per_s"] < many["tokens_per_s"]
    even = json.loads(cli(*given, "--split", "1,1", "--json").stdout)["rows"][0]
    assert even["sequences"][2]["n_groups"] == 2
    result = cli(*given, "--split", "1,3")
    assert "1 to 3" in result.stdout and "Several sequences" in result.stdout
    for wrong in ("1", "a,b", "0,0", "1,-1"):
        assert "--split" in cli(*given, "--split", wrong).stderr
