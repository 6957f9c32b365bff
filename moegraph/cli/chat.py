"""`moegraph chat`: a conversation, typed or piped."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..chat import ChatTemplate, History, ReasoningSplitter, require_template
from ..errors import Cancelled, RequestError
from ..sampling import SamplingParams
from ..sequence import GenerationEvent
from . import options, ui
from .interrupt import cancel_on_interrupt

if TYPE_CHECKING:
    from ..engine import Engine

_HELP = """\
/clear        forget the conversation, keep the system prompt
/help         show this
/quit         end (so do /exit, /bye and Ctrl-D)
\"\"\"           begin and end a message of several lines
Ctrl-C stops an answer."""
_QUIT = ("/quit", "/exit", "/bye")
_BLOCK = '"""'


@click.command(short_help="Talk with a model.")
@click.argument("target", required=False, metavar="TARGET")
@click.option("-m", "--model", metavar="TARGET", help="The model, in place of the argument.")
@click.option("-p", "--prompt", metavar="TEXT", help="Ask this, print the answer, and quit.")
@click.option(
    "-sys", "--system", "--system-prompt", "system", metavar="TEXT", help="System prompt."
)
@click.option(
    "--chat-template-file", type=click.Path(path_type=Path), metavar="FILE",
    help="Jinja template to use in place of the model's own.",
)  # fmt: skip
@click.option(
    "-rea", "--reasoning", type=click.Choice(["on", "off", "auto"]), default="auto",
    show_default=True, help="Ask the template for reasoning, or for none.",
)  # fmt: skip
@options.length_options
@options.engine_options
@options.sampling_options
def chat(target: str | None, **given: Any) -> None:
    """Talk with the model TARGET: a GGUF file, or a shipped model's name.

    The model's own chat template makes prompts of the messages. Answers go to stdout, reasoning
    and everything else to stderr. Ctrl-C stops an answer, Ctrl-D ends the conversation; /clear
    forgets it, and /help shows more. Without a terminal, each line that is piped in is one
    message.

    \b
    Examples:
      moegraph chat Qwen3.6-35B-A3B-Q4_K_M.gguf
      moegraph chat model.gguf --system "Answer in one sentence." --reasoning off
      moegraph chat model.gguf -p "What is a mixture of experts?"
      moegraph chat model.gguf < questions.txt > answers.txt
    """
    model = given["model"] or target
    if model is None or (given["model"] and target):
        raise click.UsageError("give one model: a GGUF file or a shipped model's name")
    config = options.build_config(given)
    sampling = options.build_sampling(given).seeded()
    length = options.max_tokens(given["n_predict"])
    stop = tuple(options.argument_text(text, given["escape"]) for text in given["stop"])
    system, question = (
        None if text is None else options.argument_text(text, given["escape"])
        for text in (given["system"], given["prompt"])
    )
    with ExitStack() as stack:
        file = given["chat_template_file"]
        template = stack.enter_context(ChatTemplate.from_file(file)) if file else None
        header = stack.enter_context(options.open_header(model))
        options.require_vocabulary(header)
        sampling.validate(header.hparams.n_vocab)
        if template is None:
            require_template(header.kv, header.path)
        engine = stack.enter_context(options.load_engine(header, config))
        if template is None:
            template = stack.enter_context(_template_of(engine))
        if given["ignore_eos"]:
            bans = {**sampling.logit_bias, **options.end_token_bans(engine)}
            sampling = replace(sampling, logit_bias=bans)
        thinks = {"on": True, "off": False}.get(given["reasoning"])
        talk = Conversation(
            engine, template, History(system), sampling, length, stop,
            {} if thinks is None else {"enable_thinking": thinks},
        )  # fmt: skip
        stack.enter_context(options.saving_profile(engine))
        if question is not None:
            talk.answer(question)
        else:
            _converse(talk, interactive=ui.stdin_is_terminal())


def _template_of(engine: Engine) -> ChatTemplate:
    tokenizer = engine.tokenizer
    tokens = {
        name: tokenizer.piece(token, special=True).decode(errors="replace")
        for name, token in (("bos_token", tokenizer.bos), ("eos_token", tokenizer.eos))
        if token is not None
    }
    return ChatTemplate.from_metadata(engine.file.kv, engine.file.path, tokens)


@dataclass
class Conversation:
    """A model, its template, and what was said so far."""

    engine: Engine
    template: ChatTemplate
    history: History
    sampling: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...]
    variables: dict[str, Any]

    def answer(self, message: str) -> GenerationEvent:
        """Print the answer to a message and remember both; return its last event.

        Raises:
            RequestError: the message is empty, refused, or does not fit; it is forgotten again.
            Cancelled: a second Ctrl-C, or one before the first token.
        """
        if not message.strip():
            raise RequestError("the message is empty")
        self.history.ask(message)
        try:
            prompt = self.template.render(self.history.messages, **self.variables)
            splitter = ReasoningSplitter.after(prompt)
            opened = "<think>\n" if splitter.is_thinking else ""
            text, event = self._generate(prompt, splitter)
        except BaseException:
            self.history.retract()
            raise
        self.history.answer(opened + text)
        return event

    def _generate(self, prompt: str, splitter: ReasoningSplitter) -> tuple[str, GenerationEvent]:
        # A template that prints the BOS itself must not get a second one.
        ids = self.engine.tokenizer.encode(prompt, add_special=not self._begins_text(prompt))
        pieces: list[str] = []
        shown, event = "", None
        with cancel_on_interrupt() as cancel, ui.Bars() as bars:
            for event in self.engine.generate(
                ids, self.sampling, max_tokens=self.max_tokens, stop=self.stop, cancel=cancel,
                progress=bars, reuse=True,
            ):  # fmt: skip
                bars.clear()
                pieces.append(event.text)
                shown = _show(splitter.push(event.text)) or shown
            shown = _show(splitter.flush()) or shown
        if event is None:
            raise Cancelled
        if not shown.endswith("\n"):
            ui.write_text("\n")
        options.show_messages(self.engine)
        return "".join(pieces), event

    def _begins_text(self, prompt: str) -> bool:
        bos = self.engine.tokenizer.bos
        if bos is None:
            return False
        return prompt.startswith(self.engine.tokenizer.piece(bos, special=True).decode())


def _show(parts: tuple[str, str]) -> str:
    """Write reasoning to stderr and answer to stdout; return what was written last."""
    reasoning, answer = parts
    if reasoning:
        ui.write_text(reasoning, "muted", sys.stderr)
    if answer:
        ui.write_text(answer)
    return answer or reasoning


def _converse(talk: Conversation, interactive: bool) -> None:
    """Read messages until the input or the user ends it."""
    if interactive:
        ui.enable_line_editing()
        ui.note(f"{talk.engine.file.path.name} on {talk.engine.device_name}; /help for help")
    while (message := _next_message(interactive)) not in (None, *_QUIT):
        try:
            _take_turn(talk, message or "", interactive)
        except RequestError as error:
            if not interactive:
                raise
            ui.error(str(error))
        except KeyboardInterrupt:
            if not interactive:
                raise
            ui.note("stopped")


def _take_turn(talk: Conversation, message: str, interactive: bool) -> None:
    if message.startswith("/"):
        _command(talk, message)
    elif message.strip():
        _after_answer(talk.answer(message), interactive)


def _after_answer(event: GenerationEvent, interactive: bool) -> None:
    if not interactive:
        if event.finish_reason == "cancelled":
            raise Cancelled
        return
    line = f"{event.prefill_tps:.1f} tok/s prefill, {event.decode_tps:.1f} tok/s decode"
    if event.finish_reason == "cancelled":
        line = f"stopped; {line}"
    elif event.finish_reason == "length":
        line = f"the context or -n is used up; {line}"
    ui.note(line)


def _command(talk: Conversation, message: str) -> None:
    if message == "/clear":
        talk.history.clear()
        talk.engine.reset()
        ui.note("cleared")
    elif message == "/help":
        for line in _HELP.splitlines():
            ui.note(line)
    else:
        ui.note(f"unknown command {message.split()[0]}; /help shows those there are")


def _next_message(interactive: bool) -> str | None:
    """Return what the user says next, None at the end of the input."""
    if not interactive:
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None
    try:
        message = ui.ask(">>> ")
        if message.startswith(_BLOCK):
            message = _read_block(message.removeprefix(_BLOCK))
        return message
    except KeyboardInterrupt:
        ui.write_text("\n", stream=sys.stderr)
        ui.note("(Ctrl-D or /quit ends the conversation)")
        return ""
    except EOFError:
        ui.write_text("\n", stream=sys.stderr)
        return None


def _read_block(first: str) -> str:
    lines = [first]
    while not lines[-1].endswith(_BLOCK):
        lines.append(ui.ask("... "))
    return "\n".join(lines).removesuffix(_BLOCK)
