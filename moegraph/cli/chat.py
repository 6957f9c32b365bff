"""`moegraph chat`: a conversation, typed or piped."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config import EngineConfig
from ..errors import Cancelled, RequestError
from ..gguf.resolve import is_shipped
from ..sampling import SamplingParams
from ..text.chat.messages import History
from ..text.chat.template import ChatTemplate, require_template
from . import models, options, typed, ui
from .conversation import Answer, Conversation
from .models import MODEL_TARGET, model_options, only_target, require_target
from .options import Command, recommended
from .report import show_drafters, stats_line, summary_lines
from .typed import COMMANDS, QUIT, WITH_FILES, LineHistory, find_command, history_path, run_command

if TYPE_CHECKING:
    from ..arch import ModelFile
    from ..engine import Engine
    from ..engine.chat import ChatModel

# The line that separates the answers to two piped questions.
_SEPARATOR = "---"
# Limit of an answer, in tokens, for a model that was not trained to end its answers.
_SHIPPED_LIMIT = 256
# Places where the next prompt may part from this one: see docs/conversations.md.
_N_MARKS = 3


@dataclass(frozen=True)
class _Job:
    """A checked command line: the model, the question if one was given, and the settings."""

    target: str
    config: EngineConfig
    sampling: SamplingParams
    chosen: frozenset[str]
    max_tokens: int | None
    stop: tuple[str, ...]
    system: str | None
    question: str | None
    given: dict[str, Any]

    @property
    def as_json(self) -> bool:
        """Whether answers are JSON objects."""
        return bool(self.given["as_json"])

    @property
    def quiet(self) -> bool:
        """Whether statistics and notes are left out."""
        return bool(self.given["quiet"])


@click.command(cls=Command)
@click.argument("args", nargs=-1, type=MODEL_TARGET, metavar="TARGET [QUESTION]")
@model_options
@click.option(
    "-p", "--prompt", metavar="TEXT",
    help="Ask this question, print the answer, and quit. Piped text goes before it.",
)  # fmt: skip
@click.option(
    "-f", "--file", type=click.Path(), metavar="FILE",
    help="Ask about the text of FILE (-: stdin). The question of -p follows the text.",
)  # fmt: skip
@click.option(
    "-sys", "--system", "--system-prompt", "system", metavar="TEXT", help="System prompt."
)
@click.option(
    "-sysf", "--system-prompt-file", "system_file", type=click.Path(), metavar="FILE",
    help="Read the system prompt from FILE.",
)  # fmt: skip
@click.option(
    "--chat-template-file", type=click.Path(path_type=Path), metavar="FILE",
    help="Use this Jinja template instead of the model's own.",
)  # fmt: skip
@click.option(
    "-rea", "--reasoning", type=click.Choice(["on", "off", "auto"]), default="auto",
    help="Tell the chat template to ask for reasoning, or not to. auto: its own default.",
)  # fmt: skip
@click.option("--each", is_flag=True, help="Start a new conversation for each piped line.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each answer.")
@click.option("-q", "--quiet", is_flag=True, help="Do not print statistics and notes.")
@options.length_options
@options.engine_options()
@options.sampling_options
def chat(args: tuple[str, ...], **given: Any) -> int:
    """Talk with the model TARGET: a GGUF file, or a shipped model's name.

    The model's own chat template turns messages into prompts. Answers go to stdout, everything
    else, reasoning included, to stderr. Ctrl-C stops an answer, Ctrl-D ends the conversation, and
    /help lists the commands. When the context is full, chat forgets the oldest turns. Sampling
    settings that you do not give are those that the model file recommends (general.sampling.*),
    or else the defaults. The Up key recalls what you typed in earlier conversations; it is
    in the file that MOEGRAPH_HISTORY names (empty: none), by default
    ~/.local/state/moegraph/chat_history.

    If stdin is not a terminal, each line of it is one message, also if it begins with /. Chat
    prints a line of three dashes between two answers. The answer to an empty line is empty. If a
    message does not fit, chat reports it, goes on, and exits with status 2.

    \b
    Examples:
      moegraph chat Qwen3.6-35B-A3B-Q4_K_M.gguf
      moegraph chat model.gguf --system "Answer in one sentence." --reasoning off
      moegraph chat model.gguf "What is a mixture of experts?"
      git diff | moegraph chat model.gguf -p "Review this change."
      moegraph chat model.gguf --each --json < questions.txt > answers.jsonl
    """
    job = _check(args, given)
    with ExitStack() as stack:
        file = given["chat_template_file"]
        template = stack.enter_context(ChatTemplate.from_file(file)) if file else None
        header = stack.enter_context(models.open_header(job.target, job.config.device))
        models.require_vocabulary(header)
        job.sampling.validate(header.hparams.n_vocab)
        if template is None:
            require_template(header.kv, header.path)
        job, from_file = _fit_to_model(job, header)
        engine = stack.enter_context(
            models.load_engine(header, job.config, text=True, quiet=job.quiet)
        )
        conversation = _conversation(
            job, engine, stack.enter_context(_model_of(engine, template)), from_file
        )
        if not (job.quiet or job.as_json):
            show_drafters(engine)
        stack.enter_context(models.saving_profile(engine))
        if job.question is not None:
            _ask_once(conversation, job.question)
        elif ui.stdin_is_terminal():
            _converse(conversation)
        else:
            return _answer_lines(conversation, given["each"])
    return 0


def _check(args: tuple[str, ...], given: dict[str, Any]) -> _Job:
    """Check all that can be checked before the model file is opened."""
    rest = list(args)
    model = only_target(given["model"], given["hf_repo"])
    if model and rest:
        raise click.UsageError(f"give one model, not {model} and {rest[0]}")
    model = model or require_target(rest.pop(0) if rest else None)
    if rest and given["prompt"] is not None:
        raise click.UsageError("a question follows the model, and -p gives another")
    if rest:
        given["prompt"] = " ".join(rest)
    question = _question(given)
    if given["each"] and (question is not None or ui.stdin_is_terminal()):
        raise click.UsageError("--each is for questions that are piped in, one a line")
    return _Job(
        target=model,
        config=options.build_config(given),
        sampling=options.build_sampling(given).seeded(),
        chosen=options.chosen_sampling(),
        max_tokens=options.max_tokens(given["n_predict"]),
        stop=tuple(options.argument_text(text, given["escape"]) for text in given["stop"]),
        system=_system(given),
        question=question,
        given=given,
    )


def _system(given: dict[str, Any]) -> str | None:
    """Return the system prompt of the command line; None if there is none."""
    text, file = given["system"], given["system_file"]
    if text is not None and file is not None:
        raise click.UsageError("both -sys and -sysf give a system prompt; use one of them")
    if file is not None:
        return options.read_text(file)
    return None if text is None else options.argument_text(text, given["escape"])


def _question(given: dict[str, Any]) -> str | None:
    """Return the question of the command line, with the text that it is about; None if none."""
    asked, file, escape = given["prompt"], given["file"], given["escape"]
    if asked is None and file is None:
        return None
    asked = "" if asked is None else options.argument_text(asked, escape)
    text = ""
    if file is not None or ui.stdin_has_text():
        text = options.read_text(file or "-")
        text = options.unescape(text) if escape else text
    return options.joined_question(text, asked)


def _fit_to_model(job: _Job, header: ModelFile) -> tuple[_Job, dict[str, float]]:
    """Return the job with the settings that the model file recommends, and those settings."""
    sampling, from_file = recommended(job.sampling, header.kv, job.chosen, header.hparams.n_vocab)
    limit = job.max_tokens
    if is_shipped(header.path):
        cut = ""
        if limit is None:
            limit = _SHIPPED_LIMIT
            cut = f"; its answers are cut at {limit} tokens (-n N for another limit)"
        if not job.quiet:
            name = header.path.stem
            ui.note(f"note: {name} is no chat model: it was trained to write Python code{cut}")
    elif _is_base(header.kv) and not job.quiet:
        ui.note(
            f"note: {header.path.name} is a base model, by its name: it continues text and was not "
            "trained to end its answers (-n N limits them); see moegraph run"
        )
    return replace(job, sampling=sampling, max_tokens=limit), from_file


def _is_base(kv: Mapping[str, object]) -> bool:
    """Return whether a model file is named a base model."""
    names = (kv.get(f"general.{key}") for key in ("finetune", "name", "basename"))
    return any(re.search(r"\bbase\b", name, re.I) for name in names if isinstance(name, str))


def _conversation(
    job: _Job, engine: Engine, model: ChatModel, from_file: dict[str, float]
) -> Conversation:
    sampling = job.sampling
    if job.given["ignore_eos"]:
        sampling = models.ignoring_end(engine, sampling)
    thinks = {"on": True, "off": False}.get(job.given["reasoning"])
    return Conversation(
        engine, model, History(job.system), sampling, job.max_tokens, job.stop,
        {} if thinks is None else {"enable_thinking": thinks}, from_file, job.as_json, job.quiet,
    )  # fmt: skip


def _model_of(engine: Engine, template: ChatTemplate | None) -> ChatModel:
    from ..engine.chat import ChatModel

    return ChatModel.of(engine, template)


def _ask_once(conversation: Conversation, question: str) -> None:
    answer = conversation.answer(question)
    _remark(conversation, answer)
    if not conversation.as_json:
        conversation.note(
            stats_line(answer.event, conversation.engine.memory(), conversation.sampling)
        )
        for line in summary_lines(answer.drafts, answer.event):
            conversation.note(line)
    _require_whole(answer)


def _remark(conversation: Conversation, answer: Answer) -> None:
    for line in conversation.remarks(answer):
        conversation.note(f"note: {line}")


def _require_whole(answer: Answer) -> None:
    if answer.event.finish_reason == "cancelled":
        raise Cancelled


def _answer_lines(conversation: Conversation, each: bool) -> int:
    """Answer each line of stdin; return the exit code, which is 2 if one had no answer."""
    code, number = 0, 0
    while line := sys.stdin.readline():
        number += 1
        question = line.removesuffix("\n").removesuffix("\r")
        if number > 1 and not conversation.as_json:
            click.echo(_SEPARATOR)
        if each:
            conversation.history.clear()
        if not question.strip():
            _say_nothing(conversation, question)
            continue
        try:
            answer = conversation.answer(question)
        except RequestError as error:
            code = error.exit_code
            _say_nothing(conversation, question, str(error))
            ui.error(f"message {number}: {error}")
            continue
        _remark(conversation, answer)
        _require_whole(answer)
    return code


def _say_nothing(conversation: Conversation, question: str, error: str | None = None) -> None:
    """Print an empty answer, so that answers and questions stay in step."""
    if conversation.as_json:
        report = {"question": question, "answer": "", "error": error}
        click.echo(json.dumps(report, ensure_ascii=False))
    else:
        click.echo()


def _converse(conversation: Conversation) -> None:
    """Answer typed messages until the user ends the conversation."""
    history = LineHistory(history_path())
    typed.start_editing((*COMMANDS, *QUIT), WITH_FILES, history)
    engine = conversation.engine
    conversation.note(
        f"{engine.file.path.name} on {engine.device_name}, context {engine.n_ctx} tokens; "
        "/help for help"
    )
    engine.copies.memory.pin_ahead(_N_MARKS)  # while the user thinks
    while True:
        message = typed.next_message(history)
        if message is None or message.strip() in QUIT:
            break
        try:
            _take_turn(conversation, message)
        except RequestError as error:
            ui.error(str(error))
        except KeyboardInterrupt:
            ui.note("stopped")


def _take_turn(conversation: Conversation, message: str) -> None:
    found = find_command(message)
    if found is not None:
        question = run_command(conversation, found[0], message.split()[0], found[1])
        if question is None:
            return
        message = question
    elif message.startswith(" /"):
        message = message[1:]
    if not message.strip():
        return
    answer = conversation.answer(message)
    _remark(conversation, answer)
    if answer.event.finish_reason == "cancelled" and not answer.event.n_generated:
        read = f"{answer.event.n_computed} of {answer.event.n_prompt} tokens"
        ui.note(f"stopped after reading {read}; the message is forgotten")
        return
    stopped = "stopped; " if answer.event.finish_reason == "cancelled" else ""
    conversation.note(stopped + conversation.summary(answer))
