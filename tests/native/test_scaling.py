"""`moegraph run --profile-scaling`: times of passes by their number of rows."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from moegraph.bench.scaling import WIDTHS, measure_scaling, scaling_config
from moegraph.cli import main
from moegraph.config import EngineConfig
from moegraph.engine import Engine


def invoke(*args: object) -> Result:
    given = ("run", "tiny", "--profile-scaling", "--device", "cpu", "-t", 1, *args)
    return CliRunner().invoke(main, [str(arg) for arg in given])


@pytest.mark.parametrize("settings", [{"cache_slots": 60, "pin_layers": 0}])
def test_every_width_is_measured_and_the_sequence_stays(settings: dict[str, Any]) -> None:
    config = EngineConfig(device="cpu", n_threads=1, n_ctx=512, **settings)
    with Engine.load("tiny", scaling_config(config)) as engine:
        held = []
        for _, seconds in measure_scaling(engine):
            held.append((len(engine.held(0)), engine.state.n_past[0]))
            assert seconds > 0
        assert held == [(128, 128)] * len(WIDTHS)
        rows = engine.forward_logits(np.array([5, 6], np.int32), 128)
        assert np.isfinite(rows).all()


def test_a_table_or_json() -> None:
    result = invoke("-c", 64, "-ub", 16)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[0] for row in rows] == ["rows", "1", "4", "8", "12", "16"]
    assert rows[1][-1] == "1.00x"
    report = json.loads(invoke("-c", 1, "--json").stdout)
    assert [row["n_rows"] for row in report["scaling"]] == [1]
    assert report["scaling"][0]["ms"] > 0


def test_wrong_settings_are_one_line() -> None:
    result = invoke("-c", -5)
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
