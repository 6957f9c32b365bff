"""The tools of a request: the JSON types of their parameters, and the grammars of their calls.

Grammars are in llguidance's dialect of Lark.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .rawjson import dumps, loads

CALL, END_OF_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_OF_FUNCTION = "<function=", "</function>"
PARAMETER, END_OF_PARAMETER = "<parameter=", "</parameter>"

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
                found = [self.types(choice) for choice in choices]
                known = [types for types in found if types is not None]
                return None if len(known) < len(found) else frozenset[str]().union(*known)
        parts = (self.types(part) for part in _list(schema.get("allOf")))
        return next((types for types in parts if types is not None), None)

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


# Keywords that llguidance does not know are passed over in tools, whose schemas are many people's.
_STRICT = {"whitespace_pattern": r"[ ]?|\n{1,2}[ \t]{0,20}"}
_LOOSE = {"x-guidance": {"lenient": True, **_STRICT}}
# Keywords that grammars of calls cannot enforce: on strings, which are plain text between tags, and
# on all parameters together.
_OF_TEXTS = frozenset(("pattern", "format", "minLength", "maxLength"))
_TOGETHER = frozenset(
    "allOf anyOf oneOf not if dependentRequired dependentSchemas dependencies patternProperties "
    "propertyNames minProperties maxProperties".split()
)
_END_OF_VALUE = f"\n{END_OF_PARAMETER}\n"


class CallGrammar:
    """The grammar of the calls that a model may make.

    tools: in OpenAI's form. is_json: calls have the older form, with JSON. parallel: whether there
    may be several. is_token: whether a text is one control token or tag of the vocabulary. inputs:
    function's name -> Lark grammar of its parameters' texts; a call with JSON follows none.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]],
        is_json: bool,
        parallel: bool,
        is_token: Callable[[str], bool],
        inputs: Mapping[str, str] | None = None,
    ) -> None:
        self._inputs = {} if is_json or inputs is None else inputs
        self._functions = [tool["function"] for tool in tools]
        self._tools = Tools(tools)
        self._is_json, self._parallel, self._is_token = is_json, parallel, is_token

    def after_tag(self) -> str:
        """Return the grammar of what follows ``<tool_call>``."""
        return self._grammar("calls")

    def whole(self, other: Mapping[str, Any] | None = None) -> str:
        """Return the grammar of an answer that is calls, or JSON of the schema `other`."""
        begin = f"{self._tag(CALL)} calls"
        if other is None:
            return self._grammar(begin)
        options = other.get("x-guidance")
        options = {**(options if isinstance(options, Mapping) else {}), **_STRICT}
        schema = dumps({**other, "x-guidance": options})
        return self._grammar(f"({begin}) | other", f"other: %json {schema}")

    @property
    def passed_over(self) -> set[str]:
        """Return the keywords of the functions' schemas that these grammars leave out."""
        found: set[str] = set()
        for function in () if self._is_json else self._functions:
            parameters = _parameters(function)
            found |= _TOGETHER & parameters.keys()
            properties = parameters.get("properties")
            for key, schema in properties.items() if isinstance(properties, Mapping) else ():
                types = self._tools.types(function["name"], key) or ("string",)
                if isinstance(schema, Mapping) and "string" in types:
                    found |= _OF_TEXTS & schema.keys()
        return found

    def _grammar(self, start: str, *more: str) -> str:
        names = [f"function_{n}" for n in range(len(self._functions))]
        again = f'("\\n" {self._tag(CALL)} call)*' if self._parallel else ""
        rules = [
            f"start: {start}",
            f"calls: call {again}",
            f"call: ({' | '.join(names)}) {self._tag(END_OF_CALL)}",
            f"text[suffix={dumps(_END_OF_VALUE)}]: /(.|\\n)*/",
            r"name: /[^<>\n]{1,128}/",
        ]
        for name, function in zip(names, self._functions):
            rules += self._json(name, function) if self._is_json else self._xml(name, function)
        text = "\n".join([*rules, *more, ""])
        names = [function["name"] for function in self._functions]
        parts = [
            (_part(n), self._inputs[one]) for n, one in enumerate(names) if one in self._inputs
        ]
        if not parts:
            return text
        # each has names of its own
        inner = [{"name": name, "lark_grammar": grammar} for name, grammar in parts]
        return dumps({"grammars": [{"name": "calls", "lark_grammar": text}, *inner]})

    def _tag(self, tag: str) -> str:
        return tag if self._is_token(tag) else dumps(tag)

    def _json(self, rule: str, function: Mapping[str, Any]) -> list[str]:
        parameters = _parameters(function) or {"type": "object"}
        schema = {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": parameters},
            "required": ["name", "arguments"],
            "additionalProperties": False,
            **_definitions(parameters),
            **_LOOSE,
        }
        return [f'{rule}: "\\n" {rule}_json "\\n"', f"{rule}_json: %json {dumps(schema)}"]

    def _xml(self, rule: str, function: Mapping[str, Any]) -> list[str]:
        parameters = _parameters(function)
        properties = parameters.get("properties")
        begin, end = f"\n{FUNCTION}{function['name']}>\n", f"{END_OF_FUNCTION}\n"
        if not isinstance(properties, Mapping) or not properties:
            is_open = properties is None and parameters.get("additionalProperties") is not False
            any_ = f'("{PARAMETER}" name ">\\n" text)*' if is_open else ""
            return [f"{rule}: {dumps(begin)} {any_} {dumps(end)}"]
        required = parameters.get("required")
        required = required if isinstance(required, list | tuple) else ()
        found, uses = [], []
        for n, (key, schema) in enumerate(properties.items()):
            one = f"{rule}_{n}"
            uses.append(one if key in required else f"{one}?")
            found.append(f"{one}: {dumps(f'{PARAMETER}{key}>' + chr(10))} {one}_value")
            found += self._value(f"{one}_value", function["name"], key, schema, parameters)
        return [f"{rule}: {dumps(begin)} {' '.join(uses)} {dumps(end)}", *found]

    def _value(
        self, rule: str, name: str, key: str, schema: object, root: Mapping[str, Any]
    ) -> list[str]:
        types = self._tools.types(name, key)
        end = dumps(_END_OF_VALUE)
        if name in self._inputs:
            n = next(n for n, one in enumerate(self._functions) if one["name"] == name)
            return [f"{rule}: @{_part(n)} {end}"]
        if texts := self._tools.texts(name, key):
            return [f"{rule}: ({' | '.join(map(dumps, texts))}) {end}"]
        if types is None or "string" in types or not isinstance(schema, Mapping):
            return [f"{rule}: text"]
        whole = {**schema, **_definitions(root), **_LOOSE}
        return [f"{rule}: {rule}_json {end}", f"{rule}_json: %json {dumps(whole)}"]


def _part(n: int) -> str:
    return f"input_{n}"


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    found = function.get("parameters")
    return found if isinstance(found, Mapping) else {}


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}
