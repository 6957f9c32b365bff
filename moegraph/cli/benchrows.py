"""The rows of `moegraph bench` as Markdown, JSON, JSON lines, CSV or SQL, printed as they come."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..config import settings as engine_settings
from ..units import format_bytes, format_count, format_share
from . import ui

Records = Iterator[dict[str, Any]]

_MAX_WIDTH = 100
_LEFT = ("model", "backend", "mode", "type_k", "type_v")
# If a table is too wide, these columns go first, in this order: they are constant over a run, and
# a note on stderr shows their values.
_SPARED = ("mode", "params", "size", "threads", "backend")
# llama-bench shows these settings only if they differ from these values.
_USUAL = {"n_ubatch": 512, "type_k": "f16", "type_v": "f16"}
# Settings that other columns show.
_SHOWN = ("n_threads", "mode", "size", "params")
# Of rows of --ttft: the parts of the time to the first token.
_PARTS = ("process_ms", "load_ms", "tokenizer_ms", "prefill_ms", "other_ms")
# What csv and sql have no place for.
_NESTED = ("samples_ns", "samples_ts", "experts", "sampling", "drafts", "load_phases_ms")
_SQL_TABLE = "moegraph_bench"
# Of columns that may be NULL in the first row.
_SQL_KINDS = {
    "hit_rate": "REAL", "uploaded_bytes_per_pass": "INTEGER", "tokens_per_step": "REAL",
    "drafted": "INTEGER", "accepted": "INTEGER", "pin_layers": "INTEGER", "cache_slots": "INTEGER",
}  # fmt: skip


def print_json(records: Records, tests: Sequence[str], varied: frozenset[str]) -> None:
    """Print one array, which stays valid JSON if the run is interrupted or a test fails."""
    n_rows = 0
    try:
        for record in records:
            ui.write_text(",\n  " if n_rows else "[\n  ")
            ui.write_text(json.dumps(record, ensure_ascii=False))
            n_rows += 1
    finally:
        if n_rows:
            ui.write_text("\n]\n")
    if not n_rows:
        ui.write_text("[]\n")


def print_jsonl(records: Records, tests: Sequence[str], varied: frozenset[str]) -> None:
    """Print one object a line."""
    for record in records:
        ui.write_text(json.dumps(record, ensure_ascii=False) + "\n")


def print_csv(records: Records, tests: Sequence[str], varied: frozenset[str]) -> None:
    """Print a header and quoted rows, without the samples."""
    writer = csv.writer(sys.stdout, quoting=csv.QUOTE_ALL, lineterminator="\n")
    for at, record in enumerate(records):
        fields = _flat(record)
        if at == 0:
            writer.writerow(fields)
        writer.writerow(fields.values())
        sys.stdout.flush()


def print_sql(records: Records, tests: Sequence[str], varied: frozenset[str]) -> None:
    """Print a table definition and one INSERT for each row, as sqlite3 reads them."""
    for at, record in enumerate(records):
        fields = _flat(record)
        if at == 0:
            kinds = ",\n  ".join(
                f"{name} {_SQL_KINDS.get(name) or _sql_type(value)}"
                for name, value in fields.items()
            )
            ui.write_text(f"CREATE TABLE IF NOT EXISTS {_SQL_TABLE} (\n  {kinds}\n);\n\n")
        values = ", ".join(_sql_value(value) for value in fields.values())
        ui.write_text(f"INSERT INTO {_SQL_TABLE} ({', '.join(fields)}) VALUES ({values});\n")


def _sql_type(value: Any) -> str:
    if isinstance(value, (bool, int)):
        return "INTEGER"
    return "REAL" if isinstance(value, float) else "TEXT"


def _sql_value(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, (bool, int, float)):
        return repr(int(value) if isinstance(value, bool) else value)
    return "'" + str(value).replace("'", "''") + "'"


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """Return a row without samples; a few figures stand for nested objects."""
    experts, drafts = record.get("experts") or {}, record.get("drafts") or {}
    fields = {k: v for k, v in record.items() if k not in _NESTED}
    return {
        **fields,
        "hit_rate": experts.get("hit_rate"),
        "uploaded_bytes_per_pass": experts.get("uploaded_bytes_per_pass"),
        **{name: drafts.get(name) for name in ("drafted", "accepted", "tokens_per_step")},
    }


def print_markdown(records: Records, tests: Sequence[str], varied: frozenset[str]) -> None:
    """Print llama-bench's table, in at most 100 columns if possible.

    tests: the names of all tests. varied: the settings that take several values in this run.
    """
    widths: dict[str, int] = {}
    for at, record in enumerate(records):
        cells = _markdown_cells(record, varied)
        if at == 0:
            widths = _fitting(cells, tests, varied)
            _print_row({name: name for name in widths}, widths)
            rules = [
                "-" * (width + 1) + ("-" if name in _LEFT else ":")
                for name, width in widths.items()
            ]
            ui.write_text("|" + "|".join(rules) + "|\n")
        _print_row(cells, widths)


def _fitting(cells: dict[str, str], tests: Sequence[str], varied: frozenset[str]) -> dict[str, int]:
    """Return the widths of the columns to show, and note the values of the others."""
    widths = {name: max(len(name), len(cell)) for name, cell in cells.items()}
    # Later tests may have longer names and larger numbers than the first one.
    widths["test"] = max([widths["test"], *map(len, tests)])
    for setting in engine_settings():
        if setting.name in varied and setting.name in widths:
            widths[setting.name] = max([widths[setting.name], *map(len, setting.choices)])
    last = list(cells)[-1]
    widths[last] = max(widths[last], 16)
    for name in _SPARED:
        if sum(widths.values()) + 3 * len(widths) + 1 <= _MAX_WIDTH:
            break
        if name in widths and not {name, f"n_{name}"} & varied:
            del widths[name]
    left_out = [f"{name} {cell}" for name, cell in cells.items() if name not in widths]
    if left_out:
        ui.note(", ".join(left_out))
    return widths


def _markdown_cells(record: dict[str, Any], varied: frozenset[str]) -> dict[str, str]:
    n_params, mode = format_count(record["model_n_params"]), record["mode"]
    cells = {"model": record["model_type"], "size": format_bytes(record["model_size"])}
    if n_params.replace(" ", "") not in record["model_type"]:
        cells["params"] = n_params
    cells |= {"backend": record["backends"], "threads": str(record["n_threads"])}
    if mode != "whole" or "mode" in varied:
        cells["mode"] = mode
    for name, usual in _USUAL.items():
        if name in varied or record[name] != usual:
            cells[name] = str(record[name])
    for name in sorted(varied - {*_USUAL, *_SHOWN}):
        cells[name] = str(record[name])
    experts = record.get("experts")
    if experts:
        cells["hit rate"] = f"{experts['hit_rate']:.3f}"
        cells["MiB/pass"] = f"{experts['uploaded_bytes_per_pass'] / 2**20:.1f}"
    drafts = record.get("drafts")
    if drafts or "spec" in varied:
        cells |= {"accepted": "", "tokens/step": ""}
    if drafts and drafts["steps"]:
        cells["accepted"] = format_share(drafts["accepted"] / drafts["drafted"])
        cells["tokens/step"] = f"{drafts['tokens_per_step']:.2f}"
    cells["test"] = record["test"]
    if _PARTS[0] in record:
        cells |= {name.removesuffix("_ms"): f"{record[name]:.0f}" for name in _PARTS}
        cells["first token, ms"] = (
            f"{record['avg_ns'] * 1e-6:.0f} \u00b1 {record['stddev_ns'] * 1e-6:.0f}"
        )
        return cells
    cells["t/s"] = f"{record['avg_ts']:.2f} \u00b1 {record['stddev_ts']:.2f}"
    return cells


def _print_row(cells: dict[str, str], widths: dict[str, int]) -> None:
    padded = [
        cells.get(name, "").ljust(width) if name in _LEFT else cells.get(name, "").rjust(width)
        for name, width in widths.items()
    ]
    ui.write_text("| " + " | ".join(padded) + " |\n")


STYLES: dict[str, Callable[[Records, Sequence[str], frozenset[str]], None]] = {
    "md": print_markdown, "json": print_json, "jsonl": print_jsonl, "csv": print_csv,
    "sql": print_sql,
}  # fmt: skip
