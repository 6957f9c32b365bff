"""`moegraph bench`: speed in llama-bench's rows and names."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from .. import __version__
from ..errors import ConfigError, RequestError
from ..units import format_bytes, format_count
from . import options, svg, ui
from .outputs import OutputFile
from .report import config_report

if TYPE_CHECKING:
    from ..bench import BenchRow
    from ..engine import Engine
    from ..experts.trace import Trace

_MAX_TOKENS = 1 << 20
_MAX_TESTS = 1000


def _lengths(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    """Parse a comma list such as 512,1024; llama-bench's ranges 0-1024+256 work, too."""
    found: list[int] = []
    for part in text.split(","):
        try:
            found += _range(part.strip())
        except ValueError:
            raise click.BadParameter(
                f"{part!r}; write lengths as 512,1024 or as a range 0-4096+1024"
            ) from None
    if len(found) > _MAX_TESTS or any(not 0 <= n <= _MAX_TOKENS for n in found):
        raise click.BadParameter(f"{text!r}; at most {_MAX_TESTS} lengths of 0 to {_MAX_TOKENS}")
    return tuple(found)


def _range(text: str) -> list[int]:
    """Return the lengths of 'a', 'a-b', 'a-b+step' or 'a-b*factor'."""
    first, dash, rest = text.partition("-")
    if not dash:
        return [int(first)]
    last, step, factor = rest, 1, 1
    if "+" in rest:
        last, _, by = rest.partition("+")
        step = int(by)
    elif "*" in rest:
        last, _, by = rest.partition("*")
        step, factor = 0, int(by)
    low, high = int(first), int(last)
    if low > high or (step <= 0 and factor <= 1) or (factor > 1 and low <= 0):
        raise ValueError(text)
    found: list[int] = []
    while low <= high and len(found) <= _MAX_TESTS:
        found.append(low)
        low = low * factor + step
    return found


@click.command(short_help="Measure speed as llama-bench does.")
@click.argument("target", required=False, metavar="TARGET")
@click.option("-m", "--model", metavar="TARGET", help="The model, in place of the argument.")
@click.option(
    "-p",
    "--n-prompt",
    callback=_lengths,
    default="512",
    show_default=True,
    metavar="LIST",
    help="Prompt lengths (pp); 0 for none.",
)
@click.option(
    "-n",
    "--n-gen",
    callback=_lengths,
    default="128",
    show_default=True,
    metavar="LIST",
    help="Generation lengths (tg); 0 for none.",
)
@click.option(
    "-d",
    "--n-depth",
    callback=_lengths,
    default="0",
    show_default=True,
    metavar="LIST",
    help="Positions that are filled before each test.",
)
@click.option(
    "-r",
    "--repetitions",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    metavar="N",
    help="Timed runs of each test.",
)
@click.option(
    "-o",
    "--output",
    "style",
    type=click.Choice(["md", "json", "csv"]),
    default="md",
    show_default=True,
    help="Format of the rows.",
)
@click.option(
    "--routing",
    "trace_path",
    type=click.Path(path_type=Path),
    metavar="TRACE",
    help="In tg tests, replay a routing trace in place of the router's choice.",
)
@click.option(
    "--phases",
    "phases_path",
    type=click.Path(path_type=Path),
    metavar="FILE.svg",
    help="Write what the host does in a pass, in ms by phase; for --mode layered.",
)
@options.engine_options
def bench(
    target: str | None, model: str | None, n_prompt: tuple[int, ...],
    n_gen: tuple[int, ...], n_depth: tuple[int, ...], repetitions: int, style: str,
    trace_path: Path | None, phases_path: Path | None, **given: Any,
) -> None:  # fmt: skip
    """Measure the model TARGET: prompt processing (pp) and generation (tg), tokens a second.

    Rows, names and JSON fields are llama-bench's. Tokens are random and nothing is sampled; one
    run before the timed ones is not counted. The context is as large as the tests need unless -c
    says otherwise.

    \b
    Examples:
      moegraph bench tiny
      moegraph bench model.gguf -p 512,2048 -n 64 -d 0,4096 -r 3
      moegraph bench model.gguf --mode layered -o json
      moegraph bench model.gguf --vram 12 -p 0 --routing my.trace
    """
    from ..bench import BenchSpec, run_bench

    name = model or target
    if name is None or (model and target):
        raise click.UsageError("give one model: a GGUF file or a shipped model's name")
    if not any(n_prompt) and not any(n_gen):
        raise RequestError("nothing to measure; -p and -n are both 0")
    ctx = click.get_current_context()
    if ctx.get_parameter_source("n_ctx") is ParameterSource.DEFAULT:
        needed = max(n_depth) + max(*n_prompt, *n_gen)
        given["n_ctx"] = -(-needed // 256) * 256
    spec = BenchSpec(n_prompt, n_gen, n_depth, repetitions)
    trace = _read_routing(trace_path) if trace_path else None
    config = options.build_config(given)
    if config.profile not in ("", "none") and not Path(config.profile).is_file():
        raise RequestError(f"{config.profile}: no such profile, and bench writes none")
    if phases_path and config.mode != "layered":
        raise ConfigError("--phases needs --mode layered; one graph a pass has no phases")
    with ExitStack() as stack:
        plot = stack.enter_context(OutputFile(phases_path)) if phases_path else None
        engine = stack.enter_context(options.load_engine(name, config, trace))
        facts: dict[str, Any] = _facts(engine)
        bars: dict[str, dict[str, float]] = {}
        records = (_noted(_record(facts, row), bars) for row in run_bench(engine, spec))
        {"md": _print_markdown, "json": _print_json, "csv": _print_csv}[style](records)
        if plot:
            title = f"Host time of a pass, {facts['model_type']}, {facts['device_info']}"
            plot.write(svg.stacked_bars(title, "ms", bars).encode())
        options.show_messages(engine)


def _noted(record: dict[str, Any], bars: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Return a record, its phases added to bars."""
    if record["experts"]:
        bars[record["test"]] = record["experts"]["phases_ms_per_step"]
    return record


def _read_routing(path: Path) -> Trace:
    """Read a trace and say what it is like: a speed means little without its routing."""
    from ..experts.trace import read_trace
    from ..experts.tracestats import trace_stats

    trace = read_trace(path)
    ui.note(trace_stats(trace).line())
    return trace


def _facts(engine: Engine) -> dict[str, Any]:
    """Return the columns that are equal in all rows; names as in llama-bench's JSON."""
    from ..ggml.lib import llama_commit, patchset
    from ..modelfile.summary import summarize

    summary = summarize(engine.hparams, engine.file.tensors)
    kv = engine.file.kv
    label = kv.get("general.size_label") or format_count(summary.n_params).replace(" ", "")
    return {
        "moegraph": __version__,
        "llama_commit": llama_commit(),
        "patchset": patchset(),
        "model_filename": str(engine.file.path),
        "model_type": f"{kv['general.architecture']} {label} {summary.by_type[0].type}",
        "model_size": summary.n_bytes,
        "model_n_params": summary.n_params,
        "backends": "CPU" if engine.device_name == "cpu" else "CUDA",
        "device_info": engine.device.description,
        **config_report(engine),
    }


def _record(facts: dict[str, Any], row: BenchRow) -> dict[str, Any]:
    samples_ns = [round(s * 1e9) for s in row.seconds]
    is_prompt = row.test.startswith("pp")
    return {
        **facts,
        "n_prompt": row.n_tokens if is_prompt else 0,
        "n_gen": 0 if is_prompt else row.n_tokens,
        "n_depth": row.depth,
        "test_time": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "avg_ns": round(statistics.fmean(samples_ns)),
        "stddev_ns": round(statistics.stdev(samples_ns)) if len(samples_ns) > 1 else 0,
        "avg_ts": round(row.mean_tps, 6),
        "stddev_ts": round(row.sd_tps, 6),
        "samples_ns": samples_ns,
        "samples_ts": [round(ts, 6) for ts in row.samples_tps],
        "test": row.test,
        "experts": row.experts.report() if row.experts else None,
    }


def _print_json(records: Iterator[dict[str, Any]]) -> None:
    rows = [json.dumps(record, ensure_ascii=False) for record in records]
    click.echo("[\n  " + ",\n  ".join(rows) + "\n]")


def _print_csv(records: Iterator[dict[str, Any]]) -> None:
    for at, record in enumerate(records):
        flat = {**record, **_expert_columns(record)}
        flat.pop("experts", None)
        fields = {k: v for k, v in flat.items() if not k.startswith("samples")}
        line = io.StringIO()
        writer = csv.writer(line, quoting=csv.QUOTE_ALL, lineterminator="\n")
        if at == 0:
            writer.writerow(fields)
        writer.writerow(fields.values())
        ui.write_text(line.getvalue())


def _expert_columns(record: dict[str, Any]) -> dict[str, str]:
    """Return the columns about experts that may be missing from the device; none otherwise."""
    experts = record.get("experts")
    if not experts:
        return {}
    return {
        "hit_rate": f"{experts['hit_rate']:.3f}",
        "mib_step": f"{experts['fetched_mib_per_step']:.1f}",
    }


def _print_markdown(records: Iterator[dict[str, Any]]) -> None:
    widths: list[int] = []
    for at, record in enumerate(records):
        cells = _markdown_cells(record)
        if at == 0:
            widths = [max(len(name), len(cell)) for name, cell in cells.items()]
            # Later tests have longer names and larger numbers than the first.
            widths[-2:] = [max(widths[-2], 16), max(widths[-1], 20)]
            _print_row(list(cells), widths)
            rules = [("-" * (w + 1)) + ("-" if name in _LEFT else ":")
                     for name, w in zip(cells, widths, strict=True)]  # fmt: skip
            ui.write_text("|" + "|".join(rules) + "|\n")
        _print_row(list(cells.values()), widths)


_LEFT = ("model", "backend", "mode", "type_k", "type_v")


def _markdown_cells(record: dict[str, Any]) -> dict[str, str]:
    cells = {
        "model": record["model_type"],
        "size": format_bytes(record["model_size"]),
        "params": format_count(record["model_n_params"]),
        "backend": record["backends"],
        "threads": str(record["n_threads"]),
        "mode": record["mode"],
    }
    for name, usual in (("n_ubatch", 512), ("type_k", "f16"), ("type_v", "f16")):
        if record[name] != usual:
            cells[name] = str(record[name])
    cells |= _expert_columns(record)
    cells["test"] = record["test"]
    cells["t/s"] = f"{record['avg_ts']:.2f} \u00b1 {record['stddev_ts']:.2f}"
    return cells


def _print_row(cells: list[str], widths: list[int]) -> None:
    padded = [
        cell.ljust(width) if at in (0, 3, 5) else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    ui.write_text("| " + " | ".join(padded) + " |\n")
