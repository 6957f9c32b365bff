"""A conversation: it asks the model, shows the answers, and keeps within the context."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from ..draft.plan import SpecStats
from ..errors import Cancelled, RequestError
from ..events import GenerationEvent
from ..interrupt import cancel_on_interrupt
from ..sampling import SamplingParams
from ..text.chat.messages import History
from ..text.chat.parts import ContentPart, Part, ReasoningPart
from ..text.pictures import read_picture
from . import models, ui
from .report import durations, sampling_report, spec_words, speeds

if TYPE_CHECKING:
    from ..engine import Engine
    from ..engine.chat import ChatModel, Prepared

# The part of the context that should be free for an answer. If less is free, the oldest turns are
# forgotten until half of the context is free, so that not every message forgets turns.
_ANSWER_SHARE, _FREE_SHARE = 4, 2


@dataclass(frozen=True)
class Answer:
    """A model's answer to a question, and its cost.

    n_held: positions of the context that are in use. n_forgotten: turns that were forgotten to
    make room. hit_rate: of the expert cache, 0 to 1; None without one. drafts: what was drafted
    for it; None if nothing drafts.
    """

    question: str
    text: str
    reasoning: str
    event: GenerationEvent
    n_held: int
    n_forgotten: int
    hit_rate: float | None
    drafts: SpecStats | None = None


@dataclass
class Conversation:
    """A model, what makes prompts of messages, and the messages so far.

    from_file: sampling settings that the model file recommends and the user did not set. shown:
    pictures, by the text that stands for each.
    """

    engine: Engine
    model: ChatModel
    history: History
    sampling: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    from_file: dict[str, float] = field(default_factory=dict)
    as_json: bool = False
    quiet: bool = False
    n_held: int = 0
    shown: dict[str, dict[str, Any]] = field(default_factory=dict)
    _warned: bool = False

    def answer(self, question: str) -> Answer:
        """Print the answer to a question and remember both."""
        if not question.strip():
            raise RequestError("the message is empty")
        before = self.history.messages
        self.history.ask(question)
        try:
            prepared, n_forgotten = self._fitted()
            opened = "<think>\n" if prepared.parser.is_reasoning else ""
            stats, drafts = self.engine.expert_stats(), self.engine.spec_stats()
            raw, (reasoning, text), event = self._generate(prepared)
        except BaseException:
            self.history.restore(before)
            raise
        # The last token of a full context is drawn, but needs no position any more.
        n_held = min(event.n_prompt + event.n_generated, self.engine.n_ctx)
        if event.finish_reason == "cancelled" and not event.n_generated:
            # or else a message that was too long to wait for would be read with the next one
            self.history.restore(before)
        else:
            # templates of other forms refuse thoughts in the text
            self.history.answer(text if self.model.form.channels else opened + raw)
            self.n_held = n_held
        now, drafted = self.engine.expert_stats(), self.engine.spec_stats()
        answer = Answer(
            question, text, reasoning, event, n_held, n_forgotten,
            now.since(stats).cache.hit_rate if now and stats else None,
            drafted.since(drafts) if drafted and drafts else None,
        )  # fmt: skip
        if self.as_json:
            click.echo(json.dumps(self.report(answer), ensure_ascii=False, allow_nan=False))
        return answer

    def note(self, line: str) -> None:
        """Print a quiet line, unless the user asked for --quiet."""
        if not self.quiet:
            ui.note(line)

    def _fitted(self) -> tuple[Prepared, int]:
        """Return the prompt, and how many old turns were forgotten to make it fit."""
        n_ctx = self.engine.n_ctx
        reserve = n_ctx // _ANSWER_SHARE
        if self.max_tokens is not None:
            reserve = min(reserve, self.max_tokens)
        prepared = self._prepared()
        n_forgotten = 0
        if len(prepared.request.prompt) > n_ctx - reserve:
            while (
                len(prepared.request.prompt) > n_ctx // _FREE_SHARE and self.history.forget_oldest()
            ):
                n_forgotten += 1
                prepared = self._prepared()
        if n_forgotten and len(prepared.request.prompt) <= n_ctx:
            turns = "turn is" if n_forgotten == 1 else f"{n_forgotten} turns are"
            self.note(f"note: the context of {n_ctx} tokens is full: the oldest {turns} forgotten")
        return prepared, n_forgotten

    def _prepared(self) -> Prepared:
        from ..engine.chat import ChatRequest

        asked = ChatRequest(
            [{"role": m.role, "content": self._content(m.content)} for m in self.history.messages],
            variables=self.variables, sampling=self.sampling, max_tokens=self.max_tokens,
            stop=self.stop,
        )  # fmt: skip
        return self.model.prepare(asked)

    def show(self, path: Path) -> str:
        """Read a picture; return the text that stands for it in messages from now on."""
        if self.model.pictures is None:
            raise RequestError("the model reads no pictures without --mmproj FILE")
        address = "data:;base64," + base64.b64encode(read_picture(path)).decode()
        mark = f"[picture {path}]\n"
        self.shown[mark] = {"type": "image_url", "image_url": address}
        return mark

    def _content(self, text: str) -> str | list[dict[str, Any]]:
        """Return a message with the pictures that were shown."""
        if not self.shown:
            return text
        pieces = re.split(f"({'|'.join(map(re.escape, self.shown))})", text)
        return [self.shown.get(one, {"type": "text", "text": one}) for one in pieces if one]

    def _generate(self, prepared: Prepared) -> tuple[str, tuple[str, str], GenerationEvent]:
        """Show an answer as it comes; return the raw text, (reasoning, answer), and last event."""
        request, parser = prepared.request, prepared.parser
        if not self._warned:
            models.warn_beyond_training(self.engine, len(request.prompt))
            self._warned = len(request.prompt) > self.engine.hparams.n_ctx_train
        pieces: list[str] = []
        shown = _Shown(silent=self.as_json)
        event = None
        ending = ui.errors_begin_lines(lambda: shown.end() if pieces else None)
        with ending, cancel_on_interrupt() as cancel, ui.Bars() as bars:
            bars.expect("prefill", len(request.prompt))
            for event in self.engine.generate(
                request.prompt, request.sampling, request.max_tokens, request.stop, cancel=cancel,
                progress=bars, reuse=request.reuse, marks=request.marks,
                pictures=request.pictures,
            ):  # fmt: skip
                bars.clear()
                pieces.append(event.text)
                drawn = () if event.token is None else (event.token,)
                shown.push(parser.push(event.text, drawn))
            shown.push(parser.flush(is_cut=event is None or event.finish_reason != "stop"))
        if event is None:
            raise Cancelled
        shown.end()
        if not self.quiet:
            models.show_messages(self.engine)
        return "".join(pieces), (shown.reasoning, shown.answer), event

    def remark(self, answer: Answer) -> None:
        """Warn the reader if the answer was cut, or if there is only reasoning."""
        event = answer.event
        if event.finish_reason == "length":
            if self.max_tokens is not None and event.n_generated >= self.max_tokens:
                self.note(f"note: the answer was cut at {self.max_tokens} tokens (-n)")
            else:
                self.note(
                    f"note: the answer was cut: the context of {self.engine.n_ctx} tokens is full; "
                    "your next message will make chat forget the oldest turns; /clear forgets all"
                )
        if not answer.text.strip() and answer.reasoning.strip():
            self.note("note: there is no answer, only reasoning")

    def summary(self, answer: Answer) -> str:
        """Return one line about an answer: context in use, tokens and speed."""
        event = answer.event
        line = (
            f"context {answer.n_held} of {self.engine.n_ctx}; "
            f"read {event.n_computed}, {event.prefill_tps:.1f} tok/s; "
            f"wrote {event.n_generated}"
        )
        if event.n_generated > 1:
            line += f", {event.decode_tps:.1f} tok/s"
        if answer.hit_rate is not None:
            line += f"; hit rate {answer.hit_rate:.1%}"
        words = spec_words(answer.drafts)
        return f"{line}; {words}" if words else line

    def report(self, answer: Answer) -> dict[str, Any]:
        """Return the object that --json prints for an answer; durations in seconds."""
        event = answer.event
        return {
            "question": answer.question,
            "answer": answer.text,
            "reasoning": answer.reasoning,
            "finish_reason": event.finish_reason,
            "n_prompt": event.n_prompt,
            "n_computed": event.n_computed,
            "n_generated": event.n_generated,
            "n_forgotten_turns": answer.n_forgotten,
            "n_held": answer.n_held,
            "n_ctx": self.engine.n_ctx,
            **speeds(event),
            "timings": durations(event),
            "hit_rate": answer.hit_rate,
            "spec": answer.drafts and answer.drafts.report(),
            "sampling": sampling_report(self.sampling, self.from_file),
        }


class _Shown:
    """Writes reasoning to stderr and the answer to stdout as they come, and stores both."""

    def __init__(self, silent: bool) -> None:
        self.reasoning = self.answer = ""
        self._silent = silent
        self._last: TextIO | None = None

    def push(self, parts: Iterable[Part]) -> None:
        """Take the next parts of an answer."""
        for part in parts:
            if isinstance(part, ReasoningPart):
                self.reasoning += part.text
                self._write(part.text, "muted", sys.stderr)
            elif isinstance(part, ContentPart):
                if self._last is sys.stderr:
                    self.end()  # of the reasoning
                self.answer += part.text
                self._write(part.text, None, sys.stdout)

    def _write(self, text: str, role: str | None, stream: TextIO) -> None:
        self._last = stream
        if not self._silent:
            ui.write_text(text, role, stream)

    def end(self) -> None:
        """End the last line, also if the answer is empty."""
        text = self.reasoning if self._last is sys.stderr else self.answer
        if not (self._silent or text.endswith("\n")):
            ui.write_text("\n", stream=self._last or sys.stdout)
