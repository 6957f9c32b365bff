"""`moegraph simulate` and the plots."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moegraph.cli import svg
from moegraph.experts.cost import MACHINES, machine_fields
from moegraph.experts.generator import generate_trace
from moegraph.experts.identity import RouterShape
from moegraph.experts.profile import Profile
from moegraph.experts.trace import Trace, write_trace

if TYPE_CHECKING:
    from conftest import Cli

SHAPE = RouterShape(4, 32, 4, "abc")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.trace"
    generated = generate_trace(SHAPE, 80)
    write_trace(path, Trace(SHAPE, generated.ids, 10, "made for a test"))
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
    assert [row.split()[:4] for row in rows] == [["25", "%", "8", "lru"], ["100", "%", "32", "lru"]]
    assert rows[1].split()[4:7] == ["1.000", "0.00", "0.0"]
    assert "80 tokens, lag-1 overlap" in result.stderr


def test_json_has_everything_by_layer(cli: Cli, trace: Path) -> None:
    result = cli("simulate", trace, "--resident", "0,50", "--policy", "lfu:half_life=9", "--json",
                 "--machine", "h200", "--miss", "stream")  # fmt: skip
    report = json.loads(result.stdout)
    assert report["trace"]["n_tokens"] == 80 and report["trace"]["n_prompt"] == 10
    assert report["trace"]["source"] == "made for a test" and len(report["trace"]["lru"]) == 4
    assert (report["machine"], report["miss"]) == ("h200", "stream")
    cold, half = report["rows"]
    assert cold["hit_rate"] == 0 and cold["missing_per_token"] == 16 and cold["n_tokens"] == 70
    assert cold["streamed"] == 70 * 16 and cold["on_cpu"] == 0
    assert half["policy"] == "lfu:half_life=9" and len(half["hit_rate_by_layer"]) == 4
    assert 0.5 < half["hit_rate"] < 1 and half["ms_per_token"] < cold["ms_per_token"]
    assert cold["bytes_per_token"] == 16 * MACHINES["h200"].expert_bytes
    # four layers take a tenth of forty
    floor = MACHINES["h200"].whole * 1e3 / 10
    assert floor < half["ms_per_token"] < 2 * floor


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
    assert cold["ms_per_token"] > 100


def test_the_graph_fetches_where_the_mode_lets_it(cli: Cli, trace: Path, tmp_path: Path) -> None:
    """With eight slots each of four layers can, with three none."""
    fields = machine_fields(MACHINES["h200"]) | {"n_layer": 4}

    def ms(miss: str, share: float, **changes: float) -> float:
        (tmp_path / "m.json").write_text(json.dumps({**fields, **changes}))
        given = ("--miss", miss, "--resident", share, "--policy", "lru", "--json")
        result = cli("simulate", trace, *given, "--machine", tmp_path / "m.json")
        return json.loads(result.stdout)["rows"][0]["ms_per_token"]

    for miss, share, n_fetching in (("auto", 25, 4), ("stream", 25, 4), ("cpu", 25, 0),
                                    ("auto", 9.375, 0), ("stream", 9.375, 0)):  # fmt: skip
        before = ms(miss, share)
        lookup = ms(miss, share, lookup_us=fields["lookup_us"] + 1000) - before
        look = ms(miss, share, look_us=fields["look_us"] + 1000) - before
        assert (lookup, look) == pytest.approx((n_fetching, 4 - n_fetching)), (miss, share)


def test_plots_are_written_as_svg(cli: Cli, trace: Path, tmp_path: Path) -> None:
    plot, heat = tmp_path / "p.svg", tmp_path / "h.svg"
    cli("simulate", trace, "--resident", "60,20", "--plot", plot, "--heat-map", heat)
    text = "".join(drawn(plot.read_text()).itertext())
    assert "Hit rate against budget" in text and "lfu" in text and "lru" in text
    assert "How often experts were chosen in 80 tokens" in heat.read_text()
    drawn(heat.read_text())


@pytest.mark.parametrize(
    ("args", "say"),
    [(("--policy", "mru"), "no policy 'mru'"), (("--resident", "x"), "percentages as 25,60,100"),
     (("--resident", "101"), "percentages of 0 to 100"), (("--skip", "70"), "nothing is left"),
     (("--resident", "nan"), "percentages of 0 to 100"),
     (("--machine", "z80"), "no such machine"), (("--profile-class", "a"), "needs --profile"),
     (("--profile", "none.json"), "cannot read the profile"),
     (("--plot", "/nowhere/p.svg"), "cannot write")],
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
    drawn(svg.heat_map("empty", "", "", []))
    drawn(svg.heat_map("zeros", "", "", [[0.0, 0.0]]))
    drawn(svg.stacked_bars("none", "", {}))
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
    text = svg.heat_map("t", "", "", [[9, 9, 1, 0], [0, 0, 0, 4]])
    paths = list(drawn(text).iter("{http://www.w3.org/2000/svg}path"))
    cells = sum(int(run.split("h")[1].split("v")[0]) for p in paths
                for run in (p.get("d") or "").split("M")[1:])  # fmt: skip
    assert cells == 8
    shades = [int((p.get("fill") or "")[1:3], 16) for p in paths]
    assert shades == sorted(shades, reverse=True) and len(set(shades)) == 4


def test_stacked_bars_are_as_high_as_their_sums() -> None:
    bars = {"a": {"compute": 3.0, "stall": 1.0}, "b": {"compute": 2.0}}
    root = drawn(svg.stacked_bars("t", "ms", bars))
    tag = "{http://www.w3.org/2000/svg}rect"
    rects = [r for r in root.iter(tag) if float(r.get("width", 0)) > 50]
    heights = [float(r.get("height", 0)) for r in rects[1:]]
    assert heights == pytest.approx([heights[0], heights[0] / 3, heights[0] * 2 / 3], rel=0.01)
