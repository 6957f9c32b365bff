"""`moegraph run`: continue a prompt, given as text or as token ids."""

from __future__ import annotations

import json
import os
import stat
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click
import numpy as np
import numpy.typing as npt

from ..closing import Closable
from ..config import EngineConfig
from ..errors import Cancelled, ConfigError, RequestError
from ..events import CancelToken
from ..gguf.resolve import is_shipped
from ..interrupt import cancel_on_interrupt
from ..loop.generated import room_after
from ..sampling import SamplingParams
from ..text.chat.template import TEMPLATE_KEY
from ..text.tokenizer import read_ids, require_ids_in_range
from . import models, options, ui
from .models import MODEL_TARGET, model_options, option_target, require_target
from .options import Command, Option, recommended
from .report import Generated, StartTimes, result_lines, run_report, show_drafters

if TYPE_CHECKING:
    from ..arch import ModelFile
    from ..engine import Engine
    from ..server.daemon import Frames

# How these models' templates begin a message; a prompt that has it needs no template.
_TURN = "<|"
# Most disk space of --prompt-cache, as of the server's --cache-dir.
_CACHE_BYTES = 16 << 30


@dataclass(frozen=True)
class _Job:
    """A checked command line: the model, the prompt, the settings, and where results go."""

    target: str
    config: EngineConfig
    sampling: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...]
    prompt: str | None
    ids: npt.NDArray[np.int32] | None
    ids_path: Path | None
    out_ids: OutputFile | None
    logits_out: NpyWriter | None
    stream: Frames | None
    given: dict[str, Any]
    from_file: dict[str, float] = field(default_factory=dict)


@click.command(cls=Command)
@click.argument(
    "args", nargs=-1, type=MODEL_TARGET, metavar="TARGET [[DRAFT] PROMPT_IDS N_GEN OUT_IDS]"
)
@model_options
@click.option("-p", "--prompt", metavar="TEXT", help="Prompt to continue.")
@click.option(
    "-f", "--file", type=click.Path(), metavar="FILE",
    help="Read the prompt from FILE (-: stdin).",
)  # fmt: skip
@click.option(
    "--prompt-cache", type=click.Path(path_type=Path), metavar="DIR",
    help="Keep the prompt in a folder, from which later runs and serve --cache-dir go on.",
)  # fmt: skip
@options.length_options
@options.engine_options("cache_ram", "mmproj_device")
@options.sampling_options
@options.reference_options
@click.option(
    "--stream-fd", type=click.INT, metavar="FD", cls=Option, group="Diagnostic",
    help="Write each token id to this file descriptor as it comes, as a little-endian 32-bit "
    "integer, and -1 at the end.",
)  # fmt: skip
@click.option(
    "--profile-scaling", is_flag=True, cls=Option, group="Diagnostic",
    help="Instead of a text, print the times of passes of 1 to 128 rows, medians of 5.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option(
    "--logits-out", type=click.Path(path_type=Path), metavar="F.npy", cls=Option,
    group="Diagnostic",
    help="Write the logits, as a float32 array [n_prompt + n_generated - 1, n_vocab].",
)  # fmt: skip
@click.option(
    "--display-prompt/--no-display-prompt", default=None,
    help="Print the prompt before the generated text. Default: only on a terminal.",
)  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="Do not print statistics and notes.")
def run(args: tuple[str, ...], **given: Any) -> None:
    """Continue a prompt with the model TARGET: a GGUF file, or a shipped model's name (tiny).

    The prompt comes from -p, from -f, or through a pipe. Run does not apply a chat template; to
    ask a question, use 'moegraph chat -p'. Text goes to stdout, everything else to stderr.
    Sampling settings that you do not give are those that the model file recommends
    (general.sampling.*), or else the defaults.

    With three more arguments, run takes token ids: it reads raw little-endian 32-bit ids from the
    file PROMPT_IDS, generates N_GEN tokens, and writes the ids of prompt and tokens to the file
    OUT_IDS. This form is greedy unless you give --temp. With DRAFT before them, that model drafts,
    as with --draft DRAFT.

    \b
    Examples:
      moegraph run tiny -p "def fibonacci(n):" -n 100
      moegraph run model.gguf -f prompt.txt --temp 0 --json
      git diff | moegraph run model.gguf -f - --stop "diff --git"
      moegraph run model.gguf prompt.bin 64 out.bin --device cuda
      moegraph run model.gguf draft.gguf prompt.bin 64 out.bin --budget 6
    """
    if given.pop("profile_scaling"):
        target = require_target(option_target(given, *args), *args)
        show_scaling(target, options.build_config(given), given["as_json"])
        return
    with ExitStack() as stack:
        job = _check(args, given, stack)
        quiet = given["quiet"]
        if not quiet:
            options.show_taken()
        times = StartTimes()
        model = stack.enter_context(models.open_header(job.target, job.config.device))
        job = _check_request(job, model)
        engine = stack.enter_context(models.load_engine(model, job.config, text=True, quiet=quiet))
        times.lap("load")
        if not (quiet or given["as_json"]):
            show_drafters(engine)
        _generate(engine, job, times)


def _check(args: tuple[str, ...], given: dict[str, Any], stack: ExitStack) -> _Job:
    """Check all that can be checked before the model file is opened."""
    rest = list(args)
    model = option_target(given, *args)
    if model and len(rest) == 1:
        raise click.UsageError(f"give one model, not {model} and {rest[0]}")
    model = model or require_target(rest.pop(0) if rest else None)
    if len(rest) == 4:
        if options.is_given("draft"):
            raise click.UsageError("a drafter follows the model, and --draft gives another")
        given["draft"] = rest.pop(0)
    if len(rest) not in (0, 3):
        arguments = "1 argument" if len(rest) == 1 else f"{len(rest)} arguments"
        raise click.UsageError(
            f"{arguments} after the model; give a text prompt with -p; the form with token ids "
            "takes three, PROMPT_IDS N_GEN OUT_IDS, or four, with DRAFT before them"
        )
    config = options.build_config(given)
    if given["prompt_cache"] and given["logits_out"]:
        raise RequestError("--logits-out needs all rows, and --prompt-cache leaves some out")
    sampling = options.build_sampling(given).seeded()
    max_tokens = options.max_tokens(given["n_predict"])
    prompt, ids, ids_path, out_ids = None, None, None, None
    if rest:
        max_tokens = _check_id_form(rest[1])
        ids_path = Path(rest[0])
        ids = read_ids(ids_path)
        if not options.is_given("temperature"):
            sampling = replace(sampling, temperature=0.0)
        out_ids = stack.enter_context(OutputFile(Path(rest[2])))
    else:
        prompt = _read_prompt(given)
    logits_out = stack.enter_context(NpyWriter(path)) if (path := given["logits_out"]) else None
    stream = None if given["stream_fd"] is None else _token_stream(given["stream_fd"], stack)
    stop = tuple(options.argument_text(text, given["escape"]) for text in given["stop"])
    if given["display_prompt"] is None:
        given["display_prompt"] = ui.is_terminal(sys.stdout)
    return _Job(
        target=model, config=config, sampling=sampling,
        max_tokens=max_tokens, stop=stop,
        prompt=prompt, ids=ids, ids_path=ids_path, out_ids=out_ids, logits_out=logits_out,
        stream=stream, given=given,
    )  # fmt: skip


def _token_stream(fd: int, stack: ExitStack) -> Frames:
    """Return what writes token ids to a file descriptor; -1 ends them."""
    from ..server.daemon import DONE, Frames

    frames = Frames(fd)

    def end(_: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, ConfigError):  # the descriptor may be what failed
            frames.write(0, DONE)

    stack.push(end)
    return frames


def _check_id_form(n_gen: str) -> int:
    """Return N_GEN; refuse options that belong to text prompts."""
    for param in click.get_current_context().command.params:
        if param.name in ("prompt", "file", "n_predict", "escape") and options.is_given(param.name):
            raise click.UsageError(f"{param.opts[0]} does not go with PROMPT_IDS N_GEN OUT_IDS")
    if not (n_gen.isascii() and n_gen.isdigit() and 0 < int(n_gen[:10]) < 2**31):
        raise RequestError(f"N_GEN is {n_gen!r}; allowed: 1 to {2**31 - 1}")
    return int(n_gen)


def _read_prompt(given: dict[str, Any]) -> str:
    text, file, escape = given["prompt"], given["file"], given["escape"]
    if text is not None and file is not None:
        raise RequestError("both -p and -f give a prompt; use one of them")
    if text is not None:
        text = options.argument_text(text, escape)
    elif file is None and ui.stdin_is_terminal():
        raise RequestError(
            "no prompt; give -p TEXT or -f FILE, or pipe text in; to talk, use moegraph chat"
        )
    else:
        text = options.read_text(file or "-", escape)
    if not text:
        raise RequestError("the prompt is empty; give it at least one character")
    return text


def _check_request(job: _Job, model: ModelFile) -> _Job:
    """Check prompt and sampling against the file's header, before the weights are loaded.

    Return the job with the sampling settings that the file recommends.
    """
    hp = model.hparams
    if job.ids is not None and job.ids_path is not None:
        require_ids_in_range(job.ids_path, job.ids, hp.n_vocab)
        room_after(len(job.ids), job.config.ctx_within(hp.n_ctx_train))
        if not options.is_given("temperature"):  # greedy, whatever the file says
            job.sampling.validate(hp.n_vocab)
            return job
    else:
        models.check_text(model, job.prompt or "", job.config)
    sampling, from_file = recommended(job.sampling, model.kv, hp.n_vocab)
    return replace(job, sampling=sampling, from_file=from_file)


def _generate(engine: Engine, job: _Job, times: StartTimes) -> None:
    """Run the job and write its results, after Ctrl-C those up to then."""
    if job.ids is None:
        prompt = engine.tokenizer.encode(job.prompt or "")
        models.warn_begun_twice(engine.tokenizer, prompt)
    else:
        prompt = job.ids.tolist()
        if models.has_vocabulary(engine.file):
            _ = engine.tokenizer  # it is opened here, and not with the prompt
    times.lap("tokenizer")
    if job.given["ignore_eos"]:
        job = replace(job, sampling=models.ignoring_end(engine, job.sampling))
    _note_template(engine.file, job)
    models.warn_beyond_training(engine, len(prompt))
    if job.given["prompt_cache"]:
        engine.keep_prefixes(job.given["prompt_cache"], _CACHE_BYTES)
        models.show_messages(engine)
    with cancel_on_interrupt() as cancel:
        found = _stream(engine, job, prompt, cancel, times)
    _finish(engine, job, found, times)
    if cancel.is_set():
        raise Cancelled


def _note_template(model: ModelFile, job: _Job) -> None:
    """Say that run does not use the model's chat template, if the prompt may need it."""
    talks = TEMPLATE_KEY in model.kv and not is_shipped(model.path)
    if talks and job.prompt is not None and not job.given["quiet"] and _TURN not in job.prompt:
        ui.note(
            "note: this model has a chat template, and run does not use it; to ask a question, "
            "use moegraph chat -p"
        )


def _stream(
    engine: Engine, job: _Job, prompt: list[int], cancel: CancelToken, times: StartTimes
) -> Generated:
    """Print text as it comes; return what came."""
    tokens: list[int] = []
    pieces: list[str] = []
    keeps = bool(job.given["prompt_cache"])
    shows_text = not job.given["as_json"] and job.out_ids is None
    if shows_text and job.given["display_prompt"] and job.prompt is not None:
        ui.write_text(job.prompt, "muted")

    def end_line() -> None:
        if shows_text and pieces:
            ui.end_line(pieces[-1])

    event = None
    with ui.errors_begin_lines(end_line), ui.Bars() as bars:
        bars.expect("prefill", len(prompt))
        for event in engine.generate(
            prompt, job.sampling, max_tokens=job.max_tokens, stop=job.stop, cancel=cancel,
            keep_logits=job.logits_out is not None, progress=bars,
            reuse=keeps, marks=(len(prompt) - 1,) if keeps else (),
            text=models.has_vocabulary(engine.file),
        ):  # fmt: skip
            bars.clear()
            if event.token is not None:
                times.token()
                tokens.append(event.token)
                if job.stream is not None:
                    job.stream.write(0, event.token)
            if event.text:
                pieces.append(event.text)
                if shows_text:
                    ui.write_text(event.text)
            if job.logits_out is not None and event.logits is not None:
                job.logits_out.write_rows(event.logits)
    if event is None:
        raise Cancelled
    if shows_text:
        ui.end_line(pieces[-1] if pieces else job.prompt or "", follows=not job.given["quiet"])
    return Generated(prompt, tokens, "".join(pieces), event)


def _finish(engine: Engine, job: _Job, found: Generated, times: StartTimes) -> None:
    """Write the results, and what they cost."""
    event = found.event
    n_trained = engine.hparams.n_ctx_train
    n_held = min(event.n_prompt + event.n_generated, engine.n_ctx)
    if event.n_prompt <= n_trained < n_held:
        ui.note(f"warning: {n_held} positions; the model was trained on only {n_trained}")
    if job.out_ids is not None:
        job.out_ids.write(np.array([*found.prompt, *found.tokens], dtype="<i4").tobytes())
    if not job.given["quiet"]:
        models.show_messages(engine)
    kept = models.save_profile(engine)
    if job.given["as_json"]:
        report = run_report(engine, job.sampling, found, times, job.from_file)
        spec = engine.spec_stats()
        report |= {"profile": kept, "spec": spec and spec.report()}
        click.echo(json.dumps(report, ensure_ascii=False, allow_nan=False))
    elif not job.given["quiet"]:
        for line in result_lines(engine, event, engine.spec_stats(), job.sampling):
            ui.note(line)


def show_scaling(target: str, config: EngineConfig, as_json: bool) -> None:
    """Load a model, measure, and print a table, or one JSON object."""
    from ..bench.scaling import measure_scaling, scaling_config

    with models.load_engine(target, scaling_config(config), is_chosen=False) as engine:
        found = list(measure_scaling(engine))
    if as_json:
        rows = [{"n_rows": n, "ms": round(1e3 * seconds, 4)} for n, seconds in found]
        click.echo(json.dumps({"scaling": rows}))
        return
    cells = [
        (f"{n}", f"{1e3 * s:.3f}", f"{1e3 * s / n:.3f}", f"{s / found[0][1]:.2f}x")
        for n, s in found
    ]
    ui.table(cells, ("rows", "ms", "ms a row", "of one row"))


class OutputFile(Closable):
    """A file that is opened at once but truncated only by the first write.

    If the command fails before its first write, an old file keeps its content and a new file is
    removed. A new file is also removed if a write fails, because it is not complete.
    Devices and pipes such as /dev/null also work.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written = self._failed = False
        self._created = not os.path.lexists(path)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"{path}: cannot write: {error.strerror}") from error
        self.is_regular = stat.S_ISREG(os.fstat(fd).st_mode)
        self._file: BinaryIO = os.fdopen(fd, "wb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        try:
            if not self._written and self.is_regular:
                self._file.truncate(0)
            self._written = True
            view = memoryview(data).cast("B")
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._failed = True
            raise ConfigError(f"{self.path}: cannot write: {error.strerror}") from error

    def close(self) -> None:
        """Close the file, and remove it if it is new and nothing, or not all, was written."""
        if self._file.closed:
            return
        self._file.close()
        if self._created and self.is_regular and (self._failed or not self._written):
            self.path.unlink(missing_ok=True)


class NpyWriter(OutputFile):
    """Writes rows of F32 to a .npy file as they come; `close` completes the header."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._n_columns = self._n_rows = 0
        if not self.is_regular:
            self.close()
            raise ConfigError(f"{path}: cannot write an array to a device or a pipe")

    def write_rows(self, rows: npt.NDArray[np.float32]) -> None:
        """Append rows; numpy shape [n_rows, n_columns]."""
        if self._n_columns == 0:
            self._n_columns = rows.shape[1]
            self.write(_npy_header(0, self._n_columns))
        self._n_rows += len(rows)
        self.write(np.ascontiguousarray(rows, dtype="<f4").data)

    def close(self) -> None:
        """Write the number of rows into the header and close the file."""
        if self._n_columns and not self._file.closed:
            os.pwrite(self._file.fileno(), _npy_header(self._n_rows, self._n_columns), 0)
        super().close()


def _npy_header(n_rows: int, n_columns: int) -> bytes:
    """Return a version 1.0 header; it has 128 bytes for any number of rows."""
    fields = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({n_rows}, {n_columns}), }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + f"{fields:<117}\n".encode()
