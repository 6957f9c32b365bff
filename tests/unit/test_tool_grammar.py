"""Grammars of tool calls: what is drawn from them is a call that the parser understands."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.grammar_case import JSON, XML, Case
from helpers.tag_tokenizer import TAGS

from moegraph.engine.chat import Format
from moegraph.errors import RequestError

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "n": {"type": "integer"},
                "unit": {"type": "string", "enum": ["m", "km"]},
                "more": {"$ref": "#/$defs/more"},
            },
            "required": ["text", "n"],
            "$defs": {"more": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}


def call(name: str, **values: str) -> str:
    given = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


NAMED: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "mixed": ({"enum": ["x", 3, None, "3", "", "true"]}, ["x", 3, None, "3", "", "true"]),
    "maybe": (
        {"anyOf": [{"type": "string", "enum": ["m", "k m"]}, {"type": "null"}]},
        ["k m", None],
    ),
    "const": ({"const": "only"}, ["only"]),
    "either": ({"type": ["string", "boolean"], "enum": ["p", True]}, ["p", True]),
    "other": ({"$ref": "#/$defs/u"}, ["q", "r"]),
    "plain": ({"type": "string", "enum": ["s", None, "null"]}, ["s", "null"]),
}


@pytest.mark.parametrize("key", NAMED)
def test_values_that_a_schema_names_are_the_only_ones(key: str) -> None:
    schema, values = NAMED[key]
    parameters = {
        "properties": {key: schema}, "required": [key], "$defs": {"u": {"enum": ["q", "r"]}},
    }  # fmt: skip
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    case = Case(tools=[tool], tool_choice="required")
    for value in values:
        # a string that could be another value is written in quotes
        text = value if isinstance(value, str) and value != "3" else json.dumps(value)
        given = call("f", **{key: text})
        assert case.allows(given) and case.calls(given) == [("f", {key: value})], text
        case = Case(tools=[tool], tool_choice="required")
    for text in ("y", "5", '"x', "None"):
        assert not case.allows(call("f", **{key: text})), text


@pytest.mark.parametrize(
    ("source", "told"), [(XML, ("tools: schema keywords passed over: anyOf, pattern",)), (JSON, ())]
)
def test_what_no_grammar_of_calls_holds_is_told(source: str, told: tuple[str, ...]) -> None:
    properties = {"a": {"type": "string", "pattern": "^x"}, "n": {"type": "integer", "minimum": 1}}
    parameters = {"type": "object", "properties": properties, "anyOf": [{"type": "object"}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    assert Case(source, tools=[tool], tool_choice="required").prepared.warnings == told
    assert Case(source, tools=[STOP], tool_choice="required").prepared.warnings == ()


WHOLE = call("add", text="a </b>\n", n="5", unit="km", more='{"a": true}')


class TestRequired:
    @pytest.mark.parametrize("tags", [TAGS, TAGS[:2]])
    def test_one_or_more_calls_and_nothing_else(self, tags: tuple[str, ...]) -> None:
        case = Case(tags=tags, tools=[ADD, STOP], tool_choice="required")
        assert case.allows(WHOLE) and case.allows(WHOLE + "\n" + call("stop"))
        for wrong in ("text", "", WHOLE + "text", WHOLE[:-5], call("other"), call("add", text="a")):
            assert not case.allows(wrong)
        assert not case.allows(call("add", text="a", n="many"))
        assert not case.allows(call("add", text="a", n="1", unit="mile"))
        found = {"text": "a </b>\n", "n": 5, "unit": "km", "more": {"a": True}}
        assert case.calls(WHOLE) == [("add", found)]

    def test_only_one(self) -> None:
        case = Case(tools=[STOP], tool_choice="required", parallel_tool_calls=False)
        assert case.allows(call("stop")) and not case.allows(call("stop") + "\n" + call("stop"))

    def test_one_by_name(self) -> None:
        case = Case(tools=[ADD, STOP], tool_choice="stop")
        assert case.allows(call("stop")) and not case.allows(WHOLE)

    def test_after_reasoning(self) -> None:
        case = Case(
            tools=[STOP], tool_choice="stop", variables={"enable_thinking": True}, source=XML
        )
        assert case.allows("I stop.</think>\n\n" + call("stop"))
        assert not case.allows("I stop.</think>\n\nNo.")

    def test_the_older_form(self) -> None:
        case = Case(JSON, tools=[ADD, STOP], tool_choice="required")
        text = '<tool_call>\n{"name": "add", "arguments": {"text": "a", "n": 1}}\n</tool_call>'
        assert case.allows(text) and not case.allows(WHOLE)
        assert not case.allows(text.replace("1", '"many"'))
        assert case.calls(text) == [("add", {"text": "a", "n": 1})]


class TestStrict:
    def test_text_is_free_and_calls_are_not(self) -> None:
        case = Case(tools=[ADD, STOP])
        assert case.allows("any text, then\n" + WHOLE)
        assert not case.allows("any text, then\n" + call("add", text="a"))
        assert case.next("hm <tool_call>") == {"\n"}

    def test_they_may_be_forbidden(self) -> None:
        with pytest.raises(AssertionError):
            Case(tools=[ADD], tool_choice="none")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class TestFormat:
    def test_of_an_answer(self) -> None:
        case = Case(format=Format("json_schema", SCHEMA))
        assert case.allows('{"a": 1}') and not case.allows('{"a": "1"}')

    def test_after_reasoning(self) -> None:
        case = Case(format=Format("json_object"), variables={"enable_thinking": True})
        assert case.allows('So.\n</think>\n\n{"b": 2}') and not case.allows("So.</think>2")

    def test_or_calls(self) -> None:
        for asked in (Format("json_schema", SCHEMA), Format("json_object")):
            case = Case(tools=[ADD], format=asked)
            assert case.allows('{"a": 1}') and case.allows(WHOLE) and not case.allows("text")

    def test_a_grammar_beside_tools_is_refused(self) -> None:
        with pytest.raises(RequestError, match="not together with tools"):
            Case(tools=[ADD], format=Format("regex", "ab"))

    def test_an_answer_that_must_not_end_has_none(self) -> None:
        with pytest.raises(RequestError, match="ignore_eos"):
            Case(format=Format("json_object"), ignore_eos=True)


PATCH = {
    "type": "function",
    "function": {
        "name": "patch",
        "parameters": {"properties": {"input": {"type": "string"}}, "required": ["input"]},
    },
}


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(("grammar", "good", "bad"), [
    ('start: line+\nline: "+" /[a-z]*/ "\\n"', "+a\n+\n", "-a\n"),
    (r"start: /[0-9]{3}\/x/", "123/x", "12/x"),
])  # fmt: skip
def test_the_input_of_a_tool_follows_its_grammar(
    choice: str, grammar: str, good: str, bad: str
) -> None:
    case = Case(tools=[STOP, PATCH], inputs={"patch": grammar}, tool_choice=choice)

    def call(text: str) -> str:
        return (
            "<tool_call>\n<function=patch>\n<parameter=input>\n"
            f"{text}\n</parameter>\n</function>\n</tool_call>"
        )

    assert case.allows(call(good)) and not case.allows(call(bad))
    assert case.allows("<tool_call>\n<function=stop>\n</function>\n</tool_call>")


def test_a_wrong_grammar_of_an_input_is_an_error() -> None:
    with pytest.raises(RequestError, match="tools: the grammar"):
        Case(tools=[PATCH], inputs={"patch": "start: ("})
