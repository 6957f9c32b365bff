"""`moegraph bench`: speed in llama-bench's rows and names."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from .. import __version__
from ..config import KV_TYPES, EngineConfig
from ..errors import ConfigError, RequestError
from . import options, svg, ui
from .benchrows import STYLES
from .command import Command
from .completion import MODEL_TARGET
from .outputs import OutputFile
from .report import config_report

if TYPE_CHECKING:
    from ..bench import BenchRow, BenchSpec
    from ..engine import Engine
    from ..placement.trace import Trace

_MAX_TOKENS = 1 << 20
_MAX_TESTS = 1000
# Settings that may be lists; an engine is loaded for each combination.
_SWEPT = ("n_threads", "n_ubatch", "type_k", "type_v")


def _lengths(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> tuple[int, ...]:
    """Parse comma lists such as 512,1024 and llama-bench's ranges such as 0-1024+256."""
    found: list[int] = []
    for part in _parts(texts):
        try:
            found += _range(part)
        except ValueError:
            raise click.BadParameter(
                f"{part!r}; write lengths as 512,1024 or as a range 0-4096+1024"
            ) from None
    if len(found) > _MAX_TESTS or any(not 0 <= n <= _MAX_TOKENS for n in found):
        given = ",".join(texts)
        raise click.BadParameter(f"{given!r}; at most {_MAX_TESTS} lengths of 0 to {_MAX_TOKENS}")
    return tuple(found)


def _parts(texts: tuple[str, ...]) -> list[str]:
    """Return the entries of all comma lists, in order; a repeated option appends its list."""
    return [part.strip() for text in texts for part in text.split(",")]


def _pairs(
    _: click.Context, __: click.Parameter, texts: tuple[str, ...]
) -> tuple[tuple[int, int], ...]:
    """Parse '512,128', one prompt and one generation each."""
    found = []
    for text in texts:
        try:
            n_prompt, n_gen = (int(part) for part in text.split(","))
        except ValueError:
            raise click.BadParameter(
                f"{text!r}; write a prompt and a generation, 512,128"
            ) from None
        if not (0 < n_prompt <= _MAX_TOKENS and 0 < n_gen <= _MAX_TOKENS):
            raise click.BadParameter(f"{text!r}; both are 1 to {_MAX_TOKENS}")
        found.append((n_prompt, n_gen))
    return tuple(found)


def _numbers(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> tuple[int, ...]:
    """Parse comma lists and ranges of numbers; EngineConfig checks the values."""
    try:
        found = tuple(n for part in _parts(texts) for n in _range(part))
    except ValueError:
        raise click.BadParameter(f"{','.join(texts)!r}; write numbers as 1,2 or 1-8") from None
    if len(found) > _MAX_TESTS:
        raise click.BadParameter(f"{','.join(texts)!r}; at most {_MAX_TESTS} numbers")
    return found


def _kv_types(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Parse comma lists of cache types."""
    found = tuple(_parts(texts))
    wrong = [name for name in found if name not in KV_TYPES]
    if wrong:
        raise click.BadParameter(f"{wrong[0]!r} is not one of {', '.join(KV_TYPES)}")
    return found


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


def _list_option(*flags: str, **described: Any) -> Callable[[options.Command], options.Command]:
    """Return a repeatable option that takes comma lists; bench measures every entry."""
    return click.option(*flags, multiple=True, **described)


@click.command(cls=Command, short_help="Measure speed as llama-bench does.")
@click.argument("target", required=False, type=MODEL_TARGET, metavar="TARGET")
@_list_option(
    "-m",
    "--model",
    "models",
    type=MODEL_TARGET,
    metavar="TARGET",
    help="A model, instead of the argument TARGET; repeatable.",
)
@_list_option(
    "-p",
    "--n-prompt",
    callback=_lengths,
    default=("512",),
    show_default=True,
    metavar="LIST",
    help="Prompt lengths (pp), such as 512,1024; 0: no prompt test.",
)
@_list_option(
    "-n",
    "--n-gen",
    callback=_lengths,
    default=("128",),
    show_default=True,
    metavar="LIST",
    help="Generation lengths (tg); 0: no generation test.",
)
@_list_option(
    "-pg",
    "pairs",
    callback=_pairs,
    metavar="PP,TG",
    help="A prompt and a generation timed together; repeatable.",
)
@_list_option(
    "-d",
    "--n-depth",
    callback=_lengths,
    default=("0",),
    show_default=True,
    metavar="LIST",
    help="Context positions that are filled before each test, not timed.",
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
    "--no-warmup",
    is_flag=True,
    help="Do not run each test once, untimed, before the timed runs.",
)
@click.option(
    "-o",
    "--output",
    "style",
    type=click.Choice(tuple(STYLES)),
    default="md",
    show_default=True,
    help="Format of the rows.",
)
@_list_option(
    "-t",
    "--threads",
    "n_threads",
    callback=_numbers,
    metavar="LIST",
    help="CPU threads, such as 1,2. Default: measured at load for tg, the physical cores for pp.",
)
@_list_option(
    "-ub",
    "--ubatch-size",
    "n_ubatch",
    callback=_numbers,
    default=("512",),
    show_default=True,
    metavar="LIST",
    help="Maximum number of prompt tokens in one pass.",
)
@_list_option(
    "-ctk",
    "--cache-type-k",
    "type_k",
    callback=_kv_types,
    default=("f16",),
    show_default=True,
    metavar="LIST",
    help="Data types of the K cache, such as f16,q8_0.",
)
@_list_option(
    "-ctv",
    "--cache-type-v",
    "type_v",
    callback=_kv_types,
    default=("f16",),
    show_default=True,
    metavar="LIST",
    help="Data types of the V cache.",
)
@click.option(
    "--routing",
    "trace_path",
    type=click.Path(path_type=Path),
    metavar="TRACE",
    help="Replay a routing trace in tg tests, instead of the router's own choice.",
)
@options.svg_option(
    "--phases",
    "phases_path",
    help="Write a plot of the host time of a pass by phase; needs --mode layered.",
)
@options.engine_options_but(*_SWEPT, "cache_ram")
def bench(
    target: str | None, models: tuple[str, ...], n_prompt: tuple[int, ...],
    n_gen: tuple[int, ...], pairs: tuple[tuple[int, int], ...], n_depth: tuple[int, ...],
    repetitions: int, no_warmup: bool, style: str, trace_path: Path | None,
    phases_path: Path | None, **given: Any,
) -> None:  # fmt: skip
    """Measure the model TARGET: prompt processing (pp) and generation (tg), in tokens per second.

    Rows, names and JSON fields are llama-bench's. Options marked LIST take several values, as in
    llama-bench: bench measures all combinations and loads the model for each combination of
    settings. Tokens are random, and nothing is sampled. Without -c, the context is as large as
    the tests need.

    \b
    Examples:
      moegraph bench tiny
      moegraph bench model.gguf -p 512,2048 -n 64 -d 0,4096 -r 3
      moegraph bench model.gguf -t 4,8 -ctk f16,q8_0 -pg 512,128 -o json
      moegraph bench model.gguf --vram 12 -p 0 --routing my.trace
    """
    from ..bench import BenchSpec

    names = models or ((target,) if target else ())
    if not names or (models and target):
        raise click.UsageError("give a model: a GGUF file or a shipped model's name")
    spec = BenchSpec(n_prompt, n_gen, n_depth, repetitions, pairs=pairs, warm_up=not no_warmup)
    if not spec.tests:
        raise RequestError("nothing to measure: -p and -n are both 0; raise one of them")
    if click.get_current_context().get_parameter_source("n_ctx") is ParameterSource.DEFAULT:
        needed = max(test.depth + test.n_prompt + test.n_gen for test in spec.tests)
        given["n_ctx"] = -(-needed // 256) * 256
    trace = _read_routing(trace_path) if trace_path else None
    configs = _configs(given)
    config = configs[0]
    if config.profile not in ("", "none") and not Path(config.profile).is_file():
        raise RequestError(
            f"{config.profile}: the profile does not exist, and bench does not create one"
        )
    if phases_path and config.mode != "layered":
        raise ConfigError("--phases needs --mode layered; a pass of one graph has no phases")
    with OutputFile(phases_path) if phases_path else nullcontext() as plot:
        phases, warned = _Phases(_varied(names, configs)), set[str]()
        records = (
            phases.noted(record)
            for name in names
            for config in configs
            for record in _measure(name, config, spec, trace, warned)
        )
        STYLES[style](records, [test.name for test in spec.tests], _varied(names, configs))
        if plot:
            plot.write(phases.plot().encode())


def _configs(given: dict[str, Any]) -> list[EngineConfig]:
    """Return a configuration for each combination of the settings given as lists."""
    return [
        options.build_config({**given, **dict(zip(_SWEPT, values))})
        for values in itertools.product(*(given[name] or (None,) for name in _SWEPT))
    ]


def _varied(names: Sequence[str], configs: Sequence[EngineConfig]) -> frozenset[str]:
    """Return the columns whose values differ between the configurations or models."""
    found = {name for name in _SWEPT if len({getattr(c, name) for c in configs}) > 1}
    return frozenset(found | ({"size", "params"} if len(names) > 1 else set()))


def _measure(
    name: str, config: EngineConfig, spec: BenchSpec, trace: Trace | None, warned: set[str]
) -> Iterator[dict[str, Any]]:
    """Load a model and yield its records."""
    from ..bench import run_bench

    with options.load_engine(name, config, trace, warned) as engine:
        facts = _facts(engine)
        for row in run_bench(engine, spec):
            yield _record(facts, row, engine.threads.report())
        options.show_messages(engine)


class _Phases:
    """Host time of a pass of each test, in ms by phase, for the plot."""

    _NOTES = (
        "launch: enqueues the graphs; on the CPU it computes them",
        "wait: waits for the router's choice",
        "resolve: looks up the slots of the chosen experts; uploads or computes missing ones",
    )

    def __init__(self, varied: frozenset[str]) -> None:
        self._bars: dict[str, dict[str, float]] = {}
        self._title = ""
        self._varied = [name for name in _SWEPT if name in varied]

    def noted(self, record: dict[str, Any]) -> dict[str, Any]:
        """Keep the phases of a record and return the record."""
        experts = record["experts"]
        if experts:
            self._title = f"{record['model_type']}, {record['device_info']}"
            settings = [f"{name.removeprefix('n_')} {record[name]}" for name in self._varied]
            name = ", ".join([record["test"], *settings])
            self._bars[name] = {
                phase: 1e-3 * us for phase, us in experts["phases_us_per_pass"].items()
            }
        return record

    def plot(self) -> str:
        """Return the phases of all tests as SVG."""
        return svg.share_bars(f"Host time of a pass, {self._title}", "ms", self._bars, self._NOTES)


def _read_routing(path: Path) -> Trace:
    """Read a trace and print its statistics: a speed means little without its routing."""
    from ..placement.trace import read_trace
    from ..placement.tracestats import trace_stats

    trace = read_trace(path)
    ui.note(trace_stats(trace).line())
    return trace


def _facts(engine: Engine) -> dict[str, Any]:
    """Return the columns that are equal in all rows of an engine, under llama-bench's names."""
    from ..ggml.lib import llama_commit, patchset
    from ..modelfile.summary import summarize

    summary = summarize(engine.hparams, engine.file.tensors)
    kv = engine.file.kv
    label = kv.get("general.size_label")
    words = [kv["general.architecture"], *([label] if label else []), summary.by_type[0].type]
    return {
        "moegraph": __version__,
        "llama_commit": llama_commit(),
        "patchset": patchset(),
        "model_filename": str(engine.file.path),
        "model_type": " ".join(words),
        "model_size": summary.n_bytes,
        "model_n_params": summary.n_params,
        "backends": "CPU" if engine.device_name == "cpu" else "CUDA",
        "device_info": engine.device.description,
        **config_report(engine),
    }


def _record(facts: dict[str, Any], row: BenchRow, threads: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a row. threads: the CPU threads in use when the test ended."""
    samples_ns = [round(s * 1e9) for s in row.seconds]
    return {
        **facts,
        **threads,
        "n_threads": threads["n_threads_batch" if row.n_gen == 0 else "n_threads"],
        "n_prompt": row.n_prompt,
        "n_gen": row.n_gen,
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
