"""JSON text as it was written: key order, numbers and spaces are kept."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

_MARK = re.compile(r'["\\{}\[\]]')
_SPACE = re.compile(r"[ \t\n\r]*")


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def loads(text: str) -> Any:
    """Return the value of JSON text.

    Raises:
        ValueError: it is not JSON, or too deep. NaN and Infinity are not JSON.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("the JSON is too deep") from error


def dumps(value: Any) -> str:
    """Return a value as JSON text, as chat templates and models write it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def members(text: str) -> dict[str, str]:
    """Return the text of each value of a JSON object; of equal keys, the last.

    Raises:
        ValueError: the text is not a JSON object, or too deep.
    """
    if not isinstance(loads(text), dict):
        raise ValueError("the JSON is not an object")
    found: dict[str, str] = {}
    at = _skip(text, _skip(text, 0) + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        start = _skip(text, _skip(text, at) + 1)
        _, end = _DECODER.raw_decode(text, start)
        found[key] = text[start:end]
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


class ObjectEnd:
    """Find where a JSON object ends in a text that arrives in pieces."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._in_string = False
        self._escaped_at = -1

    def find(self, text: str) -> int | None:
        """Return the position after the object that text begins with; None: it is not whole yet.

        text: at each call, what it was before and more.
        """
        for found in _MARK.finditer(text, self._at):
            c = found.group()
            if self._in_string:
                self._take_in_string(c, found.start())
            elif c == '"':
                self._in_string = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return found.end()
        self._at = len(text)
        return None

    def _take_in_string(self, c: str, at: int) -> None:
        if at == self._escaped_at:
            return
        if c == "\\":
            self._escaped_at = at + 1
        elif c == '"':
            self._in_string = False
