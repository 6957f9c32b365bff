"""The tools of a request: their names, and the JSON types of their parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .rawjson import dumps, loads

_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null",
          dict: "object", list: "array"}  # fmt: skip
# Parts of a schema that are looked at to find the types of one parameter; references may be cyclic.
_MAX_PARTS = 200
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
        return _TypeFinder(schema).types(schema["properties"][parameter])

    def texts(self, name: str, parameter: str) -> list[str]:
        """Return what a model may write for a parameter, some of whose values are strings.

        Nothing, if the schema does not name each value. `json_of` makes the values of the texts.
        """
        types = self.types(name, parameter)
        if types is None or "string" not in types:
            return []
        schema = self._parameters[name]
        values = _ValueFinder(schema).values(schema["properties"][parameter])
        fitting = [value for value in values or () if _fits(value, types)]
        return list(dict.fromkeys(_written(value, types) for value in fitting))


class _TypeFinder:
    """Finds the types that a part of a schema allows."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._n_left = _MAX_PARTS

    def types(self, schema: object) -> Types | None:
        self._n_left -= 1
        if not isinstance(schema, Mapping) or self._n_left < 0:
            return None
        ref, names = schema.get("$ref"), schema.get("type")
        if isinstance(ref, str):
            return self.types(self._referred(ref))
        if isinstance(names, str):
            return frozenset({names})
        if _list(names):
            return frozenset(str(name) for name in _list(names))
        if "const" in schema:
            return frozenset({_type_name(schema["const"])})
        if values := _list(schema.get("enum")):
            return frozenset(_type_name(value) for value in values)
        for word in ("anyOf", "oneOf"):
            if choices := _list(schema.get(word)):
                return self._any(choices)
        found = (self.types(part) for part in _list(schema.get("allOf")))
        return next((types for types in found if types is not None), None)

    def _any(self, choices: Sequence[object]) -> Types | None:
        found: set[str] = set()
        for choice in choices:
            types = self.types(choice)
            if types is None:
                return None
            found |= types
        return frozenset(found)

    def _referred(self, ref: str) -> object:
        found: object = self._root
        for step in ref.removeprefix("#").strip("/").split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        return found


class _ValueFinder(_TypeFinder):
    """Finds the values that a part of a schema allows, if it names them all."""

    def values(self, schema: object) -> list[Any] | None:
        self._n_left -= 1
        if not isinstance(schema, Mapping) or self._n_left < 0:
            return None
        if isinstance(ref := schema.get("$ref"), str):
            return self.values(self._referred(ref))
        if "const" in schema:
            return [schema["const"]]
        if named := _list(schema.get("enum")):
            return list(named)
        if schema.get("type") in ("null", "boolean"):
            return [None] if schema["type"] == "null" else [True, False]
        found: list[Any] = []
        for choice in _list(schema.get("anyOf")) or _list(schema.get("oneOf")):
            values = self.values(choice)
            if values is None:
                return None
            found += values
        return found or None


def _written(value: object, types: Types) -> str:
    """Return the text of a value; a string is in quotes where it would be taken for another."""
    if isinstance(value, str) and (types == STRING or json_of(value, types) == dumps(value)):
        return value
    return dumps(value)


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


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
