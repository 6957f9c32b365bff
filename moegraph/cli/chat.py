"""`moegraph chat`: a conversation, typed or piped."""

from __future__ import annotations

import json
import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import Cancelled, RequestError
from ..gguf.resolve import is_shipped
from ..text.chat.messages import History
from ..text.chat.template import require_template
from . import models, options, typed, ui
from .conversation import Answer, Conversation
from .models import MODEL_TARGET, model_options, option_target, require_target
from .options import Command, recommended
from .report import result_lines, show_drafters
from .typed import QUIT, LineHistory, history_path

if TYPE_CHECKING:
    from ..arch import ModelFile

# The line that separates the answers to two piped questions.
_SEPARATOR = "---"
# Limit of an answer, in tokens, for a model that was not trained to end its answers.
_SHIPPED_LIMIT = 256


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
@click.option(*models.MMPROJ, **models.MMPROJ_SAYS)
@click.option(*models.NO_MMPROJ, **models.NO_MMPROJ_SAYS)
@click.option(
    "--image", multiple=True, type=click.Path(path_type=Path), metavar="FILE",
    help="Ask about the picture in FILE; may be given more than once.",
)  # fmt: skip
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
    target, question = _check(args, given)
    with ExitStack() as stack:
        conversation = _open(target, given, stack)
        stack.enter_context(models.saving_profile(conversation.engine))
        if question is not None:
            _ask_once(conversation, "".join(map(conversation.show, given["image"])) + question)
        elif ui.stdin_is_terminal():
            _converse(conversation)
        else:
            return _answer_lines(conversation, given["each"])
    return 0


def _check(args: tuple[str, ...], given: dict[str, Any]) -> tuple[str, str | None]:
    """Return the model and the question of the command line, if it has one."""
    rest = list(args)
    model = option_target(given, *args)
    if model and rest:
        raise click.UsageError(f"give one model, not {model} and {rest[0]}")
    model = model or require_target(rest.pop(0) if rest else None)
    if rest and given["prompt"] is not None:
        raise click.UsageError("a question follows the model, and -p gives another")
    if rest:
        given["prompt"] = " ".join(rest)
    question = _question(given)
    if given["image"] and question is None:
        raise click.UsageError("--image needs a question; in a conversation, /image FILE shows it")
    if given["each"] and (question is not None or ui.stdin_is_terminal()):
        raise click.UsageError("--each is for questions that are piped in, one a line")
    return model, question


def _open(target: str, given: dict[str, Any], stack: ExitStack) -> Conversation:
    """Check the settings, then load the model; return a conversation without messages."""
    config, sampling = options.build_config(given), options.build_sampling(given).seeded()
    limit, quiet = options.max_tokens(given["n_predict"]), given["quiet"]
    stop = tuple(options.argument_text(text, given["escape"]) for text in given["stop"])
    history = History(_system(given))
    template = models.open_template(given, stack)
    header = stack.enter_context(models.open_header(target, config.device))
    models.require_vocabulary(header)
    sampling, from_file = recommended(sampling, header.kv, header.hparams.n_vocab)
    if template is None:
        require_template(header.kv, header.path)
    limit = _limit(header, limit, quiet)
    engine = stack.enter_context(models.load_engine(header, config, text=True, quiet=quiet))
    if given["ignore_eos"]:
        sampling = models.ignoring_end(engine, sampling)
    from ..engine.chat import ChatModel  # after the engine, which loads beside the tokenizer

    pictures = models.open_pictures(given, target, engine)
    model = stack.enter_context(ChatModel.of(engine, template, pictures))
    if not (quiet or given["as_json"]):
        show_drafters(engine)
    return Conversation(
        engine, model, history, sampling, limit, stop, models.template_variables(given), from_file,
        given["as_json"], quiet,
    )  # fmt: skip


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
        text = options.read_text(file or "-", escape)
    return options.joined_question(text, asked)


def _limit(header: ModelFile, limit: int | None, quiet: bool) -> int | None:
    """Return the most tokens of an answer; say so if the model was not trained to end answers."""
    line, names = "", [header.kv.get(f"general.{k}") for k in ("finetune", "name", "basename")]
    if is_shipped(header.path):
        line = f"note: {header.path.stem} is no chat model: it was trained to write Python code"
        if limit is None:
            limit = _SHIPPED_LIMIT
            line += f"; its answers are cut at {limit} tokens (-n N for another limit)"
    elif any(re.search(r"\bbase\b", name, re.I) for name in names if isinstance(name, str)):
        line = (
            f"note: {header.path.name} is a base model, by its name: it continues text and was not "
            "trained to end its answers (-n N limits them); see moegraph run"
        )
    if line and not quiet:
        ui.note(line)
    return limit


def _ask_once(conversation: Conversation, question: str) -> None:
    answer = conversation.answer(question)
    conversation.remark(answer)
    if not conversation.as_json:
        engine, sampling = conversation.engine, conversation.sampling
        for line in result_lines(engine, answer.event, answer.drafts, sampling):
            conversation.note(line)
    _require_whole(answer)


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
        conversation.remark(answer)
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
    typed.start_editing(history)
    engine = conversation.engine
    conversation.note(
        f"{engine.file.path.name} on {engine.device_name}, context {engine.n_ctx} tokens; "
        "/help for help"
    )
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
    question = typed.obey(conversation, message)
    if not question.strip():
        return
    answer = conversation.answer(question)
    conversation.remark(answer)
    if answer.event.finish_reason == "cancelled" and not answer.event.n_generated:
        read = f"{answer.event.n_computed} of {answer.event.n_prompt} tokens"
        ui.note(f"stopped after reading {read}; the message is forgotten")
        return
    stopped = "stopped; " if answer.event.finish_reason == "cancelled" else ""
    conversation.note(stopped + conversation.summary(answer))
