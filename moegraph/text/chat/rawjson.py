"""JSON text as it was written: key order, numbers and spaces; also that of earlier calls."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from ..recent import Recent

_MARK = re.compile(r'["\\{}\[\]<]')
_SPACE = re.compile(r"[ \t\n\r]*")


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def loads(text: str) -> Any:
    """Return the value of JSON text."""
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("the JSON is too deep") from error


def load_object(text: str) -> dict[str, Any]:
    """Return the JSON object of a text."""
    found = loads(text)
    if not isinstance(found, dict):
        raise ValueError("the JSON is not an object")
    return found


def dumps(value: Any) -> str:
    """Return a value as JSON text, as chat templates and models write it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def members(text: str) -> dict[str, str]:
    """Return the text of each value of a JSON object; of equal keys, the last."""
    load_object(text)
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
    """Finds where a JSON object ends in a text that arrives in pieces."""

    def __init__(self) -> None:
        self._n = self._depth = 0
        self._in_string = False
        self._escaped_at = -1

    def find(self, text: str) -> int | None:
        """Return the position after the object that text begins with; None: it is not whole yet.

        text: at each call, what it was before and more.
        """
        n = self._n
        end = self.push(text[n:])
        return None if end is None else n + end

    def push(self, text: str) -> int | None:
        """Return the position after the object in the next piece; None: it is not whole yet.

        A tag ends it too: no JSON has one outside of strings.
        """
        for found in _MARK.finditer(text):
            c, at = found.group(), self._n + found.start()
            if self._in_string:
                if c == "\\" and at != self._escaped_at:
                    self._escaped_at = at + 1
                elif c == '"' and at != self._escaped_at:
                    self._in_string = False
            elif c == '"':
                self._in_string = True
            elif c == "<":
                return found.start()
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return found.end()
        self._n += len(text)
        return None


# Characters of all values that are remembered.
_MAX_REMEMBERED = 4 * 1024 * 1024

Raw = Mapping[str, str]
# In place of a parameter's name: the text of all arguments, of a call that was written as JSON.
WHOLE = ""


class CallMemory:
    """Remembers how values of calls were written; any thread may call it."""

    def __init__(self) -> None:
        self._known = Recent[bytes, Raw](_MAX_REMEMBERED)

    def keep(self, name: str, arguments: str, raw: Raw) -> None:
        """Remember a call; arguments: its JSON text. raw: how values that are no text were written.

        Text is shown as it is anyway. Of a call in JSON, raw has the text under the name `WHOLE`.
        """
        try:
            key = _key(name, loads(arguments))
        except ValueError:
            return
        n_chars = sum(len(one) + len(value) for one, value in raw.items())
        self._known.put(key, dict(raw), 64 + n_chars)

    def shown(self, name: str, arguments: str) -> dict[str, Any]:
        """Return arguments for a template that prints text as it is; arguments: their JSON text.

        A value that is not text becomes the text that the model wrote, if that is known, or else
        JSON as templates write it; true, false and null remain the template's to write.
        """
        values = load_object(arguments)
        raw = self._known.get(_key(name, values)) or {}
        return {
            name: value if isinstance(value, str) else raw.get(name, _shown(value))
            for name, value in values.items()
        }

    def written(self, name: str, arguments: str) -> str:
        """Return arguments for a template that prints their JSON text as it is.

        They are as the model wrote them, if that is known, or else as templates write JSON; text
        that is not JSON stays.
        """
        try:
            values = loads(arguments)
        except ValueError:
            return arguments
        raw = self._known.get(_key(name, values)) or {}
        return raw.get(WHOLE, dumps(values))


def _shown(value: object) -> object:
    return value if value is None or isinstance(value, bool) else dumps(value)


def _key(name: str, values: object) -> bytes:
    """Return what calls have in common whose arguments have the same values."""
    text = json.dumps([name, _with_integers(values)], sort_keys=True)
    return hashlib.sha256(text.encode()).digest()


def _with_integers(value: object) -> object:
    """Return a value with whole numbers as integers: some languages know no others."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _with_integers(one) for key, one in value.items()}
    return [_with_integers(one) for one in value] if isinstance(value, list) else value
