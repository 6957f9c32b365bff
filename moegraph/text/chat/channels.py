"""Answers made of messages with headers: OpenAI's harmony, and Gemma's channels and calls.

<|channel|>analysis<|message|>THOUGHTS<|end|><|start|>assistant<|channel|>final<|message|>TEXT
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"K": V}<|call|>

<|channel>thought
THOUGHTS<channel|>TEXT<|tool_call>call:NAME{K:<|"|>V<|"|>}<tool_call|>
"""

from __future__ import annotations

import re

from ..stream import before_open
from .calls import CallOutput, Found, JSONArguments
from .forms import QUOTE, Form
from .parts import ContentPart, ReasoningPart
from .rawjson import dumps, loads

Kind = type[ReasoningPart] | type[ContentPart]

_KINDS: dict[str | None, Kind] = {"analysis": ReasoningPart, "thought": ReasoningPart}
_MAX_HEADER, _PIECE = 512, 4096


class ChannelScanner:
    """Split a stream of such text into reasoning, text and calls.

    call: takes the calls; None: there are no tools. is_raw: reasoning is text, with its tags.
    """

    def __init__(
        self, form: Form, prompt: str, call: CallOutput | None, is_thinking: bool, is_raw: bool
    ) -> None:
        assert form.channels is not None
        self._form, self._channels = form, form.channels
        self._call, self._is_raw = call, is_raw
        n_hidden = 0 if call or not form.call else 1  # without tools, a call's tags are text
        self._begins = self._channels.begins[: len(self._channels.begins) - n_hidden]
        self._ends = self._channels.ends[: len(self._channels.ends) - n_hidden]
        # the kind of text that comes; None: of none
        self._kind: Kind | None = ReasoningPart if is_thinking else ContentPart
        self._headers = headers = form.headers
        begun = headers and prompt.rfind(headers.end) > prompt.rfind(self._begins[0])
        self._in_header = headers is not None and not is_thinking and not begun
        self._after_call: Kind | None = None
        self._skip_blank = False  # what is blank after a call is nothing
        self._told: set[Kind] = set()
        self._gap = ""  # before the next text
        self._held = ""
        self._is_last = False
        self._out: list[tuple[Kind, Found]] = []

    @property
    def is_reasoning(self) -> bool:
        """Whether the answer is inside its reasoning."""
        return self._kind is ReasoningPart and not self._is_raw

    def push(self, text: str) -> list[tuple[Kind, Found]]:
        """Return the text and the parts of calls that text completes."""
        for at in range(0, max(len(text), 1), _PIECE):  # each tag moves all that is held
            self._held += text[at : at + _PIECE]
            while self._step():
                pass
        out, self._out = self._out, []
        return out

    def flush(self, is_cut: bool = False) -> list[tuple[Kind, Found]]:
        """Return what was held back; call it at the end. is_cut: the answer has no end."""
        self._is_last = True
        if is_cut and self._call and self._call.arguments:
            self._end_call(is_whole=False)
        elif self._in_header and self._is_begun(is_cut):
            self._held = ""
        return self.push("")

    def _is_begun(self, is_cut: bool) -> bool:
        """Return whether what is held begins a header that has no end, and is no text."""
        held, call = self._held, self._form.call
        if call and held.startswith(call):
            return is_cut
        return not held.strip() or bool(re.search(r"<\||to=", held))

    def _step(self) -> bool:
        """Understand more of what is held; return whether there may be more to understand."""
        if self._in_header:
            return self._header()
        if self._call and self._call.arguments:
            return self._arguments()
        return self._body()

    def _body(self) -> bool:
        if self._skip_blank:
            self._held = self._held.lstrip()
        tags = (*self._begins, *self._ends)
        places = [(at, tag) for tag in tags if (at := self._held.find(tag)) >= 0]
        if not places:
            text = self._held if self._is_last else before_open(self._held, tags)
            self._held = self._held[len(text) :]
            self._tell(text)
            return False
        at, tag = min(places)
        self._tell(self._held[:at])
        self._held = self._held[at:]
        if tag in self._begins:
            self._in_header = True
            return True
        self._held = self._held[len(tag) :]
        if tag == self._form.end_of_call:
            self._kind = self._kind or self._after_call
            return True
        if self._is_raw and self._kind is ReasoningPart:
            self._tell(tag)
        self._in_header, self._kind = self._headers is not None, ContentPart
        return True

    def _header(self) -> bool:
        if found := self._channels.header.match(self._held[:_MAX_HEADER]):
            self._held = self._held[found.end() :]
            self._in_header = False
            self._open(found)
            return True
        is_short = len(self._held) <= _MAX_HEADER
        if is_short and not self._is_last and self._channels.partial.fullmatch(self._held):
            return False
        # it is none: a tag that begins a call is text, others are nothing
        tag = next((tag for tag in self._begins if self._held.startswith(tag)), "")
        self._held, self._in_header = self._held[len(tag) :], False
        self._kind = self._kind or ContentPart
        self._tell(tag if tag and tag == self._form.call else "")
        return True

    def _open(self, header: re.Match[str]) -> None:
        """Begin the message of a header."""
        given = header.groupdict()
        prefix = self._headers.function if self._headers else ""
        name = (given["to"] or "").removeprefix(prefix)
        if name and given["to"] != "assistant":
            is_known = self._form.is_dict or given["to"] != name
            if self._call and (is_known or name in self._call.tools):
                self._after_call = None if self._headers else self._kind
                self._call.open(name, DictArguments() if self._form.is_dict else JSONArguments())
                self._take_calls()
            else:
                self._kind = None  # it is for a tool that is not ours
            return
        if given.get("role") not in (None, "assistant"):
            self._kind = None
            return
        self._kind = _KINDS.get(given["kind"], ContentPart)
        if self._is_raw and self._kind is ReasoningPart:
            self._tell(re.sub(r"\A\s*(<\|start\|>)?(assistant)?", "", header.group()))
        elif self._kind in self._told and not self._is_raw:
            self._gap = "\n"

    def _arguments(self) -> bool:
        """Inside the object of a call's arguments."""
        assert self._call is not None
        arguments = self._call.arguments
        assert isinstance(arguments, JSONArguments)
        if not arguments.is_begun:
            self._held = self._held.lstrip()
        text, self._held = arguments.push(self._held)
        self._call.say(text)
        self._take_calls()
        if not (arguments.is_over or self._is_last):
            return False
        if not arguments.is_begun:
            self._call.say(arguments.push("{}")[0])
        self._end_call(arguments.is_whole)
        return True

    def _end_call(self, is_whole: bool) -> None:
        assert self._call is not None
        self._call.end(is_whole)
        self._take_calls()
        # what is left of a wrong one is nothing
        self._kind = self._after_call if is_whole else None
        self._skip_blank = True

    def _take_calls(self) -> None:
        assert self._call is not None
        self._out += [(self._kind or ContentPart, one) for one in self._call.taken()]

    def _tell(self, text: str) -> None:
        if not text or self._kind is None:
            return
        kind = ContentPart if self._is_raw else self._kind
        text, self._gap, self._skip_blank = self._gap + text, "", False
        self._told.add(kind)
        self._out.append((kind, text))


_KEY = re.compile(r'(?:<\|"\|>(.*?)<\|"\|>|"([^"]*)"|([^:<>{}\[\],"]+))\s*:', re.DOTALL)
_KEY_BEGUN = re.compile(r'<\|"\|>.*|"[^"]*"?\s*|[^:<>{}\[\],"]*', re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_MAX_KEY = 1024


class DictArguments(JSONArguments):
    """Turns arguments that arrive in Gemma's form into JSON text, while they come."""

    def __init__(self) -> None:
        super().__init__()
        self._text = ""  # not yet understood
        self._closers = ""  # of the objects and lists that are open
        self._state = "value"
        self._comma = ""  # before what comes next

    @property
    def raw(self) -> dict[str, str]:
        """Nothing: templates write this form from the values."""
        return {}

    def push(self, text: str) -> tuple[str, str]:
        """Return the JSON text that the next piece completes, and what stands after the object."""
        self._text += text
        told = ""
        while not self.is_over and (piece := self._next()) is not None:
            told += piece
        self._written.append(told)
        rest, self._text = (self._text, "") if self.is_over else ("", self._text)
        return told, rest

    def _next(self) -> str | None:
        """Return the JSON text of what is understood next; None: more is needed."""
        if self._state == "text":
            return self._inside()
        held = self._text = self._text.lstrip()
        if not held or (len(held) < len(QUOTE) and QUOTE.startswith(held)):
            return None
        if held[0] in "}]":
            closer, self._closers = self._closers[-1], self._closers[:-1]
            self._text, self._state = held[1:], "after"
            self.is_over = not self._closers
            return closer
        if self._state == "key":
            return self._key(held)
        if self._state == "value":
            return self._value(held)
        if held[0] == ",":
            self._text, self._comma = held[1:], ", "
            self._state = "key" if self._closers[-1:] == "}" else "value"
        else:
            self.is_over = True  # it is no such object
        return ""

    def _inside(self) -> str | None:
        """Inside a text."""
        text, end, rest = self._text.partition(QUOTE)
        if not end:
            text = before_open(text, (QUOTE,))
            self._text = self._text[len(text) :]
            return dumps(text)[1:-1] if text else None
        self._text, self._state = rest, "after"
        return dumps(text)[1:-1] + '"'

    def _key(self, held: str) -> str | None:
        if found := _KEY.match(held[:_MAX_KEY]):
            self._text, self._state = held[found.end() :], "value"
            return self._with_comma(dumps((found[1] or found[2] or found[3] or "").strip()) + ": ")
        self.is_over = len(held) > _MAX_KEY or not _KEY_BEGUN.fullmatch(held)
        return "" if self.is_over else None

    def _value(self, held: str) -> str | None:
        if held.startswith(QUOTE):
            self._text, self._state = held[len(QUOTE) :], "text"
            return self._with_comma('"')
        if held[0] in "{[":
            self._closers += "}" if held[0] == "{" else "]"
            self._text, self._state = held[1:], "key" if held[0] == "{" else "value"
            return self._with_comma(held[0])
        found = _STRING.match(held) if held[0] == '"' else re.match(r"[^,}\]<]*(?=[,}\]<])", held)
        if not found:
            return None
        self._text, self._state = held[found.end() :], "after"
        text = found.group().strip()
        self.is_over = not text
        return self._with_comma(text if _is_json(text) else dumps(text.strip('"')))

    def _with_comma(self, text: str) -> str:
        text, self._comma = self._comma + text, ""
        return text


def _is_json(text: str) -> bool:
    if _SCALAR.fullmatch(text):
        return True
    try:
        return text[:1] == '"' and isinstance(loads(text), str)
    except ValueError:
        return False
