"""The tools of a request: the JSON types of their parameters, and the grammars of their calls.

Grammars are in llguidance's dialect of Lark.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .forms import QUOTE, TAG, Form, TextCalls
from .rawjson import dumps, loads

_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null",
          dict: "object", list: "array"}  # fmt: skip
# Parts of a schema that are looked at to find the types of one parameter; references may be cyclic.
_MAX_PARTS = 200
# Python's own notation of values is read too, but its parser is slow.
_MAX_PYTHON_CHARS = 16 * 1024

Types = frozenset[str]
STRING: Types = frozenset({"string"})
_ARRAY: Types = frozenset({"array"})
_OBJECT: Types = frozenset({"object"})
_SCALARS: Types = frozenset({"integer", "number", "boolean", "null"})


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

    def resolved(self, schema: object) -> object:
        """Return the part of a schema that another one refers to, or that one."""
        for _ in range(_MAX_PARTS):
            if not isinstance(schema, Mapping) or not isinstance(ref := schema.get("$ref"), str):
                break
            schema = self._referred(ref)
        return schema

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
_ANSWER = "@answer"
# How deep rules of Gemma's objects follow a schema; values below may be any.
_MAX_DEPTH = 6
# Gemma's objects, of any values.
_ANY_VALUE = """\
value: string | object | "[" (value ("," value)*)? "]" | scalar
object: "{" (pair ("," pair)*)? "}"
pair: /[^:<>{}\\[\\],"\\s]+/ ":" value
scalar: %json {"type": ["number", "boolean", "null"]}"""


class CallGrammar:
    """The grammar of answers with the calls that a model may make.

    tools: in OpenAI's form. form: of answers. parallel: whether there may be several calls.
    is_token: whether a text is one control token or tag of the vocabulary. inputs: function's name
    -> Lark grammar of its parameters' texts; a call with JSON follows none. is_fresh: the answer
    may begin with reasoning. is_thinking: it begins inside reasoning.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]],
        form: Form,
        parallel: bool,
        is_token: Callable[[str], bool],
        inputs: Mapping[str, str] | None = None,
        is_fresh: bool = False,
        is_thinking: bool = False,
    ) -> None:
        self._form, self._headers = form, form.headers
        self._inputs = {} if form.text is None or inputs is None else inputs
        self._functions = [tool["function"] for tool in tools]
        self._tools = Tools(tools)
        self._parallel, self._is_token = parallel, is_token
        self._is_fresh, self._is_thinking = is_fresh, is_thinking
        self._endings: dict[str, str] = {}

    def after_tag(self) -> str:
        """Return the grammar of what follows the tag that begins a call."""
        return self._grammar("calls")

    def whole(self, other: Mapping[str, Any] | None = None) -> str:
        """Return the grammar of an answer that is calls, or JSON of the schema `other`."""
        begin = f"{self._text(self._form.call)} calls"
        if other is None:
            return self._grammar(self._begun(begin))
        options = other.get("x-guidance")
        options = {**(options if isinstance(options, Mapping) else {}), **_STRICT}
        schema = dumps({**other, "x-guidance": options})
        return self._grammar(self._begun(begin, "other"), f"other: %json {schema}")

    def messages(self) -> str:
        """Return the grammar of an answer of messages: calls, if there are tools, or text."""
        return self._grammar(self._begun("calls" if self._functions else "", "any?"))

    def framed(self) -> str:
        """Return the grammar of reasoning around another grammar, `_ANSWER`; "" if there is none.

        A reader of the grammar finds reasoning that a prompt has begun; see `GrammarConstraint`.
        """
        if not (self._is_fresh or (self._is_thinking and self._headers)):
            return ""
        return self._grammar(self._begun("", _ANSWER))

    def _begun(self, calls: str, other: str = "") -> str:
        """Return what an answer is: calls or other text, after the reasoning that may come."""
        if self._headers is None:
            either = " | ".join(f"({one})" for one in (calls, other) if one)
            return f"{'thought? ' if self._is_fresh else ''}({either})"
        again = self._text(self._headers.end_of_message + self._headers.start)
        final = f"{self._header((self._headers.final,))} {other}"
        either = " | ".join([calls] * bool(calls) + [final] * bool(other))
        if self._is_fresh or self._is_thinking:
            begun = f"any? {again} " if self._is_thinking else ""
            return f"{begun}thought* ({either})"
        # the prompt has begun the final message
        return " | ".join([other] * bool(other) + [f"{again} thought* {calls}"] * bool(calls))

    def _thought(self) -> list[str]:
        """Return the rules of reasoning that an answer begins with."""
        form, headers = self._form, self._headers
        if headers is None:
            head, gap = self._text(form.think.strip()), r"/\n{1,2}/?"
            end = self._until(form.end_of_think)
            return [f"thought: {gap} {head} {end} {gap}"]
        rest = self._until(headers.end_of_message) + " " + self._text(headers.start)
        heads = (self._text(one + headers.end) for one in headers.thoughts)
        return [
            f"thought: ({' | '.join(heads)}) {rest}",
            f"kind: {' | '.join(map(self._text, headers.kinds))}",
        ]

    def _header(self, begins: Iterable[str]) -> str:
        """Return the Lark for a header with one of these beginnings."""
        assert self._headers is not None
        return f"({' | '.join(map(self._text, begins))}) kind? {self._text(self._headers.end)}"

    def _text(self, text: str) -> str:
        """Return the Lark for a text, some of which may be tokens of their own."""
        parts = TAG.split(text), TAG.findall(text)
        found: list[str] = []
        for before, tag in zip(parts[0], [*parts[1], ""]):
            for one in (before, tag):
                if one and self._is_token(one) and one is tag:
                    found.append(one)
                elif one and found and found[-1].endswith('"'):
                    found[-1] = dumps(loads(found[-1]) + one)
                elif one:
                    found.append(dumps(one))
        return " ".join(found)

    def _until(self, end: str) -> str:
        """Return the Lark for any text and then its end."""
        found = self._text(end)
        if not found.startswith('"'):
            return f"any? {found}"
        return self._endings.setdefault(end, f"until_{len(self._endings)}")

    @property
    def passed_over(self) -> set[str]:
        """Return the keywords of the functions' schemas that these grammars leave out."""
        found: set[str] = set()
        for function in self._functions if self._form.text or self._form.is_dict else ():
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
        form = self._form
        gap = form.text.between if form.text else "" if form.is_dict else "\n"
        many = self._parallel and self._headers is None
        again = f"({self._text(gap + form.call)} call)*" if many else ""
        rules = [f"start: {start}", "any: /(.|\\n)+/", *self._thought()]
        if names:
            end = self._text(form.end_of_call)
            rules += [f"calls: call {again}", f"call: ({' | '.join(names)}) {end}"]
        if form.is_dict:
            rules += [f"string: {self._text(QUOTE)} {self._until(QUOTE)}", _ANY_VALUE]
        if form.text:
            rules.append(r"name: /[^<>\n]{1,128}/")
        for name, function in zip(names, self._functions):
            rules += self._function(name, function)
        ends = [f"{name}[suffix={dumps(end)}]: /(.|\\n)*/" for end, name in self._endings.items()]
        text = "\n".join([*rules, *ends, *more, ""])
        names = [function["name"] for function in self._functions]
        parts = [
            (_part(n), self._inputs[one]) for n, one in enumerate(names) if one in self._inputs
        ]
        if not parts:
            return text
        # each has names of its own
        inner = [{"name": name, "lark_grammar": grammar} for name, grammar in parts]
        return dumps({"grammars": [{"name": "calls", "lark_grammar": text}, *inner]})

    def _function(self, rule: str, function: Mapping[str, Any]) -> list[str]:
        form = self._form
        if form.text:
            return self._plain(rule, function, form.text)
        if form.is_dict:
            begin = dumps(f"call:{function['name']}")
            parameters = _parameters(function) or {"type": "object"}
            rules: list[str] = []
            value = self._dict(f"{rule}_object", parameters, parameters, rules, 0)
            return [f"{rule}: {begin} {value}", *rules]
        return self._json(rule, function)

    def _json(self, rule: str, function: Mapping[str, Any]) -> list[str]:
        parameters = _parameters(function) or {"type": "object"}
        name = function["name"]
        if self._headers:
            head = self._header(one.format(name=name) for one in self._headers.calls)
            return [
                f"{rule}: {head} {rule}_json",
                f"{rule}_json: %json {dumps({**parameters, **_LOOSE})}",
            ]
        schema = {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": parameters},
            "required": ["name", "arguments"],
            "additionalProperties": False,
            **_definitions(parameters),
            **_LOOSE,
        }
        return [f'{rule}: "\\n" {rule}_json "\\n"', f"{rule}_json: %json {dumps(schema)}"]

    def _plain(self, rule: str, function: Mapping[str, Any], form: TextCalls) -> list[str]:
        """Return the rules of a call whose arguments are plain text between tags."""
        parameters = _parameters(function)
        properties = parameters.get("properties")
        begin, end = form.function.format(name=function["name"]), form.end_of_function
        begin, end = self._text(begin), self._text(end)
        if not isinstance(properties, Mapping) or not properties:
            is_open = properties is None and parameters.get("additionalProperties") is not False
            before, after = map(self._text, form.key.split("{key}"))
            any_ = f"({before} name {after} {self._until(form.end_of_value)})*" if is_open else ""
            return [f"{rule}: {begin} {any_} {end}"]
        required = _list(parameters.get("required"))
        found, uses = [], []
        for n, (key, schema) in enumerate(properties.items()):
            one = f"{rule}_{n}"
            uses.append(one if key in required else f"{one}?")
            found.append(f"{one}: {self._text(form.key.format(key=key))} {one}_value")
            end_of_value = form.end_of_value
            found += self._value(
                f"{one}_value", function["name"], key, schema, parameters, end_of_value
            )
        return [f"{rule}: {begin} {' '.join(uses)} {end}", *found]

    def _value(
        self, rule: str, name: str, key: str, schema: object, root: Mapping[str, Any], ending: str
    ) -> list[str]:
        types = self._tools.types(name, key)
        end = self._text(ending)
        if name in self._inputs:
            n = next(n for n, one in enumerate(self._functions) if one["name"] == name)
            return [f"{rule}: @{_part(n)} {end}"]
        if texts := self._tools.texts(name, key):
            return [f"{rule}: ({' | '.join(map(dumps, texts))}) {end}"]
        if types is None or "string" in types or not isinstance(schema, Mapping):
            return [f"{rule}: {self._until(ending)}"]
        whole = {**schema, **_definitions(root), **_LOOSE}
        return [f"{rule}: {rule}_json {end}", f"{rule}_json: %json {dumps(whole)}"]

    def _dict(
        self, rule: str, schema: object, root: Mapping[str, Any], rules: list[str], depth: int
    ) -> str:
        """Return the Lark for a value in Gemma's form, and add its rules."""
        finder = _ValueFinder(root)
        schema = finder.resolved(schema)
        types = finder.types(schema)
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return "value"
        values = _ValueFinder(root).values(schema)
        if values is not None and not any(isinstance(one, dict | list) for one in values):
            texts = (f"{QUOTE}{v}{QUOTE}" if isinstance(v, str) else dumps(v) for v in values)
            return f"({' | '.join(map(self._text, texts))})"
        if types == STRING:
            return "string"
        if types and types <= _SCALARS:
            rules.append(f"{rule}: %json {dumps({**schema, **_definitions(root), **_LOOSE})}")
            return rule
        if types == _ARRAY and isinstance(schema.get("items"), Mapping):
            one = self._dict(f"{rule}_item", schema["items"], root, rules, depth + 1)
            rules.append(f'{rule}: "[" ({one} ("," {one})*)? "]"')
            return rule
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            return "object" if types == _OBJECT else "value"
        required = _list(schema.get("required"))
        # templates write keys in this order
        pairs: list[tuple[str, bool]] = []
        for n, key in enumerate(sorted(properties, key=str.lower)):
            value = self._dict(f"{rule}_{n}", properties[key], root, rules, depth + 1)
            pairs.append((f"{dumps(key + ':')} {value}", key in required))
        # after each pair, the commas and pairs that may follow
        rest, begins, is_needed = "", list[str](), any(needed for _, needed in pairs)
        for n, (pair, needed) in reversed([*enumerate(pairs)]):
            tail = f"{rule}_{n}_tail"
            begin = f"{pair} {rest}"
            begins = [begin] if needed else [begin, *begins]
            rules.append(f'{tail}: "," {begin}' + (f" | {rest}" if not needed and rest else ""))
            if not needed and not rest:
                rules[-1] = f'{tail}: ("," {begin})?'
            rest = tail
        rules.append(f'{rule}: "{{" ({" | ".join(begins)}){"?" * (not is_needed)} "}}"')
        return rule


def _part(n: int) -> str:
    return f"input_{n}"


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    found = function.get("parameters")
    return found if isinstance(found, Mapping) else {}


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}
