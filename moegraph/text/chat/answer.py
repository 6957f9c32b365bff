"""An answer's text taken apart while it comes: reasoning, text and calls of tools."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from ..stream import before_open
from .calls import CallOutput, CallScanner, Found
from .channels import ChannelScanner, Kind
from .forms import END_OF_THINK, QWEN, THINK, XML, Form
from .parts import CallArguments, CallBegin, CallEnd, ContentPart, Part, ReasoningPart
from .tools import Tools

if TYPE_CHECKING:
    from .prompting import Turn


class ReasoningSplitter:
    """Split a stream at ``<think>`` and ``</think>``; only the start of a tag is held back.

    A tag that is repeated where reasoning begins is dropped, and an answer that begins with one is
    more reasoning. opened: whether the prompt ends inside a reasoning block, as with Qwen's
    template.
    """

    def __init__(self, opened: bool = False) -> None:
        self.is_thinking = opened
        self._at_start = True
        self._skip_blank = False
        self._held = ""

    @classmethod
    def after(cls, prompt: str) -> ReasoningSplitter:
        """Return a splitter for the text that follows this prompt."""
        found = cls(opened=prompt.rstrip().endswith(THINK))
        found._skip_blank = prompt.rstrip().endswith(END_OF_THINK)
        return found

    def push(self, text: str) -> tuple[str, str]:
        """Return (reasoning, answer): the parts that text completes."""
        text, self._held = self._held + text, ""
        reasoning = ""
        while text:
            text = self._find_start(text) if self._at_start else text
            if not self.is_thinking:
                return reasoning, self._answer(text)
            before, tag, after = text.partition(END_OF_THINK)
            if not tag:
                if not self._at_start:
                    before = before_open(text, (END_OF_THINK,))
                    self._held = text[len(before) :]
                return reasoning + before, ""
            reasoning, text = reasoning + before, after
            self.is_thinking, self._at_start, self._skip_blank = False, True, True
        return reasoning, ""

    def flush(self) -> tuple[str, str]:
        """Return the held-back text as (reasoning, answer); call it at the end of the stream."""
        held, self._held = self._held, ""
        return (held, "") if self.is_thinking else ("", self._answer(held))

    def _find_start(self, text: str) -> str:
        """Hold text until it is known whether it begins with a tag; return it without tags."""
        while (head := text.lstrip()).startswith(THINK):
            self.is_thinking, text = True, head[len(THINK) :]
        if THINK.startswith(head):
            self._held = text
            return ""
        self._at_start = False
        return text

    def _answer(self, text: str) -> str:
        # The blank lines between reasoning and answer belong to neither.
        if self._skip_blank:
            text = text.lstrip("\n")
            self._skip_blank = not text
        return text


def new_call_id() -> str:
    """Return an id for a tool call."""
    return f"call_{secrets.token_hex(12)}"


class AnswerParser:
    """Turn the text of an answer into parts as it comes.

    It never fails: what looks like a tool call and is none is text. Calls inside reasoning count.

    end: why an answer ends that is_done; a finish_reason.
    """

    end = "stop"

    def __init__(
        self,
        prompt: str = "",
        tools: Iterable[Mapping[str, Any]] = (),
        *,
        reasoning: bool = True,
        parallel: bool = True,
        new_id: Callable[[], str] = new_call_id,
        memory: Turn | None = None,
        is_thinking: bool = False,
        begun: str = "",
        form: Form = QWEN,
    ) -> None:
        """prompt: what the answer follows. If it ends in a tag that opens reasoning, or with
        is_thinking, the answer begins inside reasoning. begun: text that is told before the answer.

        tools: what may be called, in OpenAI's form; with none, calls are text. reasoning: False to
        leave reasoning in the text, with the tags that the prompt ends in. parallel: False to end
        the answer when it goes on after its first call. memory: is told how the model wrote the
        answer. form: of the answer.
        """
        splitter = ReasoningSplitter.after(prompt)
        splitter.is_thinking = splitter.is_thinking or is_thinking
        self._splitter = splitter if reasoning else None
        self._begun = ("" if reasoning else form.shown(prompt)) or begun
        self._parallel = parallel
        found, numbers = Tools(tools) if tools else None, count()
        self._raw: dict[int, dict[str, str]] = {}
        calls = [
            CallOutput(found, numbers, new_id, self._raw, form.text or XML) if found else None
            for _ in range(2)
        ]
        self._channels: ChannelScanner | None = None
        if form.channels:
            self._channels = ChannelScanner(form, prompt, calls[0], is_thinking, not reasoning)
        self._scanners = {
            kind: CallScanner(call) if call and not self._channels else None
            for kind, call in zip((ReasoningPart, ContentPart), calls)
        }
        self._reasoning = _Trimmed()
        self._memory = memory
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._calls: list[tuple[str, list[str]]] = []
        self._has_call = False
        self.n_calls = 0
        self.is_done = False

    @property
    def is_reasoning(self) -> bool:
        """Whether the answer is inside its reasoning."""
        if self._channels:
            return self._channels.is_reasoning
        return self._splitter is not None and self._splitter.is_thinking

    def push(self, text: str, tokens: Sequence[int] = ()) -> list[Part]:
        """Return the parts that text completes; none once `is_done`: the answer may be ended.

        tokens: that were drawn since the last call, to show a later prompt the same ones.
        """
        if self._memory:
            self._texts.append(text)
            self._tokens += tokens
        begun = self._tell_begun() if text else []
        if self._channels:
            return begun + self._sorted(self._channels.push(text))
        if self._splitter is None:
            return begun + self._scan(ContentPart, text)
        return begun + self._split(*self._splitter.push(text))

    def _tell_begun(self) -> list[Part]:
        text, self._begun = self._begun, ""
        return [ReasoningPart(text) if self.is_reasoning else ContentPart(text)] if text else []

    def _split(self, reasoning: str, content: str) -> list[Part]:
        found = self._scan(ReasoningPart, reasoning)
        # until the answer has text, there may be more reasoning
        found += self._end_reasoning(is_cut=False) if content else []
        return found + self._scan(ContentPart, content)

    def _sorted(self, found: Iterable[tuple[Kind, Found]]) -> list[Part]:
        parts: list[Part] = []
        for kind, one in found:
            if kind is ContentPart:
                self._reasoning.drop()
            parts += self._parts(kind, [one])
        return parts

    def flush(self, is_cut: bool = False) -> list[Part]:
        """Return what was held back; call it at the end of the answer.

        is_cut: the answer was stopped (its finish_reason is not "stop"), so that a call which is
        open stays without an end.
        """
        found = self._tell_begun()
        if self._channels:
            found += self._sorted(self._channels.flush(is_cut))
        elif self._splitter is not None:
            found += self._split(*self._splitter.flush())
        scanner = self._scanners[ContentPart]
        rest = self._parts(ContentPart, scanner.flush(is_cut)) if scanner else []
        if self._memory:
            self._memory.keep("".join(self._texts), self._tokens)
        return found + self._end_reasoning(is_cut) + rest

    def _end_reasoning(self, is_cut: bool) -> list[Part]:
        scanner = self._scanners[ReasoningPart]
        found = self._parts(ReasoningPart, scanner.flush(is_cut)) if scanner else []
        self._scanners[ReasoningPart] = None
        self._reasoning.drop()
        return found

    def _scan(self, kind: type[ReasoningPart | ContentPart], text: str) -> list[Part]:
        if not text:
            return []
        scanner = self._scanners[kind]
        return self._parts(kind, scanner.push(text) if scanner else [text])

    def _parts(self, kind: type[ReasoningPart | ContentPart], found: Iterable[Found]) -> list[Part]:
        parts: list[Part] = []
        for one in found:
            # after the only call, there may be no more than the end of the answer
            self.is_done = self.is_done or (self._has_call and not self._parallel)
            if self.is_done:
                break
            if isinstance(one, str):
                text = self._reasoning.push(one) if kind is ReasoningPart else one
                parts += [kind(text)] if text else []
                continue
            parts.append(one)
            self._note(one)
        return parts

    def _note(self, part: CallBegin | CallArguments | CallEnd) -> None:
        if isinstance(part, CallBegin):
            self.n_calls += 1
            self._calls.append((part.name, []))
        elif isinstance(part, CallArguments):
            self._calls[part.index][1].append(part.text)
        else:
            self._has_call = True
            if part.is_whole and self._memory:
                name, pieces = self._calls[part.index]
                self._memory.calls.keep(name, "".join(pieces), self._raw[part.index])


class _Trimmed:
    """Text without the line ends around it."""

    def __init__(self) -> None:
        self._held = ""
        self._at_start = True

    def push(self, text: str) -> str:
        text = self._held + (text.lstrip("\n") if self._at_start else text)
        self._at_start = self._at_start and not text
        kept = text.rstrip("\n")
        self._held = text[len(kept) :]
        return kept

    def drop(self) -> None:
        self._held = ""
