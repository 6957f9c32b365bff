"""Grammars of tool calls, in llguidance's dialect of Lark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .calls import CALL, END_OF_CALL, END_OF_FUNCTION, END_OF_PARAMETER, FUNCTION, PARAMETER
from .rawjson import dumps
from .toolschema import Tools

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
    """Return the name of the grammar of a function's input."""
    return f"input_{n}"


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    found = function.get("parameters")
    return found if isinstance(found, Mapping) else {}


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}
