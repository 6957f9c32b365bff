"""`moegraph simulate` and the plots."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moegraph.cli import svg
from moegraph.experts.machines import MACHINES, machine_fields
from moegraph.ggml import nvml
from moegraph.ggml.nvml import Card
from moegraph.placement.generator import generate_trace
from moegraph.placement.identity import RouterShape
from moegraph.placement.profile import Profile
from moegraph.placement.trace import Trace, write_trace
from moegraph.units import GiB

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


def drawn(text: str) -> ET.Element:
    """Parse an SVG; every coordinate must be a number."""
    root = ET.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "nan" not in text and "inf" not in text
    return root


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
    assert rows[1].split()[4:] == ["1.000", "0.00", "0.00", "0.70", "1428.6"]
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
    given = ("simulate", trace, "--resident", 40, "--policy", "static", "--machine", machine,
             "--json")  # fmt: skip
    cold = json.loads(cli(*given).stdout)["rows"][0]
    warm = json.loads(cli(*given, "--profile", profile, "--profile-class", "a").stdout)["rows"][0]
    assert warm["hit_rate"] > cold["hit_rate"] + 0.1
    assert cold["token_us"] > 100_000


def test_the_graph_fetches_where_the_mode_lets_it(cli: Cli, trace: Path, tmp_path: Path) -> None:
    """With eight slots each of four layers can, with three none."""
    fields = machine_fields(MACHINES["h200"]) | {"n_layer": 4}

    def ms(miss: str, share: float, **changes: float) -> float:
        (tmp_path / "m.json").write_text(json.dumps({**fields, **changes}))
        given = ("--miss", miss, "--resident", share, "--policy", "lru", "--json")
        result = cli("simulate", trace, *given, "--machine", tmp_path / "m.json")
        return json.loads(result.stdout)["rows"][0]["token_us"] / 1e3

    for miss, share, n_fetching in (("auto", 25, 4), ("stream", 25, 4), ("cpu", 25, 0),
                                    ("auto", 9.375, 0), ("stream", 9.375, 0)):  # fmt: skip
        before = ms(miss, share)
        lookup = ms(miss, share, fetch_layer_us=fields["fetch_layer_us"] + 1000) - before
        look = ms(miss, share, host_layer_us=fields["host_layer_us"] + 1000) - before
        assert (lookup, look) == pytest.approx((n_fetching, 4 - n_fetching)), (miss, share)


def test_plots_are_written_as_svg(cli: Cli, trace: Path, tmp_path: Path) -> None:
    plot, heat = tmp_path / "p.svg", tmp_path / "h.svg"
    cli("simulate", trace, "--resident", "60,20", "--plot", plot, "--heat-map", heat)
    text = "".join(drawn(plot.read_text()).itertext())
    assert "Missing experts and speed by budget" in text and "made for a test; 80 tokens" in text
    assert "MiB of experts on the device" in text and "predicted tok/s, desktop" in text
    assert "lfu" in text and "lru" in text
    shown = "".join(drawn(heat.read_text()).itertext())
    assert "How often experts were chosen" in shown and "most chosen first" in shown
    assert "95 %" in shown and "(root scale)" in shown
    cli("simulate", trace, "--heat-map", heat, "--heat-order", "id")
    shown = "".join(drawn(heat.read_text()).itertext())
    assert "by their ids" in shown and "of the choices" not in shown


@pytest.mark.parametrize("size", [67 << 10, 20 << 20])
def test_times_of_other_experts_are_not_told_as_ones_own(
    cli: Cli, trace: Path, tmp_path: Path, size: int
) -> None:
    """The bytes are those of the trace's model; the machine's times are for far other experts."""
    generated = generate_trace(SHAPE, 80)
    other = tmp_path / "other.trace"
    write_trace(other, Trace(SHAPE, generated.ids, 10, "", (size,) * 4))
    given = ("--resident", "0", "--policy", "lru")
    row = json.loads(cli("simulate", other, *given, "--json").stdout)["rows"][0]
    assert row["uploaded_bytes_per_token"] <= 16 * size and row["token_us"] is None
    assert row["decode_tps"] is None and row["misses"] == 70 * 16
    result = cli("simulate", other, *given)
    assert result.stdout.splitlines()[1].split()[-2:] == ["-", "-"]
    assert "differ too much from those of machine desktop, 1.81 MiB" in result.stderr
    plot = tmp_path / "p.svg"
    cli("simulate", other, *given, "--plot", plot)
    assert "predicted" not in plot.read_text() and "hit rate" in plot.read_text()
    # the user may know better
    row = json.loads(cli("simulate", other, *given, "--expert-size", "1.8MiB", "--json").stdout)
    assert row["rows"][0]["token_us"] > 0 and row["slot_bytes_by_layer"] == [1887436] * 4


def test_without_sizes_nothing_is_made_up(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "t.trace"
    write_trace(path, generate_trace(SHAPE, 80))
    row = json.loads(cli("simulate", path, "--json").stdout)["rows"][0]
    assert row["uploaded_bytes_per_token"] is None and row["token_us"] is None
    result = cli("simulate", path)
    assert "does not say how large an expert is; give --model or --expert-size" in result.stderr
    assert result.stdout.splitlines()[1].split()[-3:] == ["-", "-", "-"]
    line = cli.refused("simulate", path, "--model", "m", "--expert-size", "1MiB")
    assert "give one" in line


def test_budgets_stand_apart_and_the_best_is_marked(cli: Cli, trace: Path) -> None:
    args = ("simulate", trace, "--resident", "25,100")
    policies = ("--policy", "lfu", "--policy", "lru", "--policy", "adaptive")
    result = cli(*args, *policies)
    groups = result.stdout.split("\n\n")
    assert groups.pop().startswith("Prompts")
    assert len(groups) == 2
    rows = {line.split()[3]: line for line in groups[0].splitlines()[1:]}
    speed = {name: float(line.removesuffix("best").split()[-1]) for name, line in rows.items()}
    best = [name for name, line in rows.items() if line.endswith("best")]
    assert best == [name for name, tps in speed.items() if tps == max(speed.values())]
    assert 0 < len(best) < 3
    assert "best" not in groups[1], "all resident: nothing to choose"
    assert "at 25 %: lru = adaptive" in result.stderr
    assert "without --profile, adaptive acts as lru" in result.stderr
    few = cli(*args[:2], "--resident", "6.25", "--policy", "lfu", "--policy", "lru")
    assert "at 6.2 %: lfu = lru" in few.stderr and "lru and adaptive act as lfu" in few.stderr


@pytest.mark.parametrize(
    ("args", "say"),
    [(("--policy", "mru"), "no policy 'mru'"), (("--resident", "x"), "percentages as 25,60,100"),
     (("--resident", "101"), "percentages of 0 to 100"), (("--skip", "70"), "skip fewer"),
     (("--resident", "nan"), "percentages of 0 to 100"),
     (("--machine", "z80"), "not a built-in machine"),
     (("--profile-class", "a"), "needs --profile"),
     (("--profile", "none.json"), "cannot read the profile"),
     (("--plot", "/nowhere/p.svg"), "cannot write"),
     (("--plot", "p.png"), "plots are SVG: name it p.svg"),
     (("--heat-map", "p"), "plots are SVG: name it p.svg"),
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


def test_a_profile_of_another_model_is_refused(cli: Cli, trace: Path, tmp_path: Path) -> None:
    Profile(RouterShape(4, 32, 4, "other")).save(tmp_path / "p.json")
    line = cli.refused("simulate", trace, "--profile", tmp_path / "p.json")
    assert "another router (other; this model: abc)" in line


def test_charts_of_nothing_and_of_odd_names_are_well_formed() -> None:
    drawn(svg.line_chart("a < b & c", "", "", {}))
    drawn(svg.line_chart("one point", "x", "y", {"<s>": [(1.0, 2.0)]}))
    drawn(svg.line_panels("no", "", "x", [svg.Panel("y", {}, log=True)], ("GiB", 0.5)))
    drawn(svg.line_panels("flat", "", "x", [svg.Panel("y", {"a": [(1, 3), (2, 3)]})]))
    drawn(svg.line_panels("0", "", "x", [svg.Panel("y", {"a": [(1, 0), (2, 0)]}, log=True)]))
    drawn(svg.heat_map("empty", "", "", [], True))
    drawn(svg.heat_map("zeros", "", "", [[0.0, 0.0]], True))
    drawn(svg.share_bars("none", "", {}))
    drawn(svg.share_bars("zero", "ms", {"a": {"b": 0.0}}))
    assert "a < b & c" in "".join(drawn(svg.line_chart("a < b & c", "", "", {})).itertext())


def test_a_line_goes_through_its_points() -> None:
    root = drawn(svg.line_chart("t", "x", "y", {"s": [(0, 0), (5, 0.5), (10, 1)]}, (0, 1)))
    dots = [(float(c.get("cx", "")), float(c.get("cy", "")))
            for c in root.iter("{http://www.w3.org/2000/svg}circle")]  # fmt: skip
    assert len(dots) == 3
    assert dots[1][0] == pytest.approx((dots[0][0] + dots[2][0]) / 2)
    assert dots[1][1] == pytest.approx((dots[0][1] + dots[2][1]) / 2)
    assert dots[0][1] > dots[2][1], "larger is higher"


def test_heat_map_cells_cover_each_row_once_and_darken() -> None:
    text = svg.heat_map("t", "", "", [[0.9, 0.9, 0.1, 0], [0, 0, 0, 0.4]], False)
    paths = [p for p in drawn(text).iter("{http://www.w3.org/2000/svg}path") if p.get("transform")]
    cells = sum(int(run.split("h")[1].split("v")[0]) for p in paths
                for run in (p.get("d") or "").split("M")[1:])  # fmt: skip
    assert cells == 8
    shades = [int((p.get("fill") or "")[1:3], 16) for p in paths]
    assert shades == sorted(shades, reverse=True) and len(set(shades)) == 4


def elements(root: ET.Element, name: str) -> list[ET.Element]:
    return list(root.iter(f"{{http://www.w3.org/2000/svg}}{name}"))


def test_bars_are_shares_and_their_values_are_written() -> None:
    bars = {"pp": {"launch": 75.0, "wait": 25.0}, "tg": {"launch": 0.5, "wait": 0.5}}
    root = drawn(svg.share_bars("t", "ms", bars, ["launch: a note"]))
    widths = [float(r.get("width", 0)) for r in elements(root, "rect")
              if r.get("height") == "22.0"]  # fmt: skip
    whole = sum(widths[:2])
    assert widths == pytest.approx([whole * share for share in (0.75, 0.25, 0.5, 0.5)], rel=1e-3)
    assert sum(widths[:2]) == pytest.approx(sum(widths[2:]), rel=1e-3)
    text = [t.text for t in elements(root, "text")]
    assert "launch 75, wait 25" in text and "1 ms" in text and "launch: a note" in text


def test_equal_curves_are_named_together_and_the_later_one_is_dashed() -> None:
    points = [(10.0, 5.0), (100.0, 1.0)]
    series = {"lru": points, "adaptive": list(points), "lfu": [(10.0, 4.0), (100.0, 1.0)]}
    root = drawn(svg.line_panels("t", "from where", "x", [svg.Panel("y", series)]))
    texts = [t.text for t in elements(root, "text")]
    assert "lru = adaptive" in texts and "lfu" in texts and "adaptive" not in texts
    assert "from where" in texts
    curves = [p for p in elements(root, "polyline") if p.get("stroke-width") == "2.0"]
    assert [bool(c.get("stroke-dasharray")) for c in curves] == [False, True, False]
    assert curves[0].get("points") == curves[1].get("points")
    at = {t.text: float(t.get("y", 0)) for t in elements(root, "text")}
    assert abs(at["lfu"] - at["lru = adaptive"]) >= 14, "names do not lie on each other"


def test_the_ends_of_the_axis_have_ticks_and_a_second_axis_its_own_unit() -> None:
    series = {"a": [(10.0, 0.5), (25.0, 0.3), (100.0, 0.0)]}
    panels = [svg.Panel("y", series, log=True)]
    root = drawn(svg.line_panels("t", "", "x", panels, ("GiB", 0.2)))
    texts = elements(root, "text")
    at = {t.text: (float(t.get("x", 0)), float(t.get("y", 0))) for t in texts}
    assert {"10", "100", "2", "20", "GiB"} <= set(at)
    assert at["100"][0] == at["20"][0], "20 GiB are 100 %"
    assert at["0"][1] > at["0.2"][1] > at["0.5"][1], "0 has a place below the logarithms"


def test_drawings_follow_the_page_they_are_on() -> None:
    text = svg.line_chart("t", "x", "y", {"a": [(0, 1), (1, 2)]})
    assert "prefers-color-scheme: dark" in text
    assert 'class="page"' in text and 'fill="#ffffff"' not in text


def test_cumulative_lines_stand_where_the_choices_are_reached() -> None:
    rows = [[0.5, 0.25, 0.125, 0.125], [0.9, 0.05, 0.03, 0.02]]
    root = drawn(svg.heat_map("t", "", "", rows, True))
    tips = [t.text or "" for t in elements(root, "title")]
    assert any("layer 0: 50 % in 1, 80 % in 3, 95 % in 4 experts" in tip for tip in tips)
    assert any("layer 1: 50 % in 1, 80 % in 1, 95 % in 2 experts" in tip for tip in tips)
    lines = [p.get("points") or "" for p in elements(root, "polyline")
             if len((p.get("points") or "").split()) == 4]  # fmt: skip
    assert len(lines) == 3
    eighty = [float(point.split(",")[0]) for point in lines[1].split()]
    assert eighty[0] - 64 == pytest.approx(3 * (eighty[2] - 64), rel=0.01)


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


def test_times_are_those_of_this_machines_card(
    cli: Cli, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def machine(*args: str) -> str:
        found: str = json.loads(cli("simulate", trace, "--json", *args).stdout)["machine"]
        return found

    assert machine() == machine("--machine", "auto") == "desktop"
    card = Card("NVIDIA GeForce RTX 3060", 12 * GiB, 360e9, 25.2e9, "PCIe 4.0 x16", 100e12)
    monkeypatch.setattr(nvml, "gpu_card", lambda: card)
    assert machine() == machine("--machine", "auto") == card.name
    assert machine("--machine", "desktop") == "desktop"
