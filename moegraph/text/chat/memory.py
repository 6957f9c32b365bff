"""How a model wrote the arguments of its calls, so that they can be shown to it as it wrote them.

Clients send calls back as JSON, some with other numbers and blanks than they were given. A prompt
that shows a call otherwise than the model wrote it has other tokens, and what the engine holds of
that turn would be computed anew.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from .rawjson import dumps, loads

# Characters of all values that are remembered.
_MAX_CHARS = 4 * 1024 * 1024

Raw = Mapping[str, str]
# In place of a parameter's name: the text of all arguments, of a call that was written as JSON.
WHOLE = ""


class CallMemory:
    """Remembers how values of calls were written; any thread may call it."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Raw] = OrderedDict()
        self._n_chars = 0
        self._lock = threading.Lock()

    def keep(self, name: str, arguments: str, raw: Raw) -> None:
        """Remember a call; arguments: its JSON text. raw: how values that are no text were written.

        Text is shown as it is anyway. Of a call in JSON, raw has the text under the name `WHOLE`.
        """
        try:
            key = _key(name, loads(arguments))
        except ValueError:
            return
        with self._lock:
            self._forget(key)
            self._known[key] = dict(raw)
            self._n_chars += _size(raw)
            while self._n_chars > _MAX_CHARS:
                self._forget(next(iter(self._known)))

    def _forget(self, key: bytes) -> None:
        if (raw := self._known.pop(key, None)) is not None:
            self._n_chars -= _size(raw)

    def shown(self, name: str, arguments: str) -> dict[str, Any]:
        """Return arguments for a template that prints text as it is; arguments: their JSON text.

        A value that is not text becomes the text that the model wrote, if that is known, or else
        JSON as templates write it; true, false and null remain the template's to write.

        Raises:
            ValueError: they are not a JSON object.
        """
        values = loads(arguments)
        if not isinstance(values, dict):
            raise ValueError("the arguments are not an object")
        raw = self._raw(name, values)
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
        return self._raw(name, values).get(WHOLE, dumps(values))

    def _raw(self, name: str, values: object) -> Raw:
        with self._lock:
            key = _key(name, values)
            raw = self._known.get(key, {})
            if raw:
                self._known.move_to_end(key)
            return raw


def _shown(value: object) -> object:
    return value if value is None or isinstance(value, bool) else dumps(value)


def _key(name: str, values: object) -> bytes:
    """Return what calls have in common whose arguments have the same values."""
    text = json.dumps([name, _plain(values)], sort_keys=True)
    return hashlib.sha256(text.encode()).digest()


def _plain(value: object) -> object:
    """Return a value with whole numbers as integers: some languages know no others."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _size(raw: Raw) -> int:
    return 64 + sum(len(key) + len(value) for key, value in raw.items())
