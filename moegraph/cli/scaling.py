"""`moegraph run --profile-scaling`: times of passes of 1 to 128 rows."""

from __future__ import annotations

import json

import click

from ..config import EngineConfig
from . import options, ui


def show_scaling(target: str, config: EngineConfig, as_json: bool) -> None:
    """Load a model, measure, and print a table, or one JSON object."""
    from ..bench.scaling import measure_scaling, scaling_config

    with options.load_engine(target, scaling_config(config), is_chosen=False) as engine:
        found = list(measure_scaling(engine))
    if as_json:
        rows = [{"n_rows": one.n_rows, "ms": round(1e3 * one.seconds, 4)} for one in found]
        click.echo(json.dumps({"scaling": rows}))
        return
    alone = found[0].seconds
    cells = [
        (f"{one.n_rows}", f"{1e3 * one.seconds:.3f}", f"{1e3 * one.seconds / one.n_rows:.3f}",
         f"{one.seconds / alone:.2f}x")
        for one in found
    ]  # fmt: skip
    ui.table(cells, ("rows", "ms", "ms a row", "of one row"))
