"""Tool calls in a stream of text: Qwen's XML form, the older one with JSON, and GLM's.

    <tool_call>                                    <tool_call>
    <function=NAME>                                {"name": NAME, "arguments": {K: V}}
    <parameter=K>                                  </tool_call>
    V
    </parameter>
    </function>
    </tool_call>

    <tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>

Models drift from these forms. What can be understood is: a missing or doubled end tag, a missing
<tool_call>, JSON between <function=NAME> and its end. What cannot remains text. JSON is told while
it comes, so a call whose JSON proves to be wrong is a call that is not whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from ..stream import before_open
from .forms import CALL, END_OF_CALL, END_OF_FUNCTION, FUNCTION, XML, TextCalls
from .parts import CallArguments, CallBegin, CallEnd
from .rawjson import WHOLE, ObjectEnd, dumps, loads, members
from .tools import STRING, Tools, Types, json_of


class Arguments:
    """Turns parameters that arrive as plain text into the text of one JSON object.

    A value that can only be a string is passed on as it comes; others when they are whole.

    has_lines: the tags of a value stand on lines of their own.
    stray: text between the parameters, which belongs to none. raw: values that may be other than
    strings, as the model wrote them.
    """

    def __init__(self, name: str, tools: Tools, has_lines: bool = True) -> None:
        self.stray = ""
        self.raw: dict[str, str] = {}
        self._name, self._tools, self._end_of_line = name, tools, "\n" * has_lines
        self._names: set[str] = set()
        self._key: str | None = None
        self._types: Types | None = None
        self._is_text = self._at_start = False
        self._held = ""

    def has(self, key: str) -> bool:
        """Return whether there was such a parameter."""
        return key in self._names

    def begin(self, key: str) -> str:
        """Return the JSON text before a value; a parameter that was there already has none."""
        self._key = None if key in self._names else key
        self._types = self._tools.types(self._name, key)
        self._is_text, self._at_start = self._types == STRING, True
        self._held = ""
        if self._key is None:
            return ""
        text = ("{" if not self._names else ", ") + dumps(key) + ": "
        self._names.add(key)
        return text + '"' if self._is_text else text

    def value(self, text: str) -> str:
        """Return the JSON text of the next piece of the value."""
        text = self._held + text
        if self._at_start and text:
            text, self._at_start = text.removeprefix(self._end_of_line), False
        if not self._is_text:
            self._held = text
            return ""
        kept = text.removesuffix(self._end_of_line)
        self._held = text[len(kept) :]
        return "" if self._key is None else dumps(kept)[1:-1]

    def end(self) -> str:
        """Return the JSON text that ends the value."""
        held, self._held = self._held, ""
        if self._key is None:
            return ""
        if self._is_text:
            return '"'
        self.raw[self._key] = held.removesuffix(self._end_of_line)
        return json_of(self.raw[self._key], self._types)

    def close(self) -> str:
        """Return the JSON text that ends the object."""
        return "}" if self._names else "{}"


class JSONArguments:
    """Passes on arguments that the model writes as a JSON object, while they come.

    is_over: the object has ended, or a tag has ended it.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._written: list[str] = []
        self._end = ObjectEnd()

    @property
    def raw(self) -> dict[str, str]:
        """The text as the model wrote it, for `CallMemory.keep`."""
        return {WHOLE: "".join(self._written)}

    @property
    def is_begun(self) -> bool:
        """Whether there is any text."""
        return any(self._written)

    @property
    def is_whole(self) -> bool:
        """Whether the text is that of a JSON object."""
        try:
            return isinstance(loads("".join(self._written)), dict)
        except ValueError:
            return False

    def push(self, text: str) -> tuple[str, str]:
        """Return what of the next piece belongs to the object, and what stands after it."""
        end = self._end.push(text)
        self.is_over = end is not None
        told, rest = (text, "") if end is None else (text[:end], text[end:])
        self._written.append(told)
        return told, rest


_MAX_NAME = 256
_NAME = re.compile(r"[\w.:/-]+")
_NAMED = r'\{\s*"name"\s*:\s*"([\w.:/-]{1,256})"'
_NAME_FIRST = re.compile(_NAMED)
_BEGIN = re.compile(_NAMED + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{\s*["}])')
_OBJECT = re.compile(r'\{\s*["}]')
# What looks like an object of the older form is read again as text. This limits how often.
_MAX_FAILED_JSON = 32

Found = str | CallBegin | CallArguments | CallEnd


class CallOutput:
    """What a scanner has found, and the call that it is in, if any.

    tools: what may be called. indices: numbers the calls of an answer. new_id: makes up their ids.
    raw: takes, of each call, the values that may be other than strings, as they were written. tags:
    of the parameters. arguments: of the call; None outside of one.
    """

    def __init__(
        self,
        tools: Tools,
        indices: Iterator[int],
        new_id: Callable[[], str],
        raw: dict[int, dict[str, str]],
        tags: TextCalls = XML,
    ) -> None:
        self.arguments: Arguments | JSONArguments | None = None
        self.tools, self.tags, self.raws = tools, tags, raw
        self._indices, self._new_id = indices, new_id
        self._out: list[Found] = []
        self._index = 0

    def taken(self) -> list[Found]:
        """Return what was found since the last call."""
        out, self._out = self._out, []
        return out

    def text(self, text: str) -> None:
        """Take text outside of calls."""
        if text:
            self._out.append(text)

    def say(self, text: str) -> None:
        """Take a piece of the call's arguments."""
        if text:
            self._out.append(CallArguments(self._index, text))

    def open(self, name: str, arguments: JSONArguments | None = None) -> None:
        """Begin a call; arguments: None if they come as plain text."""
        self._index = next(self._indices)
        self.arguments = arguments or Arguments(name, self.tools, self.tags is XML)
        self._out.append(CallBegin(self._index, self._new_id(), name))

    def close(self) -> None:
        """End a call whose parameters came as plain text; what stood between them is text."""
        arguments = self.plain()
        self.say(arguments.close())
        self.end(is_whole=True)
        self.text(arguments.stray.replace(self.tags.end_of_value.strip(), "").strip())

    def end(self, is_whole: bool) -> None:
        """End a call."""
        arguments, self.arguments = self.arguments, None
        assert arguments is not None
        self.raws[self._index] = arguments.raw
        self._out.append(CallEnd(self._index, is_whole))

    def plain(self) -> Arguments:
        """Return the arguments, which come as plain text."""
        assert isinstance(self.arguments, Arguments)
        return self.arguments


class CallScanner:
    """Split a stream of text into text and tool calls; only what may become a call is held back.

    call: takes what is found. A name outside its tools is a call too if it stands in <tool_call>.
    """

    def __init__(self, call: CallOutput) -> None:
        self._tools, self._call, tags = call.tools, call, call.tags
        self._key, self._after_key = tags.before_key, tags.after_key
        self._is_bare = tags is not XML  # the name follows <tool_call>
        end = tags.end_of_value.strip()
        self._closers = (END_OF_CALL, END_OF_FUNCTION, end)
        self._any = re.compile(
            "|".join(map(re.escape, (self._key, end, END_OF_FUNCTION, END_OF_CALL)))
        )
        # what may follow an end tag, if it is one and not a part of the value
        self._may_follow = {
            end: (self._key, *self._closers), END_OF_FUNCTION: (END_OF_CALL,), END_OF_CALL: (CALL,)
        }  # fmt: skip
        self._held = ""  # not yet understood
        self._raw = ""  # understood as the beginning of a call, which may still prove to be none
        self._is_last = False
        # a function of the class: a bound method would make us hold ourselves
        self._step: Callable[[CallScanner], bool] = CallScanner._outside
        self._name = ""
        self._json = ObjectEnd()
        self._n_failed = 0

    def push(self, text: str) -> list[Found]:
        """Return the text and the parts of calls that text completes."""
        self._held += text
        while self._step(self):
            pass
        return self._call.taken()

    def flush(self, is_cut: bool = False) -> list[Found]:
        """Return what was held back; call it at the end of the stream.

        is_cut: the answer has no end of its own, so a call that is open stays without one.
        """
        if is_cut:
            self._cut()
        self._is_last = True
        return self.push("")

    def _cut(self) -> None:
        """End a call whose name is known without an end; drop what may be the beginning of one."""
        if self._call.arguments is None and self._step is CallScanner._whole_json:
            found = _NAME_FIRST.match(self._held)
            self._name = found[1] if found else ""
        if self._call.arguments is None and self._step in _AFTER_NAME and self._name:
            self._raw = ""
            self._call.open(self._name)
        if self._call.arguments is not None:
            self._call.end(is_whole=False)
        elif self._step is CallScanner._outside:
            if self._call.raws:  # after a call, what begins a tag is no text
                self._held = before_open(self._held, (CALL, FUNCTION))
            return
        self._raw, self._held, self._step = "", "", CallScanner._outside

    # Each step returns whether the next one can go on with what is held.

    def _outside(self) -> bool:
        start = _first(self._held, (CALL, FUNCTION))
        if start is not None:
            text = self._held[:start].rstrip()
            self._raw = self._held[len(text) : start]
            self._call.text(text)
            self._held, self._step = self._held[start:], CallScanner._header
            return True
        text = self._held if self._is_last else before_open(self._held, (CALL, FUNCTION)).rstrip()
        self._call.text(text)
        self._held = self._held[len(text) :]
        return False

    def _header(self) -> bool:
        held = self._held
        is_wrapped = held.startswith(CALL)
        at = _skip(held, len(CALL)) if is_wrapped else 0
        if held.startswith("{", at) and self._n_failed < _MAX_FAILED_JSON:
            self._take(at)
            self._json, self._step = ObjectEnd(), CallScanner._whole_json
            return True
        if not held.startswith(FUNCTION, at):
            end = _bare_name_end(held, at, self._key) if self._is_bare and at else 0
            if not end:
                return self._wait_or_text(end is None or FUNCTION.startswith(held[at:]))
            self._name, self._step = held[at:end], CallScanner._begin
            self._take(end)
            return True
        end = _name_end(held, at + len(FUNCTION))
        if end is None:
            return self._wait_or_text(True)
        name = held[at + len(FUNCTION) : end].strip(" \"'")
        may_call = name in self._tools or (is_wrapped and _NAME.fullmatch(name) is not None)
        if held[end] != ">" or not may_call:
            return self._wait_or_text(False)
        self._name, self._step = name, CallScanner._begin
        self._take(end + 1)
        return True

    def _begin(self) -> bool:
        """After <function=NAME>: what follows tells whether this is a call."""
        at = _skip(self._held, 0)
        rest = self._held[at:]
        if rest.startswith("{") and self._n_failed < _MAX_FAILED_JSON:
            self._take(at)
            self._step = CallScanner._arguments_json
            return True
        tags = (self._key, END_OF_FUNCTION, END_OF_CALL)
        if not rest.startswith(tags):
            return self._wait_or_text(any(tag.startswith(rest) for tag in tags))
        self._raw = ""
        self._call.open(self._name)
        self._step = CallScanner._between
        return True

    def _between(self) -> bool:
        """Between the parameters of a call."""
        arguments = self._call.plain()
        tags = (self._key, END_OF_FUNCTION, END_OF_CALL)
        start = _first(self._held, tags)
        if start is None:
            kept = self._held if self._is_last else before_open(self._held, tags)
            arguments.stray += kept
            self._held = self._held[len(kept) :]
            if self._is_last:
                self._call.close()
                self._step = CallScanner._after
            return self._is_last
        arguments.stray += self._held[:start]
        self._held = self._held[start:]
        if not self._held.startswith(self._key):
            self._call.close()
            self._step = CallScanner._after
            return True
        at = len(self._key)
        stop = _name_end(self._held, at)
        end = None if stop is None else _past(self._held, stop, self._after_key)
        if end is None and not self._is_last:
            return False
        if not end:
            arguments.stray += self._key
            self._held = self._held[at:]
            return True
        self._call.say(arguments.begin(self._held[at:stop].strip(" \"'")))
        self._held, self._step = self._held[end:], CallScanner._value
        return True

    def _value(self) -> bool:
        arguments = self._call.plain()
        end = self._value_end()
        if end is None:
            return False
        self._call.say(arguments.value(self._held[:end]) + arguments.end())
        self._held, self._step = self._held[end:], CallScanner._between
        return True

    def _value_end(self) -> int | None:
        """Return where the value ends; None: not in what is held, of which its text is taken."""
        held = self._held
        for found in self._any.finditer(held):
            ends = self._ends_value(found.group(), found.start(), found.end())
            if ends:
                return found.start()
            if ends is None:
                self._take_value(found.start())
                return None
        if self._is_last:
            return len(held)
        self._take_value(len(before_open(held, (self._key, *self._closers))))
        return None

    def _take_value(self, n: int) -> None:
        # what stands before a tag decides whether <parameter= is one
        n = max(0, n - 1)
        self._call.say(self._call.plain().value(self._held[:n]))
        self._held = self._held[n:]

    def _ends_value(self, tag: str, start: int, end: int) -> bool | None:
        """Return whether a tag ends the value that it is found in; None: not known yet."""
        held = self._held
        if tag == self._key:
            # the end tag of the parameter before was forgotten
            stop = _name_end(held, end)
            begin = None if stop is None else _past(held, stop, self._after_key)
            is_line = held[start - 1 : start] == "\n" or self._is_bare
            if begin is None or not is_line:
                return None if begin is None and not self._is_last else False
            name = held[end:stop].strip(" \"'")
            is_new = not self._call.plain().has(name)
            return bool(begin) and is_new and self._tools.knows(self._name, name)
        rest = held[_skip(held, end) :]
        if rest.startswith(self._may_follow[tag]):
            return True
        if self._is_last:
            return not rest
        return None if any(one.startswith(rest) for one in self._may_follow[tag]) else False

    def _after(self) -> bool:
        """After a call: its end tags and blank text belong to it."""
        self._held = self._held.lstrip()
        for tag in self._closers:
            if self._held.startswith(tag):
                self._held = self._held[len(tag) :]
                return True
        if any(tag.startswith(self._held) for tag in self._closers):
            return False  # what comes of it when the answer was cut is no text
        self._step = CallScanner._outside
        return True

    def _whole_json(self) -> bool:
        """Inside the object of the older form, if it is one."""
        if begin := _BEGIN.match(self._held):
            return self._begin_json(begin[1], self._held[begin.end() :])
        end = self._json.find(self._held)
        if end is None and not self._is_last:
            return False
        try:
            name, arguments = _named(self._held[:end])
            members(arguments)
        except ValueError:
            self._n_failed += 1
            return self._wait_or_text(False)
        return self._begin_json(name, arguments.strip() + "}" + self._held[end:])

    def _arguments_json(self) -> bool:
        """At an object that stands in place of the parameters, if it is one."""
        if _OBJECT.match(self._held):
            return self._begin_json(self._name, self._held)
        if not self._held[1:].strip() and not self._is_last:
            return False
        self._n_failed += 1
        return self._wait_or_text(False)

    def _begin_json(self, name: str, rest: str) -> bool:
        self._raw, self._name = "", name
        self._call.open(name, JSONArguments())
        self._held, self._step = rest, CallScanner._json_arguments
        return True

    def _json_arguments(self) -> bool:
        """Inside the object of a call's arguments."""
        arguments = self._call.arguments
        assert isinstance(arguments, JSONArguments)
        text, self._held = arguments.push(self._held)
        self._call.say(text)
        if not (arguments.is_over or self._is_last):
            return False
        self._call.end(arguments.is_whole)
        self._json, self._step = ObjectEnd(), CallScanner._rest_of_json
        return True

    def _rest_of_json(self) -> bool:
        """After the arguments: what else is in the object of the older form is left out."""
        self._held = self._held.lstrip()
        if self._held.startswith(","):
            end = self._json.find("{" + self._held)
            tag = _first(self._held, (END_OF_CALL,))
            ends = [at for at in (end and end - 1, tag) if at is not None]
            if not (ends or self._is_last):
                return False
            self._held = self._held[min(ends, default=0) :]
        elif not (self._held or self._is_last):
            return False
        self._held = self._held.removeprefix("}")
        self._step = CallScanner._after
        return True

    def _wait_or_text(self, may_wait: bool) -> bool:
        """Wait for more of what may be a call, or give its beginning up as text."""
        if may_wait and not self._is_last:
            return False
        # the tag that began it is text, and what follows it is read anew
        held = self._raw + self._held
        start = _skip(held, 0)
        tag = CALL if held.startswith(CALL, start) else FUNCTION
        end = start + len(tag)
        self._call.text(held[:end])
        self._raw, self._held, self._step = "", held[end:], CallScanner._outside
        return True

    def _take(self, n: int) -> None:
        self._raw += self._held[:n]
        self._held = self._held[n:]


# Steps at which the name of a call is known, but nothing was told of it.
_AFTER_NAME = (CallScanner._whole_json, CallScanner._begin, CallScanner._arguments_json)


def _named(text: str) -> tuple[str, str]:
    """Return the name of a call in the older form, and the JSON text of its arguments."""
    found = members(text)
    name = loads(found.get("name", "null"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError("the call has no name")
    arguments = found.get("arguments", found.get("parameters", "{}"))
    inner = loads(arguments)
    if inner is None:
        return name, "{}"
    return name, inner if isinstance(inner, str) else arguments


def _first(text: str, tags: tuple[str, ...]) -> int | None:
    return min((at for tag in tags if (at := text.find(tag)) >= 0), default=None)


def _name_end(text: str, start: int) -> int | None:
    """Return where a tag's name ends: at a character that no name has, or at the longest name."""
    for at in range(start, min(len(text), start + _MAX_NAME)):
        if text[at] in "<>\n":
            return at
    return start + _MAX_NAME if len(text) > start + _MAX_NAME else None


def _skip(text: str, at: int) -> int:
    """Return the position of the next character that is not blank."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _bare_name_end(text: str, at: int, key: str) -> int | None:
    """Return where a name ends that tags of a call follow; 0: it is none; None: not known yet."""
    found = _NAME.match(text, at)
    rest = text[_skip(text, found.end()) :] if found else ""
    if not found or found.end() - at > _MAX_NAME:
        return 0
    if rest.startswith((key, END_OF_CALL)):
        return found.end()
    return None if any(tag.startswith(rest) for tag in (key, END_OF_CALL)) else 0


def _past(text: str, at: int, tags: tuple[str, ...]) -> int | None:
    """Return the position after tags, between which is blank; 0: they are not here; None: wait."""
    for n, tag in enumerate(tags):
        at = _skip(text, at) if n else at
        if not text.startswith(tag, at):
            return None if tag.startswith(text[at:]) else 0
        at += len(tag)
    return at
