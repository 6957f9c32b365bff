"""The tools of a request: their names, and the JSON types of their parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .rawjson import dumps, loads

_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null",
          dict: "object", list: "array"}  # fmt: skip
_MAX_DEPTH = 16
# Python's own notation of values is read too, but its parser is slow.
_MAX_PYTHON_CHARS = 16 * 1024

Types = frozenset[str]
STRING: Types = frozenset({"string"})


class Tools:
    """The tools that a model may call, in OpenAI's form."""

    def __init__(self, tools: Iterable[Mapping[str, Any]] = ()) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
                parameters = function.get("parameters")
                self._parameters[name] = parameters if isinstance(parameters, Mapping) else {}

    def __bool__(self) -> bool:
        return bool(self._parameters)

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def knows(self, name: str, parameter: str) -> bool:
        """Return whether the schema of a tool names a parameter."""
        properties = self._parameters.get(name, {}).get("properties")
        return isinstance(properties, Mapping) and parameter in properties

    def types(self, name: str, parameter: str) -> Types | None:
        """Return the JSON types that a parameter of a tool may have; None: the schema is silent."""
        schema = self._parameters.get(name, {})
        if not self.knows(name, parameter):
            return None
        return _types(schema["properties"][parameter], schema, 0)


def _types(schema: object, root: Mapping[str, Any], depth: int) -> Types | None:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    ref = schema.get("$ref")
    if isinstance(ref, str):
        return _types(_referred(root, ref), root, depth + 1)
    names = schema.get("type")
    if isinstance(names, str):
        return frozenset({names})
    if isinstance(names, Sequence) and names:
        return frozenset(str(name) for name in names)
    if "const" in schema:
        return frozenset({_type_name(schema["const"])})
    values = schema.get("enum")
    if isinstance(values, Sequence) and not isinstance(values, str) and values:
        return frozenset(_type_name(value) for value in values)
    for word in ("anyOf", "oneOf"):
        choices = schema.get(word)
        if isinstance(choices, Sequence) and choices:
            found = [_types(choice, root, depth + 1) for choice in choices]
            return None if None in found else frozenset().union(*(f for f in found if f))
    for part in schema.get("allOf") or ():
        if (types := _types(part, root, depth + 1)) is not None:
            return types
    return None


def _referred(root: Mapping[str, Any], ref: str) -> object:
    found: object = root
    for step in ref.removeprefix("#").strip("/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _type_name(value: object) -> str:
    return _NAMES.get(type(value), "string")


def json_of(text: str, types: Types | None) -> str:
    """Return the JSON text of a value that a model wrote as plain text.

    JSON that the types allow is returned as it was written. Python's True, None and quotes are
    understood. Other text becomes a string, whatever the types say, so that nothing is lost.
    """
    bare = text.strip()
    if types == STRING:
        return dumps(text)
    try:
        value = loads(bare)
    except ValueError:
        return _python_json(bare, types) or dumps(text)
    if types is None:
        return dumps(text) if isinstance(value, str) else bare
    if _fits(value, types):
        return bare
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return str(int(value))
    return dumps(text) if "string" in types or isinstance(value, str) else bare


def _python_json(text: str, types: Types | None) -> str | None:
    words = {"true": "true", "false": "false", "none": "null", "null": "null"}
    if (word := words.get(text.lower())) is not None:
        wanted = "null" if word == "null" else "boolean"
        return word if types is not None and wanted in types else None
    if text[:1] not in ("{", "[", "(") or len(text) > _MAX_PYTHON_CHARS:
        return None
    try:
        value = ast.literal_eval(text)
        if isinstance(value, tuple):
            value = list(value)
        return dumps(value) if types is None or _fits(value, types) else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _fits(value: object, types: Types) -> bool:
    name = _type_name(value)
    return name in types or (name == "integer" and "number" in types)
