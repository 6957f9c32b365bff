"""Prompts made of messages by a chat template, and encoded, from any thread.

A prompt is encoded segment by segment, so that a conversation's earlier turns are encoded once. A
tokenizer first cuts text at its control tokens, and encodes what is between them independently. So
a text that is cut before a control token has the tokens of its segments, exactly.
"""

from __future__ import annotations

import re
import threading
from array import array
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ...errors import MoegraphError, RequestError
from ...pictures import Picture
from ..recent import Recent
from .forms import HOW_TO_CALL, QWEN, Form, call_text, form_of
from .messages import TemplateMessage, without_late_system
from .parts import call_of
from .rawjson import CallMemory, dumps
from .template import ChatTemplate

if TYPE_CHECKING:
    from ..pictures import Shown
    from ..tokenizer import Tokenizer

# Characters of all segments that are remembered; their ids are about as large.
_MAX_CHARS = 8 * 1024 * 1024


@dataclass(frozen=True)
class Encoded:
    """A prompt's token ids.

    starts: where a segment begins, its first character and the number of tokens before it.
    pictures: each with its first row.
    """

    ids: list[int]
    starts: list[tuple[int, int]]
    pictures: Sequence[tuple[int, Picture]] = ()

    def tokens_before(self, place: int) -> int:
        """Return the number of tokens before the segment that a character is in."""
        return max((n for at, n in self.starts if at <= place), default=0)


class SegmentEncoder:
    """Encodes prompts; any thread may call it.

    tags: control tokens, before each of which a prompt is cut. ends: those that end an answer.
    """

    def __init__(
        self, tokenizer: Tokenizer, tags: Iterable[str] = (), ends: Iterable[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._end = re.compile("|".join(map(re.escape, ends)) or "(?!)")
        names = sorted(tags, key=len, reverse=True)
        self._tag = re.compile("|".join(map(re.escape, names))) if names else None
        self._known: Recent[str, array[int]] = Recent(_MAX_CHARS)
        self._written: Recent[str, array[int]] = Recent(_MAX_CHARS)

    def encode(self, prompt: str, add_special: bool) -> Encoded:
        """Return the token ids of a prompt.

        add_special: add BOS if the model asks for it.
        """
        if self._tag is None:
            return Encoded(self._tokenizer.encode(prompt, add_special=add_special), [(0, 0)])
        begin = self._tokenizer.encode("", add_special=add_special)
        cuts = [found.start() for found in self._tag.finditer(prompt) if found.start()]
        ids, starts = list(begin), list[tuple[int, int]]()
        for start, end in pairwise((0, *cuts, len(prompt))):
            starts.append((start, len(ids)))
            ids.extend(self._ids(prompt[start:end]))
        return Encoded(ids, starts)

    def encode_around(self, prompt: str, shown: Mapping[str, Shown], add_special: bool) -> Encoded:
        """Return the ids of a prompt in which texts stand for pictures."""
        ids, starts, pictures, at = list[int](), list[tuple[int, int]](), [], 0
        for n, piece in enumerate(re.split(f"({'|'.join(map(re.escape, shown))})", prompt)):
            if n % 2:
                for part in shown[piece]:
                    if isinstance(part, Picture):
                        pictures.append((len(ids), part))
                    ids += part.ids.tolist() if isinstance(part, Picture) else part
            else:
                text = self.encode(piece, add_special and not n)
                starts += [(at + start, len(ids) + before) for start, before in text.starts]
                ids += text.ids
            at += len(piece)
        return Encoded(ids, starts, pictures)

    def keep(self, segment: str, ids: Sequence[int]) -> None:
        """Remember the tokens of a segment that a model wrote, before its end token.

        A model may draw other tokens than its text is encoded to. A prompt with this text then has
        the tokens that the engine holds.
        """
        if self._tag is not None:
            self._written.put(segment, array("i", ids), len(segment))

    def _ids(self, segment: str) -> array[int]:
        end = next((found.start() for found in self._end.finditer(segment)), 0)
        if end and (written := self._written.get(segment[:end])) is not None:
            rest = segment[end:]
            return written + array("i", self._tokenizer.encode(rest, add_special=False))
        if (found := self._known.get(segment)) is None:
            found = array("i", self._tokenizer.encode(segment, add_special=False))
            self._known.put(segment, found, len(segment))
        return found


@dataclass(frozen=True)
class Turn:
    """One answer that is being written, which later prompts are to have as the model wrote it.

    head: the end of the prompt that belongs to the same turn. head_ids: its tokens.
    """

    tokenizer: Tokenizer
    encoder: SegmentEncoder
    calls: CallMemory
    head: str
    head_ids: Sequence[int]

    def keep(self, text: str, tokens: Sequence[int]) -> None:
        """Remember the tokens of an answer; the last is its end token, unless it was cut."""
        if tokens and tokens[-1] in self.tokenizer.eog_ids:
            tokens = tokens[:-1]
        # a stop string cuts the text, and a control token is none of it
        if tokens and self.tokenizer.decode(tokens, special=True) == text:
            self.encoder.keep(self.head + text, [*self.head_ids, *tokens])


def turn_tags(source: str, specials: Sequence[str], ends: Iterable[str]) -> list[str]:
    """Return the control tokens that a template begins turns with, if prompts can be cut there.

    specials: all texts that the tokenizer reads as one token. ends: those that end a generation.
    """
    tags = {text for text in specials if text in source} - set(ends)
    return [tag for tag in sorted(tags) if not any(_straddles(text, tag) for text in specials)]


def _straddles(text: str, tag: str) -> bool:
    """Return whether an occurrence of text can begin before one of the tag and reach into it."""
    rests = (text[n:] for n in range(1, len(text)))
    return any(rest.startswith(tag) or tag.startswith(rest) for rest in rests)


# Earlier questions, the latest ones, that have a mark: each costs memory.
MAX_QUESTIONS = 4
# Characters of a message that are looked for in the prompt.
_KEY_CHARS = 64


def prompt_marks(
    encoded: Encoded, prompt: str, messages: Sequence[TemplateMessage], first: int
) -> tuple[int, ...]:
    """Return how many of a prompt's tokens later prompts may begin with, in rising order.

    They are: what is before the first question, before each of the latest questions, before the
    turn that follows the last one, and before the turn that the prompt asks for. Each is the
    beginning of a segment, so it is certain that these tokens do not depend on what follows.

    first: the character where the first question begins.
    """
    found = {encoded.tokens_before(first), encoded.starts[-1][1]}
    questions = [*_questions(prompt, messages, first)]
    found |= {encoded.tokens_before(place) for place in questions[-MAX_QUESTIONS:]}
    if questions:
        later = (n for at, n in encoded.starts if at > questions[-1])
        found.add(next(later, encoded.starts[-1][1]))
    return tuple(sorted(mark for mark in found if 0 < mark < len(encoded.ids)))


def _questions(prompt: str, messages: Sequence[TemplateMessage], first: int) -> Iterator[int]:
    """Yield where in the prompt the text of each user message is, as far as it is found there."""
    at = first
    for message in messages[int(messages[0]["role"] == "system") :]:
        key = message["content"].strip()[:_KEY_CHARS]
        place = prompt.find(key, at) if key else -1
        if place < 0:
            continue
        if message["role"] == "user":
            yield place
        at = place + len(key)


# The template of a model that has none.
CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def described_tools(tools: Iterable[Mapping[str, Any]]) -> str:
    """Return what a model is told of tools; "" without any."""
    lines = "\n".join(dumps(tool.get("function", tool)) for tool in tools)
    return HOW_TO_CALL.format(tools=lines) if lines else ""


def plain_messages(messages: Sequence[TemplateMessage], described: str) -> list[TemplateMessage]:
    """Return messages with nothing but text: tools, calls and their results are text in them.

    described: of the tools; see `described_tools`.
    """
    found: list[TemplateMessage] = []
    if described:
        found.append({"role": "system", "content": described})
    for message, before in zip(messages, ({"role": ""}, *messages)):
        role, content = message["role"], message["content"]
        if role == "system" and len(found) == 1 and described:
            found[0]["content"] = f"{content}\n\n{found[0]['content']}"
            continue
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            if before["role"] == "tool":
                found[-1]["content"] += "\n" + content
                continue
        calls = "\n".join(call_text(call["function"]) for call in message.get("tool_calls", ()))
        text = "\n\n".join(part for part in (content, calls) if part)
        found.append({"role": role, "content": text})
    return found


Render = Callable[[list[TemplateMessage]], str]
# Words that no template has, to find what becomes of a message.
_ONE, _TWO = "moegraph-one", "moegraph-two"
_ARGUMENTS = f'{{"{_ONE}": "{_TWO}"}}'


class PromptMaker:
    """Renders conversations with a template, which it owns.

    tokens: variables of every rendering, such as bos_token.
    """

    def __init__(self, template: ChatTemplate, tokens: Mapping[str, str]) -> None:
        self.template = template
        self.form = form_of(template.source)
        self._tokens = dict(tokens)
        self._rendering = threading.Lock()

    def close(self) -> None:
        """Close the template; a second call does nothing."""
        with self._rendering:
            self.template.close()

    @cached_property
    def separator(self) -> str:
        """What the template puts between parts of a message; a line end if it reads no parts."""
        parts = [{"type": "text", "text": text} for text in (_ONE, _TWO)]
        text = self._tried([{"role": "user", "content": parts}])
        found = re.search(f"{_ONE}(.*?){_TWO}", text, re.DOTALL)
        # a template that prints a list as it is would show the types
        return found[1] if found and "type" not in found[1] else "\n"

    @cached_property
    def closing(self) -> str:
        """What ends reasoning before text, with the line ends that the template writes."""
        end = self.form.end_of_think
        if self.form.channels:
            return end
        turn = {"role": "assistant", "content": _TWO, "reasoning_content": _ONE}
        text = self._tried([{"role": "user", "content": "A"}, turn])
        found = re.search(rf"{_ONE}(\s*{end}\s*){_TWO}", text)
        return found[1] if found else f"\n{end}\n\n"

    @cached_property
    def _hides_late_system(self) -> bool:
        """Whether the template leaves out system messages after the first message."""
        texts = (("user", "A"), ("system", _ONE), ("user", "B"))
        text = self._tried([{"role": role, "content": content} for role, content in texts])
        return bool(text) and _ONE not in text

    @cached_property
    def takes_json(self) -> bool:
        """Whether arguments of calls may be JSON text: the template prints it as it is.

        If it prints their values otherwise than as JSON, they must be values.
        """

        def shown(arguments: object) -> str:
            call = call_of("call_1", "f", arguments)
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            return self._tried([{"role": "user", "content": "A"}, turn])

        as_text, as_values = shown(_ARGUMENTS), shown({_ONE: _TWO})
        is_wrong = _ONE not in as_values or f"'{_ONE}'" in as_values  # refused, or Python's own
        return _ARGUMENTS in as_text and (is_wrong or as_values == as_text)

    def _tried(self, messages: list[TemplateMessage]) -> str:
        """Return the prompt for messages; "" if the template does not take them."""
        try:
            return self._apply(messages, {})
        except MoegraphError:
            return ""

    def renderer(
        self,
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        opens_turn: bool = True,
    ) -> Render:
        """Return what makes prompts of messages, with these tools.

        opens_turn: prompts end with the beginning of the next answer's turn.
        """
        variables, adapt = self.form.variables(variables), self.form.adapt
        if tools and self.template.knows_tools:
            variables["tools"] = self.form.described(tools)
        try:
            described = "" if self.template.knows_tools else described_tools(tools)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"tools: a schema is not JSON: {error}") from error

        def render(messages: list[TemplateMessage]) -> str:
            if not self.template.knows_tools:
                messages = plain_messages(messages, described)
            if any(m["role"] == "system" for m in messages[1:]) and self._hides_late_system:
                messages = without_late_system(messages)
            if adapt:
                messages = adapt(messages, self.template.source)
            try:
                return self._apply(messages, variables, opens_turn)
            except RequestError:
                plain = without_late_system(messages)
                if plain == messages:
                    raise
                return self._apply(plain, variables, opens_turn)

        return render

    def _apply(
        self, messages: list[TemplateMessage], variables: Mapping[str, Any], opens_turn: bool = True
    ) -> str:
        allowed = {name: value for name, value in variables.items() if name != "messages"}
        allowed["add_generation_prompt"] = opens_turn
        with self._rendering:
            try:
                prompt = self.template.render(messages, **{**self._tokens, **allowed})
                return self.form.ended(prompt, opens_turn)
            except RequestError:
                raise
            except (MoegraphError, TypeError, ValueError, RecursionError) as error:
                # if it fails for any messages, it is broken, and the client is right
                with suppress(RequestError):
                    self.template.render([{"role": "user", "content": "A"}], **self._tokens)
                raise RequestError(
                    f"the chat template fails for these messages: {error}"
                ) from error

    def first_question(self, render: Render, messages: list[TemplateMessage], prompt: str) -> int:
        """Return the character of a prompt where its first message after the system's begins."""
        n_system = int(messages[0]["role"] == "system")
        first = messages[n_system]["content"] if len(messages) > n_system else ""
        other = "B" if first.startswith("A") else "A"
        try:
            shown = render([*messages[:n_system], {"role": "user", "content": other}])
        except MoegraphError:
            return 0  # a template that wants more than one question
        lengths = range(1, min(len(prompt), len(shown)) + 1)
        return bisect(lengths, False, key=lambda n: prompt[:n] != shown[:n])


def is_continued(messages: Sequence[TemplateMessage], asked: bool | str | None) -> bool:
    """Return whether the answer continues the last message.

    asked: True, or the field of the message that goes on, "content" or "reasoning_content"; False;
    or None: if the last of several messages is an assistant's without calls.
    """
    may = bool(messages) and messages[-1]["role"] == "assistant"
    may = may and "tool_calls" not in messages[-1]
    if asked and not may:
        raise RequestError(
            "continue_final_message: the last message is not an assistant's without tool calls"
        )
    return bool(asked) or (asked is None and may and len(messages) > 1)


def continued(
    prompt: str, begun: TemplateMessage, field: object = None, form: Form = QWEN,
    closing: str = f"\n{QWEN.end_of_think}\n\n",
) -> tuple[str, str, bool]:  # fmt: skip
    """Return a prompt that ends in the text of a message which the model is to continue.

    And that text, and whether it is reasoning. field: "content" or "reasoning_content" goes on;
    otherwise the reasoning if there is no content. closing: ends reasoning before text.
    """
    text, reasoning = str(begun["content"]), str(begun.get("reasoning_content", ""))
    thinks = field == "reasoning_content" or (field != "content" and bool(reasoning) and not text)
    if not form.is_open(prompt) and (thinks or reasoning or form.channels):
        bare = prompt.removesuffix(form.shown(prompt)).removesuffix(form.end_of_think)
        prompt = bare + (form.think.lstrip() if bare.endswith("\n") else form.think)
    if thinks:
        return prompt + reasoning, reasoning, True
    if form.is_open(prompt):
        prompt = f"{prompt}{reasoning}{closing}"
    return prompt + text, text, False
