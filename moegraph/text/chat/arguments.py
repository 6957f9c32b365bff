"""The arguments of a tool call, as JSON that is written while the model writes them."""

from __future__ import annotations

from .rawjson import dumps, loads, members
from .toolschema import STRING, Tools, Types, json_of


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
        self._is_whole = False
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

    def take(self, text: str) -> str:
        """Return the JSON text of arguments that the model wrote as JSON, types corrected."""
        given = members(text)
        found = {key: self._corrected(key, value) for key, value in given.items()}
        self._is_whole = True
        if found == given:
            return text
        return "{" + ", ".join(f"{dumps(key)}: {value}" for key, value in found.items()) + "}"

    def _corrected(self, key: str, text: str) -> str:
        types, value = self._tools.types(self._name, key), loads(text)
        is_wrong = isinstance(value, str) and types is not None and "string" not in types
        return json_of(value, types) if is_wrong else text

    def close(self) -> str:
        """Return the JSON text that ends the object."""
        return "" if self._is_whole else "}" if self._names else "{}"

    def _escaped(self, text: str) -> str:
        return "" if self._key is None else dumps(text)[1:-1]
