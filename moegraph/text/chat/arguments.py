"""The arguments of a tool call, as JSON that is written while the model writes them."""

from __future__ import annotations

import re

from .memory import WHOLE
from .rawjson import dumps, loads
from .toolschema import STRING, Tools, Types, json_of

# What matters of JSON outside and inside strings; no JSON has a tag outside of one.
_MARK = re.compile(r'\\.|["{}\[\],:<]', re.DOTALL)


class Arguments:
    """Turns parameters that arrive as plain text into the text of one JSON object.

    A value that can only be a string is passed on as it comes; others when they are whole.

    stray: text between the parameters, which belongs to none. raw: values that may be other than
    strings, as the model wrote them.
    """

    def __init__(self, name: str, tools: Tools) -> None:
        self.stray = ""
        self.raw: dict[str, str] = {}
        self._name, self._tools = name, tools
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
            # the tags stand on lines of their own
            text, self._at_start = text.removeprefix("\n"), False
        if not self._is_text:
            self._held = text
            return ""
        self._held = "\n" if text.endswith("\n") else ""
        return self._escaped(text.removesuffix("\n"))

    def end(self) -> str:
        """Return the JSON text that ends the value."""
        held, self._held = self._held, ""
        if self._key is None:
            return ""
        if self._is_text:
            return '"'
        self.raw[self._key] = held.removesuffix("\n")
        return json_of(self.raw[self._key], self._types)

    def close(self) -> str:
        """Return the JSON text that ends the object."""
        return "}" if self._names else "{}"

    def _escaped(self, text: str) -> str:
        return "" if self._key is None else dumps(text)[1:-1]


class JSONArguments:
    """Passes on arguments that the model writes as a JSON object, while they come.

    Held back are keys until they are whole, and strings where the schema wants another type, to
    become values of that. is_over: the object has ended, or a tag has ended it.
    """

    def __init__(self, name: str, tools: Tools) -> None:
        self.is_over = False
        self._name, self._tools = name, tools
        self._written: list[str] = []
        self._depth = 0
        self._in_string = self._is_key = False
        self._types: Types | None = None
        self._held = ""  # begins with a string that is held back, or with a backslash
        self._is_held = False
        self._n_seen = 0

    @property
    def raw(self) -> dict[str, str]:
        """The text as the model wrote it, for `CallMemory.keep`."""
        return {WHOLE: "".join(self._written)}

    @property
    def is_whole(self) -> bool:
        """Whether the text is that of a JSON object."""
        try:
            return isinstance(loads("".join(self._written)), dict)
        except ValueError:
            return False

    def push(self, text: str) -> tuple[str, str]:
        """Return the JSON text of the next piece, and what stands after the object."""
        text, n_held = self._held + text, len(self._held)
        told, start, end = "", 0, len(text)
        string = 0 if self._is_held else None  # where one begins that is held back
        for found in _MARK.finditer(text, self._n_seen):
            mark = found.group()
            if self._in_string:
                if mark == '"':
                    self._in_string = False
                    if string is not None:
                        told += text[start:string] + self._string(text[string : found.end()])
                        start, string = found.end(), None
            elif mark == '"':
                self._in_string = True
                string = found.start() if self._depth == 1 and self._holds() else None
            elif self._takes_end(mark):
                end = found.start() if mark == "<" else found.end()
                break
        self._written.append(text[n_held:end])
        rest = text[end:]
        if self.is_over:
            self._held = ""
            return told + text[start:end], rest
        until = string if string is not None else end
        if string is None:
            until -= _ends_open(text[start:])
        self._held, self._is_held = text[until:], string is not None
        self._n_seen = len(self._held) - _ends_open(self._held)
        return told + text[start:until], rest

    def flush(self) -> str:
        """Return what is held back; call it if no more comes."""
        return self._held

    def _takes_end(self, mark: str) -> bool:
        """Take a mark outside of strings; return whether the object ends with it."""
        if mark in "{[":
            self._depth += 1
            self._is_key = self._depth == 1 or self._is_key
        elif mark in "}]":
            self._depth -= 1
        elif self._depth == 1 and mark in ",:":
            self._is_key = mark == ","
        self.is_over = mark == "<" or self._depth == 0
        return self.is_over

    def _holds(self) -> bool:
        return self._is_key or (self._types is not None and "string" not in self._types)

    def _string(self, text: str) -> str:
        """Return the JSON text in place of a string that was held back."""
        try:
            value = loads(text)
        except ValueError:
            return text
        if self._is_key:
            self._types = self._tools.types(self._name, value)
            return text
        return json_of(value, self._types)


def _ends_open(text: str) -> int:
    """Return 1 if a text ends with a backslash that escapes what comes next, or else 0."""
    return (len(text) - len(text.rstrip("\\"))) % 2
