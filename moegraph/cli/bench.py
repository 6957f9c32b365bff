"""`moegraph bench`: speed in llama-bench's rows and names."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import __version__
from ..bench.scripted import ScriptedAccept
from ..config import DRAFT_GROUP, EngineConfig
from ..config import settings as engine_settings
from ..errors import RequestError
from ..sampling import SamplingParams
from ..sampling import settings as sampling_settings
from ..setting import Setting
from . import models, options, ui
from .benchrows import STYLES
from .models import MODEL_TARGET, Decorated, hf_option, only_target, require_target
from .options import Command, Option, recommended, setting_option
from .report import config_report, sampling_report

if TYPE_CHECKING:
    from ..arch import ModelFile
    from ..bench.measure import BenchRow, BenchSpec
    from ..engine import Engine
    from ..placement.trace import Trace

MAX_TOKENS = 1 << 20
# Of the engine's settings, bench has no use for these.
_USELESS = ("cache_ram", "context_shift", "n_keep")
# Settings that bench chooses if they are not given, with the words for --help.
_CHOSEN = {"n_ctx": " Default: as large as the tests need."}
# Not lists: the value of a path may have a comma.
_SINGLE_KINDS = ("flag", "path")
# More tokens than any vocabulary has, because settings are checked before a model is opened.
_MAX_VOCAB = 1 << 31
_RANGE = re.compile(r"(-?\d+)(?:-(-?\d+)(?:\+(\d+)|\*(\d+))?)?")


def lengths(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> tuple[int, ...]:
    """Parse comma lists such as 512,1024 and llama-bench's ranges such as 0-1024+256."""
    found = options.read_list(texts, number_range, "lengths as 512,1024 or as a range 0-4096+1024")
    if any(not 0 <= n <= MAX_TOKENS for n in found):
        raise click.BadParameter(f"{','.join(texts)!r}; give lengths of 0 to {MAX_TOKENS}")
    return tuple(found)


def pairs(
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
        if not (0 < n_prompt <= MAX_TOKENS and 0 < n_gen <= MAX_TOKENS):
            raise click.BadParameter(f"{text!r}; both are 1 to {MAX_TOKENS}")
        found.append((n_prompt, n_gen))
    return tuple(found)


def shares(_: click.Context, __: click.Parameter, text: str | None) -> tuple[float, ...]:
    """Parse '0.85,0.72,0.6', shares by position; their owner checks the values."""
    if not text:
        return ()
    found = options.read_list((text,), lambda part: [float(part)], "shares as 0.85,0.72,0.6")
    ScriptedAccept(found)
    return tuple(found)


def number_range(text: str) -> list[int]:
    """Return the numbers of 'a', 'a-b', 'a-b+step' or 'a-b*factor'."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(text)
    low, high, factor = int(match[1]), int(match[2] or match[1]), int(match[4] or 1)
    step = int(match[3] or (0 if match[4] else 1))
    if low > high or (step <= 0 and factor <= 1) or (factor > 1 and low <= 0):
        raise ValueError(text)
    found: list[int] = []
    while low <= high and len(found) <= options.MAX_VALUES:
        found.append(low)
        low = low * factor + step
    return found


# What an entry of a list stands for, by the kind of the setting; otherwise itself.
_READERS: dict[str, Callable[[str], list[Any]]] = {
    "int": number_range,
    "float": lambda text: [float(text)],
    # commas separate entries; several devices of one entry are joined by a plus sign
    **dict.fromkeys(("device", "size", "split"), lambda text: [text.replace("+", ",")]),
}


def list_option(*flags: str, **described: Any) -> Callable[[Decorated], Decorated]:
    """Return a repeatable option that takes comma lists; bench measures every entry."""
    return click.option(*flags, multiple=True, **described)


def _values_of(setting: Setting) -> Callable[..., tuple[Any, ...]]:
    """Return the callback that parses the list of a setting; its owner checks the values."""
    read: Callable[[str], list[Any]] = _READERS.get(setting.kind, lambda text: [text])
    how = f"numbers as {'1,2 or 1-8' if setting.kind == 'int' else '0,0.8'}"

    def parse(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> tuple[Any, ...]:
        found = options.read_list(texts, read, how)
        wrong = [value for value in found if setting.choices and value not in setting.choices]
        if wrong:
            raise click.BadParameter(f"{wrong[0]!r} is not one of {', '.join(setting.choices)}")
        return tuple(found)

    return parse


def _listed(setting: Setting) -> Callable[[Decorated], Decorated]:
    """Return the option of a setting, as a list where its kind allows."""
    if setting.kind in _SINGLE_KINDS:
        return setting_option(setting)
    known = setting.default not in (None, "") and setting.name not in _CHOSEN
    metavar = {"size": "LIST (SIZE|auto)"}.get(setting.kind, "LIST")
    about = setting.help
    if setting.choices:
        about += f" Values: {', '.join(setting.choices)}."
    about += _CHOSEN.get(setting.name, "")
    return list_option(
        *setting.flags, setting.name, callback=_values_of(setting), metavar=metavar, help=about,
        default=(str(setting.default),) if known else None, show_default=known, cls=Option,
        group=setting.group,
    )  # fmt: skip


# Settings of the engine that bench takes. An engine is loaded for each combination of their lists.
_SETTINGS = [s for s in engine_settings() if s.flags and s.name not in _USELESS]
_SWEPT = [s.name for s in _SETTINGS if s.kind not in _SINGLE_KINDS]


def combinations(names: list[str], given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all combinations of the values of options, those of the last name fastest."""
    lists = (given[name] or (None,) for name in names)
    return [dict(zip(names, values)) for values in itertools.product(*lists)]


@click.command(cls=Command)
@click.argument("target", required=False, type=MODEL_TARGET, metavar="TARGET")
@list_option(
    "-m", "--model", "model_names", type=MODEL_TARGET, metavar="TARGET",
    help="A model, instead of the argument TARGET; repeatable.",
)  # fmt: skip
@hf_option
@list_option(
    "-p", "--n-prompt", callback=lengths, default=("512",), metavar="LIST",
    help="Prompt lengths (pp), such as 512,1024; 0: no prompt test.",
)  # fmt: skip
@list_option(
    "-n", "--n-gen", callback=lengths, default=("128",), metavar="LIST",
    help="Generation lengths (tg); 0: no generation test.",
)  # fmt: skip
@list_option(
    "-pg", "pairs", callback=pairs, metavar="PP,TG",
    help="A prompt and a generation timed together; repeatable.",
)  # fmt: skip
@list_option(
    "-d", "--n-depth", callback=lengths, default=("0",), metavar="LIST",
    help="Context positions that are filled before each test, not timed.",
)  # fmt: skip
@list_option(
    "--run", "n_run", callback=lengths, metavar="LIST",
    help="Generations through the sampler and with text, as moegraph run has them. Lists of "
    "sampling settings apply to these.",
)  # fmt: skip
@click.option(
    "--draft-accept", "draft_accept", callback=shares, metavar="RATES",
    help="Accept drafts by a script instead of comparing them, at the real cost: how often the "
    "drafted token at position 1, 2, ... is accepted, such as 0.85,0.72,0.6. Needs --spec.",
)  # fmt: skip
@click.option(
    "--ttft", is_flag=True,
    help="Measure instead the time to the first token, with the prompts of -p: each in a process "
    "of its own, from its start on.",
)  # fmt: skip
@click.option(
    "-r", "--repetitions", type=click.IntRange(1, 1000), default=5, metavar="N",
    help="Timed runs of each test.",
)  # fmt: skip
@click.option(
    "--no-warmup", is_flag=True, help="Do not run each test once, untimed, before the timed runs.",
)  # fmt: skip
@click.option(
    "-o", "--output", "style", type=click.Choice(tuple(STYLES)), default="md",
    help="Format of the rows.",
)  # fmt: skip
@click.option(
    "--routing", "trace_path", type=click.Path(path_type=Path), metavar="TRACE",
    help="Replay a routing trace in tg tests, instead of the router's own choice.",
)  # fmt: skip
@options.with_options([_listed(setting) for setting in (*_SETTINGS, *sampling_settings())])
def bench(
    target: str | None, model_names: tuple[str, ...], hf_repo: str | None,
    n_prompt: tuple[int, ...], n_gen: tuple[int, ...], pairs: tuple[tuple[int, int], ...],
    n_depth: tuple[int, ...],
    n_run: tuple[int, ...], draft_accept: tuple[float, ...], ttft: bool, repetitions: int,
    no_warmup: bool, style: str, trace_path: Path | None, **given: Any,
) -> None:  # fmt: skip
    """Measure the model TARGET: prompt processing (pp) and generation (tg), in tokens per second.

    Rows, names and JSON fields are llama-bench's. Options marked LIST take several values, as in
    llama-bench: 1,2 or 1-4, 0-64+16, 1-64*2, or the option repeated. Bench measures all
    combinations and loads the model for each combination of settings. Tokens are random; only run
    tests sample, and only they draft (--spec). Without -c, the context is as large as the tests
    need.

    \b
    Examples:
      moegraph bench tiny
      moegraph bench model.gguf -p 512,2048 -n 64 -d 0,4096 -r 3
      moegraph bench model.gguf -t 4,8 -ctk f16,q8_0 -pg 512,128 -o jsonl
      moegraph bench model.gguf --vram 6,8,12 -p 0 --routing my.trace
      moegraph bench model.gguf -p 0 --run 128 --temp 0,0.8 --top-k 0,40
      moegraph bench model.gguf -p 0 -n 0 --run 256 --spec off,mtp --draft-accept 0.8,0.6,0.5
      moegraph bench model.gguf --ttft -p 32,2048 --vram 8 -r 2
    """
    from ..bench.measure import BenchSpec

    single = only_target(target, hf_repo, *model_names[:1])
    names = model_names or (require_target(single),)
    spec = BenchSpec(n_prompt, n_gen, n_depth, repetitions, pairs=pairs, warm_up=not no_warmup,
                     n_run=n_run)  # fmt: skip
    spec = replace(spec, samplings=_samplings(given, n_run))
    if ttft:
        spec = _spec_of_ttft(spec, trace_path)
    if not spec.tests:
        raise RequestError(
            "nothing to measure: all lengths are 0; raise one of -p, -n, -pg and --run"
        )
    if not options.is_given("n_ctx"):
        needed = max(test.n_positions for test in spec.tests)
        given["n_ctx"] = (-(-needed // 256) * 256,)
    trace = _read_routing(trace_path) if trace_path else None
    configs = [options.build_config({**given, **values}) for values in combinations(_SWEPT, given)]
    _check_profile(configs[0].profile)
    _check_drafts(configs, n_run, draft_accept)
    spec = replace(spec, draft_accept=draft_accept)
    varied = _varied(names, configs)
    warned = set[str]()
    records = (
        record
        for name in names
        for config in configs
        for record in (
            _ttft(name, config, spec) if ttft
            else _measure(name, config, spec, trace, warned)
        )
    )  # fmt: skip
    tests = [f"ttft{n}" for n in n_prompt] if ttft else [test.name for test in spec.tests]
    STYLES[style](records, tests, varied)


def _spec_of_ttft(spec: BenchSpec, trace_path: Path | None) -> BenchSpec:
    """Return the spec with the prompts alone; refuse what cannot be measured in other processes."""
    wrong = {
        "-pg": spec.pairs, "-d": any(spec.depth), "--run": spec.n_run, "--routing": trace_path,
        "-n": options.is_given("n_gen"), "-p 0": 0 in spec.n_prompt,
    }  # fmt: skip
    for flag, value in wrong.items():
        if value:
            raise RequestError(f"--ttft does not go with {flag}; it times the prompts of -p alone")
    return replace(spec, n_gen=())


def _samplings(
    given: dict[str, Any], n_run: tuple[int, ...]
) -> tuple[tuple[str, SamplingParams], ...]:
    """Return the sampling settings of run tests, each with words for the names of its tests.

    Takes their options out of `given`.
    """
    names = [setting.name for setting in sampling_settings()]
    values = {name: given.pop(name) for name in names}
    found = [SamplingParams(**one) for one in combinations(names, values)]
    if any(map(options.is_given, names)) and not n_run:
        raise RequestError("sampling settings apply to --run LIST alone; give lengths there")
    differ = [name for name in names if len({getattr(params, name) for params in found}) > 1]
    labelled = []
    for params in found:
        params.validate(_MAX_VOCAB)
        words = " ".join(f"{name} {getattr(params, name)}" for name in differ)
        labelled.append((words, replace(params, seed=1) if params.seed is None else params))
    return tuple(labelled)


def _check_profile(profile: str) -> None:
    if profile not in ("", "none") and not Path(profile).is_file():
        raise RequestError(f"{profile}: the profile does not exist, and bench does not create one")


def _check_drafts(
    configs: Sequence[EngineConfig], n_run: tuple[int, ...], draft_accept: tuple[float, ...]
) -> None:
    """Refuse drafts that no test would show."""
    is_drafting = any(config.spec != "off" for config in configs)
    if is_drafting and not n_run:
        raise RequestError("drafts are in run tests alone; give lengths with --run LIST")
    of_drafts = [s for s in engine_settings() if s.group == DRAFT_GROUP and s.name != "spec"]
    given = [s.flags[-1] for s in of_drafts if options.is_given(s.name)]
    given += ["--draft-accept"] if draft_accept else []
    if given and not is_drafting:
        raise RequestError(f"{given[0]} needs something that drafts; name it with --spec")


def _varied(names: Sequence[str], configs: Sequence[EngineConfig]) -> frozenset[str]:
    """Return the columns whose values differ between the configurations or models."""
    found = {name for name in _SWEPT if len({getattr(c, name) for c in configs}) > 1}
    return frozenset(found | ({"size", "params"} if len(names) > 1 else set()))


def _measure(
    name: str, config: EngineConfig, spec: BenchSpec, trace: Trace | None, warned: set[str]
) -> Iterator[dict[str, Any]]:
    """Load a model and yield its records."""
    from ..bench.measure import run_bench

    with models.load_engine(name, config, trace, warned) as engine:
        if spec.n_run:
            file, n_vocab = engine.file, engine.hparams.n_vocab
            ours = tuple(
                (words, recommended(params, file.kv, n_vocab, warned)[0])
                for words, params in spec.samplings
            )
            spec = replace(spec, samplings=ours, text=models.has_vocabulary(file))
        facts = _facts(engine)
        for row in run_bench(engine, spec):
            threads = engine.threads.report()  # those in use when the test ended
            threads["n_threads"] = threads[
                "n_threads_batch" if row.test.n_gen == 0 else "n_threads"
            ]
            yield {**facts, **threads, **_record(row)}
        models.show_messages(engine)


def _ttft(name: str, config: EngineConfig, spec: BenchSpec) -> Iterator[dict[str, Any]]:
    """Yield the records of a model's times to the first token."""
    from ..bench.measure import BenchRow, BenchTest
    from ..bench.ttft import PHASES, run_ttft

    with models.open_header(name) as header:
        facts, n_vocab = _model_facts(header), header.hparams.n_vocab
    for n_prompt, reports in run_ttft(header.path, n_vocab, config, spec):
        settings, times = reports[-1]["config"], [report["timings"] for report in reports]
        seconds = [one["first_token_s"] for one in times]
        phases = {part: statistics.fmean(one[f"{part}_s"] for one in times) for part in PHASES}
        phases["other"] = statistics.fmean(seconds) - sum(phases.values())
        loads = [one["load"] for one in times]
        yield {
            **facts, **_device_facts(settings["device"], settings["device"]), **settings,
            **_record(BenchRow(BenchTest(n_prompt, 0, 0), tuple(seconds))),
            "n_gen": 1, "test": f"ttft{n_prompt}",
            **{f"{part}_ms": round(1e3 * s, 3) for part, s in phases.items()},
            "load_phases_ms": {
                part: round(1e3 * statistics.fmean(load[part] for load in loads), 3)
                for part in loads[0]
            },
        }  # fmt: skip


def _read_routing(path: Path) -> Trace:
    """Read a trace and print its statistics: a speed means little without its routing."""
    from ..placement.trace import read_trace, trace_stats

    trace = read_trace(path)
    ui.note(trace_stats(trace).line())
    return trace


def _facts(engine: Engine) -> dict[str, Any]:
    """Return the columns that are equal in all rows of an engine, under llama-bench's names."""
    return {
        **_model_facts(engine.file),
        **_device_facts(engine.device_name, engine.device.description),
        **config_report(engine),
    }


def _device_facts(name: str, description: str) -> dict[str, Any]:
    kinds = {"cpu": "CPU", "rpc": "RPC"}
    backends = dict.fromkeys(kinds.get(one.strip()[:3], "CUDA") for one in name.split(","))
    return {"backends": ",".join(backends), "device_info": description}


def _model_facts(file: ModelFile) -> dict[str, Any]:
    from ..arch.summary import summarize
    from ..ggml.lib import versions

    summary, kv = summarize(file.hparams, file.tensors), file.kv
    label = kv.get("general.size_label")
    words = [kv["general.architecture"], *([label] if label else []), summary.by_type[0].type]
    built = versions()
    return {
        "moegraph": __version__,
        "llama_commit": built["llama_commit"],
        "patchset": built["patchset"],
        "model_filename": str(file.path),
        "model_type": " ".join(words),
        "model_size": summary.n_bytes,
        "model_n_params": summary.n_params,
    }


def _record(row: BenchRow) -> dict[str, Any]:
    """Return llama-bench's fields of a row, and ours."""
    test, seconds = row.test, row.seconds
    samples_ns = [round(s * 1e9) for s in seconds]
    samples_ts = [(test.n_prompt + test.n_gen) / s for s in seconds]
    is_one = len(seconds) == 1
    return {
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": test.depth,
        "test_time": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "avg_ns": round(statistics.fmean(samples_ns)),
        "stddev_ns": 0 if is_one else round(statistics.stdev(samples_ns)),
        "avg_ts": round(statistics.fmean(samples_ts), 6),
        "stddev_ts": 0.0 if is_one else round(statistics.stdev(samples_ts), 6),
        "samples_ns": samples_ns,
        "samples_ts": [round(ts, 6) for ts in samples_ts],
        "test": test.name,
        "experts": row.experts.report() if row.experts else None,
        "sampling": sampling_report(test.sampling) if test.sampling else None,
        "drafts": row.drafts.report() if row.drafts else None,
    }
