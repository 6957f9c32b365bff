"""`moegraph trace`: record which experts the router chooses while a prompt is continued."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import Cancelled, ConfigError, InternalError, RequestError
from ..interrupt import cancel_on_interrupt
from ..link import REMOTE
from . import models, options, ui
from .models import target_argument
from .options import Command, recommended
from .prediction import trace_fields

if TYPE_CHECKING:
    from ..engine import Engine
    from ..placement.identity import RouterShape
    from ..placement.trace import Trace
    from ..sampling import SamplingParams


@click.command("trace", cls=Command)
@target_argument
@click.option(
    "-o", "--output", "output", type=click.Path(path_type=Path), metavar="FILE",
    help="Write the trace to FILE.",
)  # fmt: skip
@click.option("-p", "--prompt", metavar="TEXT", help="Prompt to continue.")
@click.option("-f", "--file", metavar="FILE", help="Read the prompt from FILE (-: stdin).")
@click.option(
    "-n", "--predict", "--n-predict", "n_predict", type=click.IntRange(0), default=256, metavar="N",
    help="Maximum number of tokens to generate; end tokens do not stop the run.",
)  # fmt: skip
@click.option(
    "--profile", "profile_path", type=click.Path(path_type=Path), metavar="FILE",
    help="Create this routing profile, or add the choices to it.",
)  # fmt: skip
@click.option(
    "--profile-class", default="default", metavar="NAME",
    help="Class of prompts in the profile to add to.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@options.engine_options(
    "profile", "profile_class", "cache_ram", "context_shift", "n_keep", "mmproj_device",
    drafts=False,
)  # fmt: skip
@options.sampling_options
def trace_command(
    target: str, output: Path | None, prompt: str | None, file: str | None, n_predict: int,
    profile_path: Path | None, profile_class: str, as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """Continue a prompt with the model TARGET and record the routing of every token.

    The recording goes on after an end token. `moegraph simulate` replays a trace with other cache
    sizes and policies. Sampling settings that you do not give are those that the model file
    recommends (general.sampling.*), or else the defaults.

    \b
    Examples:
      moegraph trace model.gguf -f prompt.txt -n 512 -o routing.trace
      moegraph trace model.gguf -f code.txt --profile model.gguf.routing.json --profile-class code
    """
    from ..placement.identity import router_shape
    from ..placement.profile import require_class_name
    from ..placement.profilefile import ProfileFile
    from ..placement.trace import trace_stats, write_trace

    if output is None and profile_path is None:
        raise RequestError("nothing to write; give -o or --profile")
    require_class_name(profile_class)
    text = _read_prompt(prompt, file)
    sampling = options.build_sampling(given).seeded()
    # Only in mode 'layered' does the host see the routing.
    config = replace(options.build_config(given), mode="layered")
    _require_local(config.devices)
    with ExitStack() as stack:
        if output is not None:
            _require_writable(output)
        model = stack.enter_context(models.open_header(target))
        sampling, _ = recommended(sampling, model.kv, model.hparams.n_vocab)
        models.check_text(model, text, config)
        shape = router_shape(model)
        profile = None
        if profile_path is not None:
            profile = ProfileFile(profile_path, profile_class, True, shape)
        engine = stack.enter_context(models.load_engine(model, config))
        trace, cancelled = _record(engine, shape, text, sampling, n_predict)
        if output is not None:
            write_trace(output, trace)
        if profile is not None:
            kept = profile.update(trace.counts())
            if kept.why:
                raise ConfigError(f"the routing profile was not updated: {kept.why}")
        if as_json:
            click.echo(json.dumps(trace_fields(trace)))
        ui.note(trace_stats(trace).line())
        if cancelled:
            raise Cancelled


def _read_prompt(prompt: str | None, file: str | None) -> str:
    if (prompt is None) == (file is None):
        raise RequestError("give the prompt with -p or with -f, one of them")
    text = prompt if prompt is not None else options.read_text(file or "-")
    if not text:
        raise RequestError("the prompt is empty; give it at least one character")
    return text


def _require_local(devices: Iterable[str]) -> None:
    """Refuse devices of other machines, from which the choices of experts do not come back."""
    for device in devices:
        if device.startswith(REMOTE):
            raise ConfigError(
                f"the choices of experts on {device} are not read, because nothing but rows comes "
                "back from another machine; trace with devices of this one"
            )


def _record(
    engine: Engine, shape: RouterShape, text: str, sampling: SamplingParams, n_predict: int
) -> tuple[Trace, bool]:
    """Return the trace of a run, and whether it was interrupted."""
    from ..placement.footprint import slot_bytes
    from ..placement.trace import TraceRecorder
    from ..runner import LayeredRunner

    ids = engine.tokenizer.encode(text)
    sampling = models.ignoring_end(engine, sampling)
    recorder = TraceRecorder(shape, slot_bytes(engine.file))
    for part in engine.runner.parts:
        if not isinstance(part, LayeredRunner):
            raise InternalError("a trace needs mode 'layered'")
        part.observers.append(recorder)
    with cancel_on_interrupt() as cancel, ui.Bars() as bars:
        for event in engine.generate(
            ids, sampling, max_tokens=n_predict, cancel=cancel, progress=bars
        ):
            bars("trace", event.n_generated, max(n_predict, 1))
    name = engine.file.kv.get("general.name") or engine.file.path.name
    return recorder.trace(len(ids), f"{name}, {len(ids)} tokens of prompt"), cancel.is_set()


def _require_writable(path: Path) -> None:
    """Refuse a path that cannot be written before the run, not after it."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: cannot write: there is no folder {path.parent}")
    if path.is_dir():
        raise ConfigError(f"{path}: cannot write: it is a folder")
